"""Edges of advantages and losses: what does not count, parts that add up, refusals of wrong input."""

from __future__ import annotations

import math

import pytest
import torch
from float64 import F64, all_count, bools, tensor

from chatgpt.functional.advantages import dr_grpo, grpo, rloo, spread
from chatgpt.functional.losses import gspo_policy_loss, truncated_importance_weights
from chatgpt.functional.masking import masked_sum
from chatgpt.functional.ppo import (
    aggregate,
    aggregation_count,
    clipped_policy_loss,
    clipped_value_loss,
    gae,
    kl_penalty,
    policy_stats,
    token_rewards,
)


def test_results_own_their_memory():
    """Records outlive the padded work; a view would keep all of it alive."""
    rewards = [tensor(1.0), tensor(1, 2, 3)]
    advantages, returns = gae(rewards, [tensor(0.0), tensor(0, 0, 0)], all_count(rewards))
    assert advantages[0].untyped_storage().nbytes() == returns[0].untyped_storage().nbytes() == 8


def test_groups_in_any_order_and_independent_of_each_other():
    scores, groups = tensor(1, 10, 3, 5), torch.tensor([2, 1, 2, 1])
    for estimator in (dr_grpo, grpo, rloo):
        whole = estimator(scores, groups)
        assert torch.equal(whole[[0, 2]], estimator(scores[[0, 2]], groups[[0, 2]]))
    assert dr_grpo(scores, groups).tolist() == [-1, 2.5, 1, -2.5]


def test_grpo_of_equal_scores_and_of_one_response_is_zero():
    got = grpo(torch.tensor([0.1, 0.1, 0.1, 7.0]), torch.tensor([0, 0, 0, 1]))
    assert got.abs().max().item() < 1e-9


def test_lists_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match='values has 0 sequences, 1 were expected'):
        gae([tensor(1.0)], [], [bools(1)])
    with pytest.raises(ValueError, match=r'values\[0\] must be 1-D with shape \(2,\); got \(1,\)'):
        gae([tensor(1, 2)], [tensor(1.0)], [bools(1, 1)])
    with pytest.raises(ValueError, match=r'masks\[0\] must be bool'):
        gae([tensor(1.0)], [tensor(1.0)], [tensor(1.0)])
    with pytest.raises(ValueError, match=r'token_scores\[0\] must be 1-D with shape \(1,\)'):
        token_rewards(tensor(0.0), 0.1, 0.0, bools(1), token_scores=tensor(1, 2))
    with pytest.raises(ValueError, match='one number per sequence is needed; got 2 for 1 masks'):
        spread(tensor(1, 2), [bools(1)])
    assert [t.tolist() for t in spread(tensor(2, 3), [bools(1, 0), bools(1)])] == [[2, 0], [3]]
    with pytest.raises(ValueError, match='group 3 has one response'):
        rloo(tensor(1, 2, 3), torch.tensor([3, 4, 4]))
    for estimator in (grpo, dr_grpo, rloo):
        with pytest.raises(ValueError, match='scores and groups must be 1-D and of one length'):
            estimator(tensor(1, 2), torch.tensor([0]))


@pytest.mark.parametrize('mode', ['token', 'sequence', 'sequence_sum'])
def test_shares_of_micro_batches_add_up_to_the_loss_of_the_batch(mode):
    torch.manual_seed(0)
    lengths, mask = [3, 1, 4, 2], bools(1, 1, 0, 1, 0, 1, 1, 1, 0, 0)  # nothing counts in the last sequence
    loss = torch.randn(10, dtype=F64)
    rows = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    total = aggregation_count(mask, rows, 4, mode, constant_length=8)
    assert total == {'token': 6, 'sequence': 3, 'sequence_sum': 24}[mode]
    whole = aggregate(loss, mask, rows, 4, mode, total).item()
    halves = [(loss[:4], mask[:4], rows[:4]), (loss[4:], mask[4:], rows[4:] - 2)]
    assert sum(aggregate(x, m, r, 2, mode, total).item() for x, m, r in halves) == pytest.approx(whole)
    assert sum(aggregation_count(m, r, 2, mode, 8) for _, m, r in halves) == total
    # Negative control: the mask shifted by one.
    assert aggregate(loss, mask.roll(1), rows, 4, mode, total).item() != pytest.approx(whole)


def test_an_exploding_ratio_of_a_token_that_does_not_count_leaves_gradients_finite():
    new = torch.tensor([-0.1, -1.0]).requires_grad_()
    old = torch.tensor([-0.1, -1000.0])
    loss = clipped_policy_loss(new, old, torch.tensor([1.0, -1.0]))
    masked_sum(loss, bools(1, 0)).backward()
    assert new.grad.tolist() == pytest.approx([-1.0, 0.0])


def test_an_exploding_kl_of_a_token_that_does_not_count_leaves_gradients_finite():
    new = torch.tensor([-1.0, -200.0, -45.0]).requires_grad_()
    reference = torch.tensor([-0.5, -1.0, -1.0])
    penalty = kl_penalty(new, reference, 'k3')
    assert torch.isfinite(penalty).all()
    masked_sum(penalty, bools(1, 0, 0)).backward()
    assert new.grad.tolist() == pytest.approx([1 - math.exp(0.5), 0.0, 0.0])
    # A token far less likely under the reference than under the policy is no such case: value and gradient are the
    # formula's.
    likely = torch.tensor([-0.5]).requires_grad_()
    far = kl_penalty(likely, torch.tensor([-300.0]), 'k3')
    far.sum().backward()
    assert (far.item(), likely.grad.item()) == pytest.approx((298.5, 1.0))


def test_the_gradient_of_gspo_goes_through_the_sequences_mean():
    new = tensor(-1.0, -2.0, -0.5, -0.7).requires_grad_()
    old, advantages = tensor(-1.1, -1.7, -0.4, -0.9), tensor(2, 2, 2, -1)
    mask, rows = bools(1, 1, 0, 1), torch.tensor([0, 0, 0, 1])
    ratios = [math.exp((0.1 - 0.3) / 2), math.exp(0.2)]
    loss = gspo_policy_loss(new, old, advantages, mask, rows, 2, eps_low=0.5, eps_high=0.5)
    aggregate(loss, mask, rows, 2, 'sequence', 2).backward()
    # Each of the two tokens moves the sequence's ratio by half.
    assert new.grad.tolist() == pytest.approx([-ratios[0] / 2, -ratios[0] / 2, 0, ratios[1] / 2])


def test_policy_stats_add_up_over_micro_batches():
    torch.manual_seed(0)
    new, old, mask = torch.randn(6), torch.randn(6), bools(1, 0, 1, 1, 1, 0)
    whole = policy_stats(new, old, mask, eps_low=0.2, eps_high=0.5)
    cuts = (slice(0, 2), slice(2, 5), slice(5, 6))
    parts = [policy_stats(new[s], old[s], mask[s], eps_low=0.2, eps_high=0.5) for s in cuts]
    for i in range(5):
        assert sum(p[i].item() for p in parts) == pytest.approx(whole[i].item())
    assert min(p.ratio_min.item() for p in parts) == whole.ratio_min.item()
    assert max(p.ratio_max.item() for p in parts) == whole.ratio_max.item()
    nothing = parts[2]
    assert nothing.ratio_min.item() == math.inf and nothing.ratio_max.item() == -math.inf and nothing[0].item() == 0


def test_value_clip_passes_no_gradient_beyond_its_range_when_the_clipped_error_is_larger():
    value = tensor(0.9).requires_grad_()  # old 0, return 3: the clipped value 0.4 is farther away
    clipped_value_loss(value, tensor(0.0), tensor(3.0), 0.4).sum().backward()
    assert value.grad.item() == 0
    value.grad = None
    clipped_value_loss(value, tensor(0.0), tensor(3.0)).sum().backward()
    assert value.grad.item() == pytest.approx(0.9 - 3)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda x, m, r: aggregate(x, m, r, 1, 'tokens', 1), "'tokens' is not known; choose one of"),
        (lambda x, m, r: aggregate(x, m, r, 1, 'token', 0), 'normalizer=0 must be positive'),
        (lambda x, m, r: aggregation_count(m, r, 1, 'sequence_sum'), 'constant.length of at least 1'),
        (lambda x, m, r: clipped_policy_loss(x, x, x, eps_low=1.0), 'eps_low=1.0'),
        (lambda x, m, r: clipped_policy_loss(x, x, x, eps_high=-0.1), 'eps_high=-0.1'),
        (lambda x, m, r: clipped_policy_loss(x, x, x, dual_clip=1.0), 'dual_clip=1.0 must be greater than 1'),
        (lambda x, m, r: clipped_value_loss(x, x, x, 0.0), 'value clip 0.0 must be positive'),
        (lambda x, m, r: truncated_importance_weights(x, x, cap=0.0), 'cap=0.0 must be positive'),
    ],
)
def test_wrong_settings_of_losses_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(tensor(0.0), bools(1), torch.tensor([0]))
