"""The example of docs/environments.md is complete and plays as its page says."""

from __future__ import annotations

import re
from pathlib import Path

from chatgpt.environments import find_environment
from chatgpt.environments.registry import make_environment

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'environments.md'


def test_the_example_plays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r'```python\n(# guess\.py\n.*?)```', PAGE.read_text(), re.DOTALL)
    Path('guess.py').write_text(code)
    factory = find_environment('guess.py:Guess')
    game, other = make_environment(factory), make_environment(factory)
    assert game.reset(0) == other.reset(0) == 'guess a number from 1 to 9\n'
    game.number = other.number = 5
    assert game.step(' 3') == ('\nhigher\n', {'right': 0.0, 'form': 0.1}, False, False, {'success': False})
    assert game.step('5')[1:] == ({'right': 1.0, 'form': 0.1}, True, False, {'success': True})
    assert [other.step('6')[2] for _ in range(3)] == [False, False, True]
