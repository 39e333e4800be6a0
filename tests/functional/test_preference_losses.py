"""The DPO family, KTO, ORPO, SimPO and the losses of reward models against slow loops in plain Python, with negative
controls that must differ."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from float64 import tensor

from chatgpt.functional import preference
from chatgpt.functional.losses import pairwise_log_exp_loss, pairwise_log_sigmoid_loss, ranked_pairs, right_order

CHOSEN, REJECTED = [-10.0, -3.0, -40.0], [-12.0, -1.0, -41.0]
REF_CHOSEN, REF_REJECTED = [-11.0, -2.5, -38.0], [-11.5, -2.0, -40.0]
MARGINS = [1.5, -1.5, -1.0]  # (c - rc) - (r - rr), by hand


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_margin_by_hand_and_with_policy_and_reference_swapped():
    margin = preference.dpo_margin(tensor(*CHOSEN), tensor(*REJECTED), tensor(*REF_CHOSEN), tensor(*REF_REJECTED))
    assert margin.tolist() == pytest.approx(MARGINS)
    wrong = preference.dpo_margin(tensor(*REF_CHOSEN), tensor(*REF_REJECTED), tensor(*CHOSEN), tensor(*REJECTED))
    assert wrong.tolist() == pytest.approx([-m for m in MARGINS])


def smoothed(m: float, b: float, rest: float) -> float:
    return -0.9 * math.log(sigmoid(b * m)) - rest * math.log(1 - sigmoid(b * m))


SLOW = {
    preference.dpo_loss: lambda m, b: -math.log(sigmoid(b * m)),
    preference.ipo_loss: lambda m, b: (m - 1 / (2 * b)) ** 2,
    preference.hinge_loss: lambda m, b: max(0.0, 1 - b * m),
    preference.cdpo_loss: lambda m, b: smoothed(m, b, 0.1),
    preference.robust_dpo_loss: lambda m, b: smoothed(m, b, -0.1) / 0.8,
}


@pytest.mark.parametrize('loss', SLOW, ids=lambda f: f.__name__)
@pytest.mark.parametrize('beta', [0.1, 1.0])
def test_margin_losses_equal_the_slow_formula(loss, beta):
    margins = [*MARGINS, 0.0, 7.0]
    got = loss(tensor(*margins), beta=beta).tolist()
    assert got == pytest.approx([SLOW[loss](m, beta) for m in margins])
    # Negative control: chosen and rejected swapped.
    assert loss(-tensor(*margins), beta=beta).tolist() != pytest.approx(got)


def test_large_margins_stay_finite():
    margin = torch.tensor([1e4, -1e4], requires_grad=True)
    for loss in SLOW:
        value = loss(margin, beta=1.0)
        value.sum().backward()
        assert torch.isfinite(value).all() and torch.isfinite(margin.grad).all()


def test_kto_by_hand():
    r, z0, beta = tensor(0.7, -0.4), 0.2, 0.5
    mask = torch.tensor([True, False])
    got = preference.kto_loss(r, mask, z0, beta=beta, desirable_weight=1.0, undesirable_weight=1.5)
    expected = [1 - sigmoid(beta * (0.7 - z0)), 1.5 * (1 - sigmoid(beta * (z0 + 0.4)))]
    assert got.tolist() == pytest.approx(expected)
    # Negative controls: labels flipped; z0 forgotten.
    assert preference.kto_loss(r, ~mask, z0, beta=beta, undesirable_weight=1.5).tolist() != pytest.approx(expected)
    assert preference.kto_loss(r, mask, 0.0, beta=beta, undesirable_weight=1.5).tolist() != pytest.approx(expected)


def test_orpo_equals_the_definition_by_probabilities():
    chosen, rejected = [-0.2, -1.5, -30.0], [-0.9, -0.01, -25.0]

    def log_odds(logp: float) -> float:
        return math.log(math.exp(logp) / (1 - math.exp(logp)))

    expected = [-c - 0.3 * math.log(sigmoid(log_odds(c) - log_odds(r))) for c, r in zip(chosen, rejected, strict=True)]
    assert preference.orpo_loss(tensor(*chosen), tensor(*rejected), weight=0.3).tolist() == pytest.approx(expected)
    # Negative control: log-probs instead of log-odds.
    wrong = [-c - 0.3 * math.log(sigmoid(c - r)) for c, r in zip(chosen, rejected, strict=True)]
    assert wrong[:2] != pytest.approx(expected[:2])


def test_orpo_of_certain_and_of_impossible_responses_is_finite_with_its_gradient():
    for dtype in (torch.float32, torch.float64):
        chosen = torch.tensor([0.0, -1e-9, -200.0, -0.69314718], dtype=dtype, requires_grad=True)
        rejected = torch.tensor([-200.0, 0.0, 0.0, -0.69314719], dtype=dtype, requires_grad=True)
        loss = preference.orpo_loss(chosen, rejected)
        loss.sum().backward()
        for t in (loss, chosen.grad, rejected.grad):
            assert torch.isfinite(t).all()


def test_simpo_by_hand():
    expected = [-math.log(sigmoid(2 * (-0.5 + 0.9) - 1.2))]
    assert preference.simpo_loss(tensor(-0.5), tensor(-0.9), beta=2.0, gamma=1.2).tolist() == pytest.approx(expected)
    # Negative control: the margin with the wrong sign.
    assert preference.simpo_loss(tensor(-0.5), tensor(-0.9), beta=2.0, gamma=-1.2).tolist() != pytest.approx(expected)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda m: preference.dpo_loss(m, beta=0.0), 'beta=0.0 must be positive'),
        (lambda m: preference.cdpo_loss(m, label_smoothing=0.5), r'label_smoothing=0.5 must lie in \[0, 0.5\)'),
        (lambda m: preference.robust_dpo_loss(m, label_smoothing=-0.1), 'label_smoothing=-0.1'),
        (lambda m: preference.kto_loss(m, torch.ones(1), 0.0), 'desirable_mask must be bool'),
    ],
)
def test_wrong_settings_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(tensor(0.0))


BETTER, WORSE = [1.0, -0.5, 3.0], [0.0, 0.5, 2.9]


def test_both_forms_equal_the_slow_formula():
    slow = [math.log(1 + math.exp(r - c)) for c, r in zip(BETTER, WORSE, strict=True)]
    assert pairwise_log_sigmoid_loss(tensor(*BETTER), tensor(*WORSE)).tolist() == pytest.approx(slow)
    assert pairwise_log_exp_loss(tensor(*BETTER), tensor(*WORSE)).tolist() == pytest.approx(slow)
    # Negative control: the pair swapped.
    assert pairwise_log_sigmoid_loss(tensor(*WORSE), tensor(*BETTER)).tolist() != pytest.approx(slow)
    assert pairwise_log_exp_loss(tensor(*WORSE), tensor(*BETTER)).tolist() != pytest.approx(slow)


def test_margin_requires_a_larger_difference():
    slow = [-math.log(1 / (1 + math.exp(-(c - r - 0.7)))) for c, r in zip(BETTER, WORSE, strict=True)]
    assert pairwise_log_sigmoid_loss(tensor(*BETTER), tensor(*WORSE), 0.7).tolist() == pytest.approx(slow)
    assert pairwise_log_sigmoid_loss(tensor(*BETTER), tensor(*WORSE), tensor(0.7, 0.7, 0.7)).tolist() == pytest.approx(
        slow
    )
    assert pairwise_log_sigmoid_loss(tensor(*BETTER), tensor(*WORSE), -0.7).tolist() != pytest.approx(slow)


@pytest.mark.parametrize('loss', [pairwise_log_sigmoid_loss, pairwise_log_exp_loss])
def test_scores_far_apart_give_neither_nan_nor_infinity(loss):
    chosen = torch.tensor([500.0, -500.0], requires_grad=True)
    value = loss(chosen, torch.tensor([-500.0, 500.0]))
    value.sum().backward()
    assert value.tolist() == pytest.approx([0.0, 1000.0])
    assert chosen.grad.tolist() == pytest.approx([0.0, -1.0])
    # Negative control: log(sigmoid(x)) overflows.
    assert not torch.isfinite(-torch.log(torch.sigmoid(torch.tensor(-1000.0))))


def test_all_pairs_of_a_prompt_with_weights_that_sum_to_one():
    groups = torch.tensor([4, 9, 4, 4, 9])
    ranks = torch.tensor([1, 0, 0, 2, 1])  # within group 4: answer 2 before 0 before 3; within 9: 1 before 4
    pairs = ranked_pairs(groups, ranks)
    slow = set()
    for i, j in combinations(range(5), 2):
        if groups[i] == groups[j] and ranks[i] != ranks[j]:
            slow.add((i, j) if ranks[i] < ranks[j] else (j, i))
    got = list(zip(pairs.better.tolist(), pairs.worse.tolist(), strict=True))
    assert len(got) == 4 and set(got) == slow
    assert dict(zip(got, pairs.weights.tolist(), strict=True)) == pytest.approx(
        {(2, 0): 1 / 3, (2, 3): 1 / 3, (0, 3): 1 / 3, (1, 4): 1.0}
    )
    # Negative control: a higher rank as the better one.
    assert set(zip(pairs.worse.tolist(), pairs.better.tolist(), strict=True)) != slow


def test_equal_scores_count_half_and_padding_nothing():
    margin, mask = torch.tensor([0.5, -0.5, 0.0, 3.0]), torch.tensor([True, True, True, False])
    assert float(right_order(margin, mask)) == 1.5


def test_ties_and_single_responses_make_no_pair():
    pairs = ranked_pairs(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]))
    assert len(pairs.better) == len(pairs.worse) == len(pairs.weights) == 0
