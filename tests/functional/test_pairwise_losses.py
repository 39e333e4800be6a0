"""Losses of reward models: pairwise forms and ranked answers."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from float64 import tensor

from chatgpt.functional.losses import pairwise_log_exp_loss, pairwise_log_sigmoid_loss, ranked_pairs

CHOSEN, REJECTED = [1.0, -0.5, 3.0], [0.0, 0.5, 2.9]


def test_both_forms_equal_the_slow_formula():
    slow = [math.log(1 + math.exp(r - c)) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    assert pairwise_log_sigmoid_loss(tensor(*CHOSEN), tensor(*REJECTED)).tolist() == pytest.approx(slow)
    assert pairwise_log_exp_loss(tensor(*CHOSEN), tensor(*REJECTED)).tolist() == pytest.approx(slow)
    # Negative control: the pair the wrong way round.
    assert pairwise_log_sigmoid_loss(tensor(*REJECTED), tensor(*CHOSEN)).tolist() != pytest.approx(slow)
    assert pairwise_log_exp_loss(tensor(*REJECTED), tensor(*CHOSEN)).tolist() != pytest.approx(slow)


def test_margin_asks_for_more_difference():
    slow = [-math.log(1 / (1 + math.exp(-(c - r - 0.7)))) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    assert pairwise_log_sigmoid_loss(tensor(*CHOSEN), tensor(*REJECTED), 0.7).tolist() == pytest.approx(slow)
    assert pairwise_log_sigmoid_loss(
        tensor(*CHOSEN), tensor(*REJECTED), tensor(0.7, 0.7, 0.7)
    ).tolist() == pytest.approx(slow)
    assert pairwise_log_sigmoid_loss(tensor(*CHOSEN), tensor(*REJECTED), -0.7).tolist() != pytest.approx(slow)


@pytest.mark.parametrize('loss', [pairwise_log_sigmoid_loss, pairwise_log_exp_loss])
def test_scores_far_apart_give_neither_nan_nor_infinity(loss):
    chosen = torch.tensor([500.0, -500.0], requires_grad=True)
    value = loss(chosen, torch.tensor([-500.0, 500.0]))
    value.sum().backward()
    assert value.tolist() == pytest.approx([0.0, 1000.0])
    assert chosen.grad.tolist() == pytest.approx([0.0, -1.0])
    # Negative control: the logarithm of a sigmoid, written out, does not survive this.
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
    # Negative control: higher rank taken as better.
    assert set(zip(pairs.worse.tolist(), pairs.better.tolist(), strict=True)) != slow


def test_ties_and_lonely_answers_make_no_pair():
    pairs = ranked_pairs(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]))
    assert len(pairs.better) == len(pairs.worse) == len(pairs.weights) == 0
