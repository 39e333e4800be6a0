"""ILQL's losses against slow loops in plain Python, with negative controls that must differ."""

from __future__ import annotations

import math

import pytest
import torch
from float64 import tensor

from chatgpt.functional.ilql import awac_loss, cql_loss, expectile_value_loss, ilql_logits, min_q, next_values, td_loss
from chatgpt.functional.logprobs import chunked_logprobs


def test_successor_is_the_next_token_that_counts_of_the_same_sequence():
    values = tensor(1, 2, 3, 4, 5, 6)
    rows = torch.tensor([0, 0, 0, 1, 1, 2])
    everything = torch.ones(6, dtype=torch.bool)
    assert next_values(values, everything, rows).tolist() == [2, 3, 0, 5, 0, 0]
    # The middle token of sequence 0 is not a step: the successor of the first is the third.
    mask = torch.tensor([True, False, True, True, True, False])
    assert next_values(values, mask, rows).tolist() == [3, 0, 0, 5, 0, 0]
    # Negative control: a shift that ignores the ends of sequences.
    assert torch.roll(values, -1).tolist()[:5] != next_values(values, everything, rows).tolist()[:5]
    assert next_values(values, torch.zeros(6, dtype=torch.bool), rows).tolist() == [0] * 6


def test_td_loss_by_hand_with_a_constant_target():
    q, v = tensor(0.5, 1.0).requires_grad_(), tensor(2.0, 0.0).requires_grad_()
    rewards = tensor(0.1, 3.0)
    loss = td_loss(q, rewards, v, gamma=0.9)
    assert loss.tolist() == pytest.approx([(0.5 - (0.1 + 0.9 * 2.0)) ** 2, (1.0 - 3.0) ** 2])
    loss.sum().backward()
    assert v.grad is None
    assert q.grad.tolist() == pytest.approx([2 * (0.5 - 1.9), 2 * (1.0 - 3.0)])
    # Negative control: reward with the wrong sign.
    assert td_loss(q, -rewards, v, gamma=0.9).tolist() != pytest.approx(loss.tolist())


def test_expectile_loss_by_hand():
    v, q = tensor(0.0, 0.0), tensor(2.0, -3.0).requires_grad_()
    assert expectile_value_loss(v, q, tau=0.8).tolist() == pytest.approx([0.8 * 4, 0.2 * 9])
    # Negative control: swapped arguments.
    assert expectile_value_loss(q, v, tau=0.8).tolist() == pytest.approx([0.2 * 4, 0.8 * 9])
    value = tensor(1.0).requires_grad_()
    expectile_value_loss(value, q[:1], tau=0.8).sum().backward()
    assert q.grad is None
    assert value.grad.item() == pytest.approx(-2 * 0.8 * (2.0 - 1.0))


def test_cql_is_cross_entropy_and_equals_the_chunked_path():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    q_all, ids = hidden @ weight.T, torch.tensor([0, 6, 3, 3, 1])
    slow = [
        math.log(sum(math.exp(x) for x in row)) - row[a] for row, a in zip(q_all.tolist(), ids.tolist(), strict=True)
    ]
    assert cql_loss(q_all, ids).tolist() == pytest.approx(slow)
    chunked, _ = chunked_logprobs(hidden, lambda h: h @ weight.T, ids, chunk_size=2)
    assert (-chunked).tolist() == pytest.approx(slow)
    # Negative control: ids shifted by one.
    assert cql_loss(q_all, ids.roll(1)).tolist() != pytest.approx(slow)


def test_awac_by_hand_with_a_constant_weight():
    logprobs, q, v = tensor(-1.0, -2.0).requires_grad_(), tensor(1.0, 0.0).requires_grad_(), tensor(0.5, 0.25)
    loss = awac_loss(logprobs, q, v, beta=2.0)
    assert loss.tolist() == pytest.approx([math.exp(1.0) * 1.0, math.exp(-0.5) * 2.0])
    loss.sum().backward()
    assert q.grad is None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(1.0), -math.exp(-0.5)])
    assert awac_loss(logprobs, q, v).tolist() == pytest.approx([1.0, 2.0])
    assert awac_loss(logprobs, q, v, beta=2.0, max_weight=1.5).tolist() == pytest.approx([1.5, math.exp(-0.5) * 2.0])
    # Negative control: advantage with the wrong sign.
    assert awac_loss(logprobs, q, v, beta=-2.0).tolist() != pytest.approx(loss.tolist())


def test_min_q_is_elementwise():
    assert min_q([tensor(1, 5), tensor(2, 3), tensor(9, 4)]).tolist() == [1, 3]
    assert min_q([tensor(1, 5)]).tolist() == [1, 5]
    with pytest.raises(ValueError, match='at least one Q head'):
        min_q([])


def test_decoding_logits_shift_the_policy_by_advantage():
    logits = tensor(0.0, math.log(3.0))[None]  # probabilities 1/4 and 3/4
    got = ilql_logits(logits, tensor(5.0, 1.0)[None], tensor(2.0), beta=0.5)
    assert got[0].tolist() == pytest.approx([math.log(0.25) + 1.5, math.log(0.75) - 0.5])
    # β = 0 is the policy; a large β is greedy on Q although the policy prefers the other token.
    assert ilql_logits(logits, tensor(3.0, 1.0)[None], tensor(2.0), beta=0.0).argmax().item() == 1
    assert ilql_logits(logits, tensor(3.0, 1.0)[None], tensor(2.0), beta=100.0).argmax().item() == 0


@pytest.mark.parametrize('tau', [0.0, 1.0, -0.5])
def test_tau_outside_its_range_is_refused(tau):
    with pytest.raises(ValueError, match='must lie between 0 and 1'):
        expectile_value_loss(tensor(0.0), tensor(0.0), tau=tau)
