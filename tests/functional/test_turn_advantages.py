"""GAE over turns, a separate λ of the critic and a λ by length: values by hand, slow float64 loops, and independence of
masked tokens and other sequences."""

from __future__ import annotations

import math

import pytest
import torch
from float64 import F64, all_count, bools, tensor

from chatgpt.functional.advantages import gae_over_turns, length_lam, reinforce_pp
from chatgpt.functional.ppo import gae

NAN = math.nan


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def slow_turns(rewards, values, counts, turns, gamma, lam, value_lam):
    """The definition, turn by turn, as sums of temporal differences."""
    numbers = sorted({turns[t] for t in range(len(rewards)) if counts[t]})
    tokens = {k: [t for t in range(len(rewards)) if counts[t] and turns[t] == k] for k in numbers}
    totals = {k: sum(rewards[t] for t in tokens[k]) for k in numbers}
    states = {k: values[tokens[k][0]] for k in numbers}
    deltas = []
    for i, k in enumerate(numbers):
        following = states[numbers[i + 1]] if i + 1 < len(numbers) else 0.0
        deltas.append(totals[k] + gamma * following - states[k])
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for i, k in enumerate(numbers):
        own = sum((gamma * lam) ** j * d for j, d in enumerate(deltas[i:]))
        target = states[k] + sum((gamma * value_lam) ** j * d for j, d in enumerate(deltas[i:]))
        for t in tokens[k]:
            advantages[t] = own
            returns[t] = target - sum(rewards[u] for u in tokens[k] if u < t)
    return advantages, returns


def episodes(generator: torch.Generator) -> tuple[list, list, list, list]:
    """Returns four responses: three turns with observations, one turn, adjacent turns, and one with a masked first
    turn."""
    masks = [bools(1, 1, 0, 0, 1, 0, 1, 1, 1), bools(1, 1, 1), bools(1, 1, 1, 1), bools(0, 0, 0, 1, 1)]
    turns = [ints(0, 0, -1, -1, 1, -1, 2, 2, 2), ints(0, 0, 0), ints(0, 0, 1, 1), ints(0, 0, -1, 1, 1)]
    rewards = [torch.randn(len(m), generator=generator, dtype=F64) for m in masks]
    values = [torch.randn(len(m), generator=generator, dtype=F64) for m in masks]
    return rewards, values, masks, turns


def test_turns_equal_the_sum_of_the_definition():
    rewards, values, masks, turns = episodes(torch.Generator().manual_seed(0))
    advantages, returns = gae_over_turns(rewards, values, masks, turns, gamma=0.9, lam=0.8, value_lam=0.97)
    for i in range(4):
        a, r = slow_turns(*(x[i].tolist() for x in (rewards, values, masks, turns)), 0.9, 0.8, 0.97)
        assert advantages[i].tolist() == pytest.approx(a)
        assert returns[i].tolist() == pytest.approx(r)
    # Negative controls: values shifted by a token, a mask without a turn's last token.
    for wrong_values, wrong_masks in (([v.roll(1) for v in values], masks), (values, [m & m.roll(-1) for m in masks])):
        wrong = gae_over_turns(rewards, wrong_values, wrong_masks, turns, gamma=0.9, lam=0.8)[0][0]
        assert wrong[0].item() != pytest.approx(advantages[0][0].item())


@pytest.mark.parametrize('garbage', [NAN, math.inf, 1e30])
def test_observations_are_never_read(garbage):
    rewards, values, masks, turns = episodes(torch.Generator().manual_seed(2))
    for estimator in (
        lambda r, v: gae_over_turns(r, v, masks, turns, gamma=0.9, lam=0.8, value_lam=1.0),
        lambda r, v: gae(r, v, masks, gamma=0.9, lam=length_lam([6, 3, 4, 2], 0.5), value_lam=1.0),
        lambda r, v: reinforce_pp(r, masks, gamma=0.9),
    ):
        dirty = [
            [torch.where(m, x, torch.full_like(x, garbage)) for x, m in zip(lists, masks, strict=True)]
            for lists in (rewards, values)
        ]
        for clean, seen in zip(estimator(rewards, values), estimator(*dirty), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(clean, seen, strict=True))


def test_a_response_does_not_depend_on_others_or_their_order_to_the_bit():
    rewards, values, masks, turns = episodes(torch.Generator().manual_seed(4))
    lists = [[x.float() for x in rewards], [x.float() for x in values], masks, turns]
    together = gae_over_turns(*lists, gamma=0.9, lam=[0.5, 0.6, 0.7, 0.8], value_lam=0.9)
    turned = gae_over_turns(*(x[::-1] for x in lists), gamma=0.9, lam=[0.8, 0.7, 0.6, 0.5], value_lam=0.9)
    for i, lam in enumerate((0.5, 0.6, 0.7, 0.8)):
        alone = gae_over_turns(*(x[i : i + 1] for x in lists), gamma=0.9, lam=[lam], value_lam=0.9)
        for a, b, c in zip(alone, together, turned, strict=True):
            assert torch.equal(a[0], b[i])
            assert torch.equal(a[0], c[3 - i])


def test_nothing_that_counts_gives_zeros():
    advantages, returns = gae_over_turns(
        [tensor(1, 2), tensor(3.0)], [tensor(1, 2), tensor(1.0)], [bools(0, 0), bools(1)], [ints(0, 0), ints(0)]
    )
    assert advantages[0].tolist() == returns[0].tolist() == [0, 0]
    assert advantages[1].tolist() == [2]
    assert gae_over_turns([], [], [], []) == ([], []) == gae([], [], [])
    assert [x[0].tolist() for x in gae([tensor(1, 2)], [tensor(3, 4)], [bools(0, 0)])] == [[0, 0], [0, 0]]


def test_the_critic_may_have_a_lambda_of_its_own():
    r, v = [tensor(1, 0, 2)], [tensor(0.5, 1, -1)]
    advantages, returns = gae(r, v, all_count(r), gamma=0.9, lam=0.2, value_lam=1.0)
    assert advantages[0].tolist() == gae(r, v, all_count(r), gamma=0.9, lam=0.2)[0][0].tolist()
    # λ = 1: discounted sums of rewards, the values cancel. 1 + 0.81 · 2, 0.9 · 2, 2
    assert returns[0].tolist() == pytest.approx([2.62, 1.8, 2.0])
    # Negative control: targets with the policy's λ depend on the critic's values.
    assert gae(r, v, all_count(r), gamma=0.9, lam=0.2)[1][0].tolist() != pytest.approx([2.62, 1.8, 2.0])


def test_a_lambda_that_follows_length():
    assert length_lam([1, 20, 40, 2000], 0.05) == pytest.approx([0, 0, 0.5, 0.99])
    assert length_lam([0, 4], 0.5) == pytest.approx([0, 0.5])
    r, v = [tensor(1, 2), tensor(1, 2, 3, 4)], [tensor(0, 1), tensor(3, 2, 1, 0)]
    m = all_count(r)
    advantages, returns = gae(r, v, m, gamma=0.9, lam=length_lam([2, 4], 0.5))
    for i, lam in enumerate((0.0, 0.5)):
        a, ret = gae(r[i : i + 1], v[i : i + 1], m[i : i + 1], gamma=0.9, lam=lam)
        assert advantages[i].tolist() == pytest.approx(a[0].tolist())
        assert returns[i].tolist() == pytest.approx(ret[0].tolist())
    # Negative control: swapped lengths.
    assert gae(r, v, m, gamma=0.9, lam=[0.5, 0.0])[0][1].tolist() != pytest.approx(advantages[1].tolist())


def test_mistakes_are_named():
    one = [tensor(1, 2)]
    with pytest.raises(ValueError, match='lam has 2 numbers for 1 sequences'):
        gae(one, one, [bools(1, 1)], lam=[0.1, 0.2])
    with pytest.raises(ValueError, match='turns must not fall'):
        gae_over_turns(one, one, [bools(1, 1)], [ints(1, 0)])
    with pytest.raises(ValueError, match='turns has 0 sequences'):
        gae_over_turns(one, one, [bools(1, 1)], [])
