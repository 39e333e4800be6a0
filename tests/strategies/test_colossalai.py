"""`ColossalAIStrategy` on the real ColossalAI, on CPU with gloo: it learns as Naive does, and where it refuses.

All checks ran on two processes in one job (`conftest.py`); each test looks at one outcome.
"""

from __future__ import annotations

import math

import pytest
import torch
from colossalai_job import TWO, outcome
from colossalai_runs import LR, distances, make_actor, naive_run, pair_of, train
from optional_packages import needs_colossalai

from chatgpt.strategies import NaiveStrategy

pytestmark = [pytest.mark.system, needs_colossalai]

PAIRWISE = ('agreement', 'clipped', 'micro-batches')


@pytest.mark.parametrize('name', [n for n in TWO if n.startswith(PAIRWISE) and 'zero' in n])
def test_zero_agrees_with_naive_in_fp32(colossalai_checks, name):
    facts = outcome(colossalai_checks, name)
    for (loss, norm), (want_loss, want_norm) in zip(facts['results'], facts['want'], strict=True):
        assert loss == pytest.approx(want_loss, rel=1e-5)
        assert norm == pytest.approx(want_norm, rel=1e-4)
    assert facts['distance'][0] <= 0.05


@pytest.mark.parametrize('name', [n for n in TWO if n.startswith(PAIRWISE) and 'gemini' in n])
def test_gemini_agrees_with_naive_in_bf16(colossalai_checks, name):
    """Tolerances. A bf16 number is off by up to u = 2^-9 of itself. Naive keeps residual streams in fp32 (autocast),
    Gemini not.

    Loss: with two blocks a state is rounded 2 + 2 + 1 times more under Gemini, each time with a random sign, so a logit
    differs by about sqrt(5) u of itself. Logits and the loss are of one size (4), and the mean over some 40 tokens
    makes it smaller: 2u = 2^-8 covers it. Norm: a gradient passes the same roundings backwards, once more per matrix:
    8u = 2^-6. Weights: Adam moves a weight by at most about lr a step whatever the size of its gradient g. Where |g| is
    below its error (8u of the typical gradient) the sign is open, and the two may be 2 lr apart; that is 8u = 1.6 % of
    the weights if gradients were uniform, so the mean is 2 * 1.6 % = 0.032 lr per step.
    """
    facts = outcome(colossalai_checks, name)
    for (loss, norm), (want_loss, want_norm) in zip(facts['results'], facts['want'], strict=True):
        assert loss == pytest.approx(want_loss, rel=2**-8)
        assert norm == pytest.approx(want_norm, rel=2**-6)
    assert facts['distance'][0] <= 2.0 and facts['distance'][1] <= 0.032
    assert facts['chunks'] == 1 if 'whole' in name else facts['chunks'] > 4


def test_tolerance_for_gemini_tells_wrong_from_right(colossalai_checks):
    """Negative control: clipped against unclipped, and one step's data against the next one's, lie outside of the
    tolerances."""
    clipped = outcome(colossalai_checks, 'clipped, gemini cpu cut')['results']
    free = outcome(colossalai_checks, 'agreement, gemini cpu cut')['results']
    assert all(abs(a - b) > 2**-8 * b for (a, _), (b, _) in zip(free[1:], free[:-1], strict=True))
    wrong = NaiveStrategy(precision='bf16', device='cpu')
    model, optimizer = pair_of(wrong)
    optimizer.param_groups[0]['lr'] = -LR
    train(wrong, model, optimizer)
    assert distances(model.state_dict(), naive_run('bf16')[1])[1] > 0.032
    assert clipped != free


def test_gemini_is_zero_in_bf16(colossalai_checks):
    """The same module in the same dtype on the same data: what is left is the order of fp32 operations in two Adam
    kernels."""
    facts = outcome(colossalai_checks, 'gemini is zero')
    for (loss, norm), (want_loss, want_norm) in zip(facts['gemini'], facts['zero'], strict=True):
        assert loss == pytest.approx(want_loss, rel=1e-4)
        assert norm == pytest.approx(want_norm, rel=1e-3)
    assert facts['distance'][0] <= 0.05


@pytest.mark.parametrize('name', ['gemini cuda whole', 'gemini cpu cut'])
def test_gemini_accumulates(colossalai_checks, name):
    facts = outcome(colossalai_checks, f'accumulation, {name}')
    assert facts['num'] > 3
    for (loss, norm), (want_loss, want_norm) in zip(facts['many'], facts['one'], strict=True):
        assert loss == pytest.approx(want_loss, rel=2**-11)
        assert norm == pytest.approx(want_norm, rel=2**-8)


def test_gemini_without_setting_gradients_aside_is_wrong(colossalai_checks):
    facts = outcome(colossalai_checks, 'accumulation, forgetful')
    assert facts['many'][0][1] < 0.5 * facts['one'][0][1]
    assert abs(facts['many'][1][0] - facts['one'][1][0]) > 2**-8 * facts['one'][1][0]


def test_gemini_in_any_order_of_calls(colossalai_checks):
    assert outcome(colossalai_checks, 'order of calls') == (True, True)


def test_outputs_are_plain(colossalai_checks):
    facts = outcome(colossalai_checks, 'outputs')
    assert facts[2] == ('PolicyOutput', {'Tensor'}, True, 'torch.bfloat16', True)
    assert facts[3] == ('PolicyOutput', {'Tensor'}, True, 'torch.float32', True)


def test_ranks_with_unequally_many_rows(colossalai_checks):
    facts = outcome(colossalai_checks, 'unequal rows')
    assert len(set(facts['rows'])) == 2, 'the ranks must differ'
    for (loss, norm), (want_loss, want_norm) in zip(facts['chunks'], facts['whole'], strict=True):
        assert loss == pytest.approx(want_loss, rel=2**-11)
        assert norm == pytest.approx(want_norm, rel=2**-8)


def test_families_and_references(colossalai_checks):
    for what, losses in outcome(colossalai_checks, 'families').items():
        half = len(losses) // 2
        for got, want in zip(losses[half:], losses[:half], strict=True):
            assert got == pytest.approx(want, rel=1e-4), what


def test_gemini_leaves_no_block_out(colossalai_checks):
    facts = outcome(colossalai_checks, 'layer drop')
    assert facts[1] == facts[2] == (0.5, [])
    drop, [(said, file)] = facts[3]
    assert drop == 0.0 and said.startswith('ColossalAIStrategy: layerdrop of the config is set to 0')
    assert file.endswith('colossalai_learning.py')  # that called `prepare`


@pytest.mark.parametrize('name', ['zero', 'gemini'])
def test_loss_scale(colossalai_checks, name):
    norms, scales, unmoved, moved, (loss, norm), scaler = outcome(colossalai_checks, f'loss scale, {name}')
    assert not any(math.isfinite(n) for n in norms) and unmoved
    assert scales == [2.0**40, 2.0**39, 2.0**38]
    assert math.isfinite(norm) and moved
    assert scaler == {'scale': 512.0, 'num_finite': 4, 'num_overflows': 0}


@pytest.mark.parametrize(('name', 'max_norm'), [('zero', math.inf), ('zero2', 0.3)])
def test_a_step_in_which_the_loss_scale_grows(colossalai_checks, name, max_norm):
    """Is divided by the scale that its gradients have, and clipped by their norm."""
    (norm, scale, want), (same_norm, grown, got) = outcome(colossalai_checks, f'growth, {name}')
    assert (scale, grown) == (64.0, 128.0) and norm == same_norm
    assert all(torch.equal(got[key], weight) for key, weight in want.items())
    before = {key: weight.detach() for key, weight in make_actor().named_parameters()}
    moved = math.sqrt(sum(float((want[key].double() - weight).square().sum()) for key, weight in before.items()))
    assert moved == pytest.approx(min(norm, max_norm), rel=1e-2)


def test_refusals(colossalai_checks):
    said = outcome(colossalai_checks, 'refusals')
    assert 'HybridAdam' in said['adamw'] and 'torch.optim.adamw.AdamW' in said['adamw']
    assert (said['made'], said['made 2']) == ('HybridAdam', 'AdamW')
    assert 'already stepped' in said['used']
    assert 'one optimizer' in said['second']
    assert 'max_norm=-1.0' in said['max_norm']
    assert 'max_exp_avg_sq' in said['amsgrad']


@pytest.mark.parametrize('name', ['zero2', 'gemini'])
def test_conformance(colossalai_checks, name):
    outcomes = outcome(colossalai_checks, f'conformance, {name}')
    assert set(outcomes.values()) == {'passed'}, outcomes
