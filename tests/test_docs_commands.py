"""The commands of docs/first_hour.md run one after another, shortened, and print the lines that the page shows.

Those of README.md and docs/command.md: tests/cli/test_command.py.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from chatgpt.launch.cli import command
from chatgpt.launch.methods import METHODS
from chatgpt.testing import byte_tokenizer, tiny_causal_lm

PAGE = Path(__file__).resolve().parents[1] / 'docs' / 'first_hour.md'
WORDS = 'one two three four five six seven eight nine ten'.split()
FEWER = {
    'dataset': ['--max_steps=2', '--log_interval=1'],
    'prompt_path': [
        '--num_episodes=2',
        '--max_timesteps=1',
        '--update_timesteps=1',
        '--experience_batch_size=4',
        '--train_batch_size=4',
    ],
}
"""flags that shorten a run, by its positional setting"""
SHOWN = r'^    ((?:\d+ examples|phase|loss|accuracy|score -|report|actor|reward_model|samples|\{"length|naive on).*)$'
"""lines of output on the page that any run prints, with numbers of its own"""


def commands() -> list[list[str]]:
    lines = re.findall(r'^    chatgpt-rlhf (.*)$', PAGE.read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines if line != 'version']


def shortened(words: list[str]) -> list[str]:
    method = METHODS[words[0]] if words[0] in METHODS else None
    return [*words, *FEWER[method.positional]] if method and '--plan' not in words else words


def write_files(folder: Path) -> None:
    """The files and the model that the page takes for granted."""
    tokens = {'vocab_size': 259, 'pad_token_id': 256, 'bos_token_id': 257, 'eos_token_id': 258}
    tiny_causal_lm('gpt2', **tokens).save_pretrained(folder / 'MODEL')
    byte_tokenizer().save_pretrained(folder / 'MODEL')
    (code,) = re.findall(r'```python\n(import re\n.*?)```', PAGE.read_text(), re.DOTALL)
    (folder / 'rewards.py').write_text(code)
    rows = {
        'chats.jsonl': [{'prompt': f'a {w}', 'response': ' good'} for w in WORDS],
        'pairs.jsonl': [{'prompt': f'a {w}', 'chosen': ' good', 'rejected': ' bad'} for w in WORDS],
    }
    for name, found in rows.items():
        (folder / name).write_text(''.join(json.dumps(row) + '\n' for row in found))
    with (folder / 'prompts.csv').open('w') as file:
        csv.writer(file).writerows([['prompt'], *([f'a {w}'] for w in WORDS)])


def words_of(line: str) -> frozenset[str]:
    """Without numbers, units of bytes, and how long the rest takes, which the last phase does not say."""
    line = re.sub(r'left \S+ \S+$|left \S+ s$|(?<=[\d.]) [KMG]iB|val \S+', '', line)
    return frozenset(re.findall(r'[A-Za-z_/]{2,}', re.sub(r'\d\S*', '', line)))


@pytest.mark.system
def test_the_commands_of_the_first_hour_run_and_print_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    printed = ''
    for words in commands():
        monkeypatch.setattr('sys.stdin', io.StringIO(''))
        monkeypatch.setattr(sys, 'argv', ['chatgpt-rlhf', *shortened(words)])
        code = 0
        try:
            command.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        shown = capsys.readouterr()
        printed += shown.out + shown.err
        assert code in ({0, 1} if words[0] == 'doctor' else {0}), (words, shown.err)
    real = {words_of(line) for line in printed.splitlines()}
    lines = re.findall(SHOWN, PAGE.read_text(), re.MULTILINE)
    assert len(lines) > 15
    missing = [line for line in lines if not any(words_of(line) <= words for words in real)]
    assert not missing, '\n'.join([*missing, '', printed[-3000:]])
