"""The games of examples/environments are found by their files, and their best players reach what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatgpt.environments import find_environment, make_environment
from chatgpt.environments.games.scores import best, random_player, score

FOLDER = Path(__file__).resolve().parents[2] / 'examples' / 'environments'
CLASSES = {'guess_word': ('GuessWord', 1.0), 'sokoban': ('Sokoban', 1.0), 'blackjack': ('Blackjack', -0.0468)}
"""class and mean return of the best play, which for blackjack is that of dynamic programming"""


def test_each_file_is_tried():
    assert {path.stem for path in FOLDER.glob('*.py')} == set(CLASSES)


@pytest.mark.parametrize('name', CLASSES)
def test_it_loads_and_plays(name):
    cls, expected = CLASSES[name]
    factory = find_environment(f'{FOLDER / name}.py:{cls}')
    assert make_environment(factory).reset(3) == make_environment(factory).reset(3)
    good, poor = (score(factory, player, episodes=200) for player in (best, random_player()))
    assert abs(good.return_mean - expected) < 2 * good.return_error + 1e-9
    assert good.return_mean > poor.return_mean + poor.return_error
