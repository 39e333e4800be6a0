"""Every shell command on the pages: the program reads it without a complaint, and it runs, or `NOT_RUN` says why not."""

from __future__ import annotations

import re

import pytest
from shell_commands import PAGES, Command, bring, commands, parse, tiny_model

ALL = [command for page in PAGES for command in commands(page)]
TYPED = [command for command in ALL if not command.is_mention]


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp('docs') / 'model')


@pytest.mark.parametrize('page', sorted({c.page for c in TYPED}))
def test_programs_read_the_commands_of_a_page(page, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = []
    for command in TYPED:
        if command.page == page:
            try:
                parse(bring(command, tmp_path, model), monkeypatch)
            except (AssertionError, ValueError, SystemExit, OSError) as error:
                wrong.append(f'{command.text}: {error} {capsys.readouterr().err}')
    assert not wrong, '\n'.join(wrong)
