"""Compares rollouts, losses and gradients from trlX's config objects with those of trlX 0.7 for the same weights,
prompts, responses and scores (trlx_numbers.json, written by compat/benchmarks/compat_trlx.py)."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path

import pytest

PEERS = Path(__file__).resolve().parents[1] / 'benchmarks' / 'peers'
sys.path.insert(0, str(PEERS))
from compat_trlx_ours import differences, is_padded, run  # noqa: E402
from compat_trlx_work import CASES, UNEQUAL  # noqa: E402

THEIRS = json.loads((Path(__file__).parent / 'trlx_numbers.json').read_text())['cases']


@pytest.fixture(scope='module')
def ours():
    return {name: run(name) for name in CASES}


@pytest.mark.parametrize('name', CASES)
def test_within_1e_5_of_trlx(ours, name):
    found = differences(ours[name], THEIRS[name], padded=is_padded(name))
    assert max(found.values()) < 1e-5, found
    if name.startswith('ppo'):
        assert {'logprobs', 'values', 'rewards', 'advantages', 'returns'} <= set(found)
    assert is_padded(name) or 'gradients' in found


def test_a_planted_fault_is_found(ours):
    """Negative control: other rewards, and one gradient with a flipped sign."""
    found = deepcopy(ours['ppo'])
    found['lists']['rewards'][0][-1] += 1e-3
    name, (norm, product, wave) = next((k, v) for k, v in found['gradients'].items() if 'mlp.c_fc.weight' in k)
    found['gradients'][name] = [norm, -product, wave]
    differs = differences(found, THEIRS['ppo'])
    assert differs['rewards'] > 1e-4 and differs['gradients'] > 1e-4
    with pytest.raises(ValueError, match='other gradients'):
        differences(ours['ppo'], THEIRS['sft'] | {'lists': THEIRS['ppo']['lists'], 'numbers': THEIRS['ppo']['numbers']})


def test_the_reference_agrees_at_initialisation(ours):
    """trlX's reference lacks the first block if all layers are trained."""
    assert ours['ppo']['reference_error_at_initialisation'] == 0.0
    assert THEIRS['ppo']['reference_error_at_initialisation'] > 1.0


def test_the_score_is_at_the_last_token(ours):
    """trlX puts it on padding if a response is shorter than the longest of its chunk."""
    name = 'ppo, unequal lengths, running'
    for text, mine, theirs in zip(
        UNEQUAL, ours[name]['lists']['rewards'], THEIRS[name]['lists']['rewards'], strict=True
    ):
        assert len(mine) == len(text) + 1  # with the end token
        longest = {' yes': False, ' nobody at': True, ' we': False, ' it is': True}[text]
        if longest:
            assert theirs == pytest.approx(mine, abs=1e-5)
        else:
            assert len(theirs) > len(mine)
            assert abs(mine[-1]) > 4 > 1 > abs(theirs[len(mine) - 1]) and abs(theirs[-1]) > 4
