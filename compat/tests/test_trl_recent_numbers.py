"""Compares PPO, DPO, SFT and reward models with numbers of TRL 1.12.0 for the same weights, prompts and responses,
recorded by `compat/benchmarks/compat_trl.py numbers`.

To exclude TRL's errors (padding in means, ends of responses), inputs have equal lengths, or fewer numbers are compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip('datasets', reason='the programs hold their rows in a datasets.Dataset')
PEERS = Path(__file__).parents[1] / 'benchmarks' / 'peers'
THEIRS: dict[str, Any] = json.loads(Path(__file__).with_name('trl_recent_numbers.json').read_text())
CLOSE = 1e-5


@pytest.fixture(scope='module')
def sides(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns (the programs with our names, their cases, folders of the models)."""
    sys.path.insert(0, str(PEERS))
    try:
        import compat_recent_ours
        import compat_recent_work

        yield compat_recent_ours, compat_recent_work, compat_recent_work.make_folders(str(tmp_path_factory.mktemp('m')))
    finally:
        sys.path.remove(str(PEERS))


@pytest.mark.parametrize('name', list(THEIRS['ppo']))
def test_an_update_of_ppo_is_that_of_trl(sides, tmp_path, name):
    ours, work, folders = sides
    case = work.PPO[name]
    found = ours.differences(ours.ppo(name, folders, str(tmp_path)), THEIRS['ppo'][name], case)
    assert {'scores', 'kl'} <= set(found)
    assert case.get('only') or {'rewards', 'values', 'returns', 'advantages', 'gradients', 'logged'} <= set(found)
    assert max(found.values()) < CLOSE, found


@pytest.mark.parametrize('name', list(THEIRS['learners']))
def test_two_steps_of_a_learner_are_those_of_trl(sides, tmp_path, name):
    ours, work, folders = sides
    found = ours.differences(ours.learner(name, folders, str(tmp_path)), THEIRS['learners'][name], work.LEARNERS[name])
    assert set(found) == {'gradients', 'logged'}
    assert max(found.values()) < CLOSE, found


def test_every_case_was_recorded(sides):
    _, work, _ = sides
    assert set(THEIRS['ppo']) == set(work.PPO) and set(THEIRS['learners']) == set(work.LEARNERS)
    assert THEIRS['versions']['trl'] == '1.12.0'
