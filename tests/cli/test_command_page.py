"""The commands that README.md and docs/command.md print run one after another, with fewer steps and a tiny model for a
hub's name."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

import pytest
from command_line import call

from chatgpt.launch.cli.command import SUBCOMMANDS
from chatgpt.launch.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    'launch': 'starts processes: tests/cli/test_launched_command.py does',
    'my_objective.py:rwr': 'in the text; tests/launch/test_methods.py has one',
}


def commands(page: str) -> list[list[str]]:
    """What follows `chatgpt-rlhf` on the lines that show a command."""
    text = (ROOT / page).read_text()
    found = re.findall(r'^    chatgpt-rlhf ((?:.*\\\n)*.*)$', text, re.MULTILINE)
    return [shlex.split(line.replace('\\\n', ' '), comments=True) for line in found]


def fewer(words: list[str], model: Path) -> list[str]:
    """The same with a folder for a hub's name, and at most one phase or step."""
    words = [str(model) if word == 'gpt2' else word for word in words]
    method = METHODS.get(words[0])
    if method is None or '--help' in words or '--help-all' in words:
        return words
    if method.positional == 'dataset':
        return [*words, '--max_steps=1']
    return [*words, '--num_episodes=1', '--max_timesteps=1', '--update_timesteps=1', '--experience_batch_size=2']


@pytest.mark.parametrize('page', ['docs/command.md', 'README.md'])
def test_the_commands_of_a_page_run(monkeypatch, capsys, tmp_path, model_folder, page):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('sys.stdin', io.StringIO('one day\n'))
    found = commands(page)
    assert len(found) >= 5
    for words in found:
        if words[0] not in ELSEWHERE:
            assert call(monkeypatch, *fewer(words, model_folder)) == 0, (words, capsys.readouterr().err)
    shown = capsys.readouterr().out
    assert 'actor written to outputs/ppo/actor; use it: ' in shown
    assert 'score_mean' in json.loads(next(line for line in shown.splitlines() if line.startswith('{"')))


def test_every_command_is_on_the_page():
    text = (ROOT / 'docs' / 'command.md').read_text()
    assert [name for name in (*METHODS, *SUBCOMMANDS) if not re.search(rf'`{re.escape(name)}`|rlhf {name}', text)] == []


@pytest.mark.parametrize('page', [*ROOT.glob('*.md'), *(ROOT / 'docs').rglob('*.md')], ids=lambda p: p.name)
def test_no_page_installs_somebody_elses_package(page):
    assert not re.search(r'pip3? install (?:-\S+ )*chatgpt(?![\w-])', page.read_text())
