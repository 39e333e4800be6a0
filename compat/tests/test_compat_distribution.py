"""The distribution: its metadata agrees with the library's, and the command has its word."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

import chatgpt
from chatgpt.launch.cli import command

COMPAT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope='module')
def project() -> dict:
    return tomllib.loads((COMPAT / 'pyproject.toml').read_text())


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, 'argv', ['chatgpt-rlhf', *words])
    try:
        command.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_its_version_is_the_librarys(project):
    assert project['project']['version'] == chatgpt.__version__
    assert project['project']['dependencies'] == [f'chatgpt-rlhf=={chatgpt.__version__}']


def test_every_package_is_found(project):
    found = set(find_packages(str(COMPAT), include=project['tool']['setuptools']['packages']['find']['include']))
    folders = {p.parent.relative_to(COMPAT).as_posix() for p in (COMPAT / 'chatgpt_compat').rglob('*.py')}
    assert found == {folder.replace('/', '.') for folder in folders}


def test_the_command_finds_its_word(project, monkeypatch, capsys):
    entry = command.SUBCOMMANDS['compat']
    assert entry.distribution == project['project']['name']
    assert project['project']['entry-points'][command.ENTRY_POINTS] == {entry.module: entry.entry_points[0].value}
    assert entry.load(entry.parser)().format_help()
    assert call(monkeypatch, 'compat', '--help') == 0
    assert capsys.readouterr().out.startswith('usage: ')
    assert call(monkeypatch, 'compat', 'runn') == 2
    assert "invalid choice: 'runn' (choose from 'run', 'check'); did you mean run?" in capsys.readouterr().err


def test_a_shell_completes_it():
    from chatgpt.launch.cli.completion import whole_parser

    (words,) = [a for a in whole_parser()._actions if a.choices]
    (verbs,) = [a for a in words.choices['compat']._actions if a.choices]
    assert set(verbs.choices) == {'run', 'check'}
