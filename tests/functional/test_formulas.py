"""Formulas of PPO and related methods: values by hand, edge cases, and errors. Slow loops with planted mistakes are in
test_negative_controls.py."""

from __future__ import annotations

import math

import pytest
import torch
from float64 import F64, all_count, bools, tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chatgpt.functional import ppo
from chatgpt.functional.advantages import dr_grpo, grpo, normalised, rloo, spread
from chatgpt.functional.logprobs import chunked_logprobs, entropy_of, logprobs_of, map_row_chunks
from chatgpt.functional.losses import (
    cispo_policy_loss,
    gspo_policy_loss,
    importance_weighted,
    importance_weights,
    kl_full,
)
from chatgpt.functional.masking import masked_mean, masked_sum, masked_var, segment_mean, segment_sum, whiten


@pytest.mark.parametrize('statistic', [masked_sum, masked_mean, masked_var])
def test_gradients_of_masked_statistics_are_finite_beside_nan(statistic):
    x = tensor(1, math.nan, 3).requires_grad_()
    statistic(x, bools(1, 0, 1)).backward()
    expected = {masked_sum: [1, 0, 1], masked_mean: [0.5, 0, 0.5], masked_var: [-2, 0, 2]}[statistic]
    assert x.grad.tolist() == pytest.approx(expected)


def test_whitening_shifts_advantages_and_only_scales_rewards():
    x, counts = tensor(1, 2, 3, 99), bools(1, 1, 1, 0)
    assert whiten(x, counts).tolist() == pytest.approx([-1, 0, 1, 0])
    assert whiten(x, counts, shift_mean=False).tolist() == pytest.approx([1, 2, 3, 0])
    # Negative control: whitening with padding included.
    assert whiten(x, bools(1, 1, 1, 1)).tolist()[:3] != pytest.approx([-1, 0, 1])


def test_no_tokens_that_count_give_zeros():
    x, mask = tensor(1, 2), bools(0, 0)
    assert masked_mean(x, mask).item() == 0 and torch.isfinite(whiten(x, mask)).all()
    assert whiten(tensor(5.0), bools(1)).item() == 0


def test_whitening_leaves_a_constant_alone_and_scales_small_numbers_up():
    mask = bools(1, 1, 1)
    same = torch.full((3,), 0.1)
    assert whiten(same, mask).abs().max().item() < 1e-6
    assert whiten(same, mask, shift_mean=False).tolist() == pytest.approx([0.1] * 3)
    one = whiten(tensor(7.0, 1.0), bools(1, 0), shift_mean=False)
    assert one.tolist() == [7, 0]
    small = tensor(1e-3, 2e-3, 3e-3)
    assert whiten(small, mask, eps=0.0).tolist() == pytest.approx([-1, 0, 1])


def test_segments_in_any_order_with_gradients():
    x, rows = tensor(1, 2, 3, 4).requires_grad_(), torch.tensor([1, 0, 1, 0])
    segment_mean(x, rows, 2, mask=bools(1, 1, 1, 0))[1].backward()
    assert x.grad.tolist() == [0.5, 0, 0.5, 0]
    assert segment_sum(x, rows, 3).tolist() == [6, 4, 0]


def test_masks_of_wrong_type_or_shape_are_refused():
    with pytest.raises(ValueError, match='mask must be bool'):
        masked_sum(tensor(1, 2), tensor(1, 0))
    with pytest.raises(ValueError, match=r'mask must have the shape of x, \(2,\); got \(1,\)'):
        whiten(tensor(1, 2), bools(1))
    with pytest.raises(ValueError, match='1-D and of one length'):
        segment_sum(tensor(1, 2), torch.tensor([0]), 1)


def test_impossible_tokens_add_nothing_to_entropy_or_its_gradient():
    logits = tensor(0.0, math.log(3.0), -math.inf)[None].requires_grad_()
    entropy = entropy_of(logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    # dH/dx_j = −p_j (log p_j + H)
    expected = [-p * (math.log(p) + entropy.item()) for p in (0.25, 0.75)] + [0.0]
    assert logits.grad[0].tolist() == pytest.approx(expected)


def test_half_precision_logits_are_computed_in_fp32():
    logits = torch.randn(3, 50).bfloat16()
    ids = torch.tensor([1, 2, 3])
    got = logprobs_of(logits, ids, 0.7)
    slow = [float(row[i] / 0.7 - torch.logsumexp(row / 0.7, 0)) for row, i in zip(logits.double(), ids, strict=True)]
    assert got.tolist() == pytest.approx(slow, abs=1e-5)
    assert got.dtype == entropy_of(logits).dtype == torch.float32


class CountingHead(torch.nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_one_chunk_is_not_recomputed_and_several_are_only_with_gradients():
    head, ids = CountingHead(4, 9), torch.arange(6)
    hidden = torch.randn(6, 4, requires_grad=True)
    chunked_logprobs(hidden, head, ids)[0].sum().backward()
    assert head.calls == 1
    chunked_logprobs(hidden, head, ids, chunk_size=6)[0].sum().backward()
    assert head.calls == 2
    head.calls = 0
    chunked_logprobs(hidden, head, ids, chunk_size=4)[0].sum().backward()
    assert head.calls == 4  # two chunks, forward and again for backward
    head.calls = 0
    with torch.no_grad():
        chunked_logprobs(hidden, head, ids, chunk_size=4)
    assert head.calls == 2


def test_no_actions_give_no_logprobs():
    empty = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = chunked_logprobs(torch.zeros(0, 4), torch.nn.Linear(4, 9), empty, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    assert chunked_logprobs(torch.zeros(0, 4), lambda h: h, empty)[0].shape == (0,)


def test_chunks_keep_the_callers_autocast():
    head, hidden, ids = torch.nn.Linear(4, 9), torch.randn(6, 4), torch.arange(6)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        whole, _ = chunked_logprobs(hidden, head, ids, chunk_size=6)
        pieces, _ = chunked_logprobs(hidden, head, ids, chunk_size=2)
    pieces.sum().backward()  # recomputes a chunk outside of the context
    assert whole.dtype == torch.float32 and torch.allclose(whole, pieces)
    assert head.weight.grad.abs().sum() > 0


def test_map_row_chunks_cuts_every_input_alike():
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a.sum(-1) * b, b + 1

    a, b = torch.randn(7, 3, dtype=F64, requires_grad=True), torch.arange(7, dtype=F64)
    first, second = map_row_chunks(fn, a, b, chunk_size=3)
    assert torch.allclose(first, a.sum(-1) * b) and second.tolist() == list(range(1, 8))
    first.sum().backward()
    assert torch.equal(a.grad, b[:, None].expand(7, 3))
    with pytest.raises(ValueError, match='chunk_size=0 must be at least 1'):
        map_row_chunks(fn, a, b, chunk_size=0)


def test_wrong_arguments_of_logprobs_are_refused():
    with pytest.raises(ValueError, match='temperature=0.0 must be positive'):
        logprobs_of(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), 0.0)
    with pytest.raises(ValueError, match=r'hidden must be \(N, D\) and ids \(N,\)'):
        chunked_logprobs(torch.zeros(2, 3), torch.nn.Linear(3, 4), torch.zeros(3, dtype=torch.int64))


def test_an_importance_weighted_estimator_has_the_gradient_of_the_kl_wherever_its_tokens_come_from():
    """Exact expectations over three tokens, sampled from the policy and from another distribution."""
    logits, ref = tensor(0.3, -0.2, 0.9), tensor(-0.5, 0.4, 0.1).log_softmax(-1)
    want = logits.clone().requires_grad_()
    value = kl_full(want, ref)
    value.backward()
    for old in (logits.log_softmax(-1), tensor(1.2, -0.7, 0.2).log_softmax(-1)):
        for kind in ('k1', 'k3'):
            x = logits.clone().requires_grad_()
            logp = x.log_softmax(-1)
            expected = (old.exp() * importance_weighted(ppo.kl_penalty(logp, ref, kind), logp, old)).sum()
            expected.backward()
            assert expected.item() == pytest.approx(value.item())
            assert torch.allclose(x.grad, want.grad)
    # Negative controls: no weight, a weight without gradient, the inverse ratio.
    for weigh in (
        lambda k, new, old: k,
        lambda k, new, old: k * (new - old).exp().detach(),
        lambda k, new, old: importance_weighted(k, old, new),
    ):
        x = logits.clone().requires_grad_()
        logp = x.log_softmax(-1)
        (old.exp() * weigh(ppo.kl_penalty(logp, ref, 'k3'), logp, old)).sum().backward()
        assert not torch.allclose(x.grad, want.grad, rtol=1e-2)


def test_k3_keeps_its_digits_near_the_reference_in_fp32():
    got = ppo.kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12]), 'k3').item()
    assert got == pytest.approx(0.5 * 2**-24 + 2**-36 / 6, rel=1e-2)
    # Negative control: r − 1 from exp has lost all digits.
    log_r = torch.tensor([2.0**-12])
    assert (log_r.exp() - 1 - log_r).item() != pytest.approx(got, rel=0.1)


def test_kinds_and_controllers_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match='k4.*choose one of'):
        ppo.kl_penalty(tensor(0.0), tensor(0.0), 'k4')
    with pytest.raises(ValueError, match='call kl_full'):
        ppo.kl_penalty(tensor(0.0), tensor(0.0), 'full')
    with pytest.raises(ValueError, match='target=0'):
        ppo.AdaptiveKLController(0.1, 0, 100)
    with pytest.raises(ValueError, match='must not be negative'):
        ppo.FixedKLController(-0.1)


def test_masked_moments_ignore_what_does_not_count_even_when_it_is_not_finite():
    x, mask = tensor(1, math.inf, 3, math.nan), torch.tensor([True, False, True, False])
    assert masked_sum(x, mask).item() == 4
    assert masked_mean(x, mask).item() == 2
    assert masked_var(x, mask).item() == 2  # ((1-2)² + (3-2)²) / (2 - 1)
    assert masked_var(x, mask, unbiased=False).item() == 1


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any new floating-point tensor."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.largest = max(self.largest, t.numel())
        return out


def test_chunks_equal_the_plain_path_and_bound_the_logits():
    torch.manual_seed(0)
    num, width, vocab = 40, 8, 100
    hidden = torch.randn(num, width, dtype=F64, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=F64, requires_grad=True)
    ids = torch.randint(vocab, (num,))
    plain = (hidden @ weight.T / 0.7).log_softmax(-1)
    plain_entropy = -(plain.exp() * plain).sum(-1)
    chosen = plain.gather(1, ids[:, None]).squeeze(1)
    (chosen.sum() + 0.1 * plain_entropy.sum()).backward()
    expected = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    with LargestTensor() as seen:
        logprobs, entropy = chunked_logprobs(
            hidden, lambda h: h @ weight.T, ids, temperature=0.7, chunk_size=4, vocab_size=vocab, with_entropy=True
        )
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
    assert torch.allclose(logprobs, chosen)
    assert torch.allclose(entropy, plain_entropy)
    assert torch.allclose(hidden.grad, expected[0])
    assert torch.allclose(weight.grad, expected[1])
    assert seen.largest <= max(4 * vocab, weight.numel())  # never (num, vocab)
    with LargestTensor() as whole:
        chunked_logprobs(hidden, lambda h: h @ weight.T, ids, chunk_size=num, vocab_size=vocab)
    assert whole.largest >= num * vocab


def test_kl_estimators_by_hand():
    logprobs, ref = tensor(-1.0), tensor(-1.5)  # log r = ref - policy = -0.5
    assert ppo.kl_penalty(logprobs, ref, 'k1').item() == 0.5
    assert ppo.kl_penalty(logprobs, ref, 'k2').item() == 0.125
    assert ppo.kl_penalty(logprobs, ref, 'k3').item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert ppo.kl_penalty(logprobs, ref, 'abs').item() == 0.5
    # Negative control: the other direction.
    assert ppo.kl_penalty(ref, logprobs, 'k1').item() == -0.5
    barred = kl_full(tensor(0.5, 0.5, 0.0).log(), tensor(0.25, 0.75, 0.0).log())
    assert barred.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


def test_adaptive_controller_by_the_published_rule():
    controller = ppo.AdaptiveKLController(0.2, 6.0, 10000)
    controller.update(12.0, 256)  # error 1 is clipped to 0.2
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 256 / 10000))
    controller.update(5.4, 256)  # error -0.1
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 0.0256) * (1 - 0.1 * 0.0256))
    before = controller.value
    controller.update(0.0, 256)  # error -1 is clipped to -0.2
    assert controller.value == pytest.approx(before * (1 - 0.2 * 0.0256))
    fixed = ppo.FixedKLController(0.1)
    fixed.update(100.0, 256)
    assert fixed.value == 0.1
    # a saved value holds for a controller with the same settings
    for other, value in (
        (ppo.AdaptiveKLController(0.2, 3.0, 100), controller.value),
        (ppo.AdaptiveKLController(0.3, 6.0, 10000), 0.3),
        (ppo.FixedKLController(0.3), 0.3),
    ):
        other.load_state_dict(controller.state_dict())
        assert other.value == value


def slow_gae(rewards, values, counts, gamma, lam):
    steps = [t for t, c in enumerate(counts) if c]
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for i, t in enumerate(steps):
        total = 0.0
        for j, k in enumerate(steps[i:]):
            following = values[steps[i + j + 1]] if i + j + 1 < len(steps) else 0.0
            total += (gamma * lam) ** j * (rewards[k] + gamma * following - values[k])
        advantages[t], returns[t] = total, total + values[t]
    return advantages, returns


def test_gae_equals_the_sum_of_the_definition_with_and_without_masks():
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 3, 6]
    rewards = [torch.randn(n, generator=generator, dtype=F64) for n in lengths]
    values = [torch.randn(n, generator=generator, dtype=F64) for n in lengths]
    masks = [bools(1), bools(1, 0, 1), bools(0, 1, 1, 0, 1, 0)]
    for given in (all_count(rewards), masks):
        advantages, returns = ppo.gae(rewards, values, given, gamma=0.9, lam=0.8)
        for i in range(3):
            a, r = slow_gae(rewards[i].tolist(), values[i].tolist(), given[i].tolist(), 0.9, 0.8)
            assert advantages[i].tolist() == pytest.approx(a)
            assert returns[i].tolist() == pytest.approx(r)
    # Negative control: a wrong sign of the value difference.
    right, _ = ppo.gae(rewards, values, masks, gamma=0.9, lam=0.8)
    wrong, _ = ppo.gae(rewards, [-v for v in values], masks, gamma=0.9, lam=0.8)
    assert wrong[2].tolist() != pytest.approx(right[2].tolist())


def test_gae_of_a_sequence_does_not_depend_on_others_to_the_bit():
    r, v = [torch.randn(5), torch.randn(9)], [torch.randn(5), torch.randn(9)]
    m = all_count(r)
    alone, together = ppo.gae(r[:1], v[:1], m[:1])[0][0], ppo.gae(r, v, m)[0][0]
    assert torch.equal(alone, together)


def test_results_own_their_memory():
    """Records outlive the padded tensors; a view would keep these alive."""
    rewards = [tensor(1.0), tensor(1, 2, 3)]
    advantages, returns = ppo.gae(rewards, [tensor(0.0), tensor(0, 0, 0)], all_count(rewards))
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


def test_two_scores_are_divided_by_their_unbiased_std():
    want = [x / (math.sqrt(2) + 1e-4) for x in (-1, 1)]
    assert grpo(tensor(1, 3), torch.tensor([0, 0])).tolist() == pytest.approx(want)
    assert normalised(tensor(1, 3)).tolist() == pytest.approx(want) and normalised(tensor(7.0)).tolist() == [0]


def test_lists_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match='values has 0 sequences, 1 were expected'):
        ppo.gae([tensor(1.0)], [], [bools(1)])
    with pytest.raises(ValueError, match=r'values\[0\] must be 1-D with shape \(2,\); got \(1,\)'):
        ppo.gae([tensor(1, 2)], [tensor(1.0)], [bools(1, 1)])
    with pytest.raises(ValueError, match=r'masks\[0\] must be bool'):
        ppo.gae([tensor(1.0)], [tensor(1.0)], [tensor(1.0)])
    with pytest.raises(ValueError, match=r'token_scores\[0\] must be 1-D with shape \(1,\)'):
        ppo.token_rewards(tensor(0.0), 0.1, 0.0, bools(1), token_scores=tensor(1, 2))
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
    lengths, mask = [3, 1, 4, 2], bools(1, 1, 0, 1, 0, 1, 1, 1, 0, 0)  # no token of the last sequence counts
    loss = torch.randn(10, dtype=F64)
    rows = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    total = ppo.aggregation_count(mask, rows, 4, mode, constant_length=8)
    assert total == {'token': 6, 'sequence': 3, 'sequence_sum': 24}[mode]
    whole = ppo.aggregate(loss, mask, rows, 4, mode, total).item()
    halves = [(loss[:4], mask[:4], rows[:4]), (loss[4:], mask[4:], rows[4:] - 2)]
    assert sum(ppo.aggregate(x, m, r, 2, mode, total).item() for x, m, r in halves) == pytest.approx(whole)
    assert sum(ppo.aggregation_count(m, r, 2, mode, 8) for _, m, r in halves) == total
    # Negative control: the mask shifted by one.
    assert ppo.aggregate(loss, mask.roll(1), rows, 4, mode, total).item() != pytest.approx(whole)


def test_an_exploding_ratio_of_a_token_that_does_not_count_leaves_gradients_finite():
    new = torch.tensor([-0.1, -1.0]).requires_grad_()
    old = torch.tensor([-0.1, -1000.0])
    loss = ppo.clipped_policy_loss(new, old, torch.tensor([1.0, -1.0]))
    masked_sum(loss, bools(1, 0)).backward()
    assert new.grad.tolist() == pytest.approx([-1.0, 0.0])


def test_an_exploding_kl_of_a_token_that_does_not_count_leaves_gradients_finite():
    new = torch.tensor([-1.0, -200.0, -45.0]).requires_grad_()
    reference = torch.tensor([-0.5, -1.0, -1.0])
    penalty = ppo.kl_penalty(new, reference, 'k3')
    assert torch.isfinite(penalty).all()
    masked_sum(penalty, bools(1, 0, 0)).backward()
    assert new.grad.tolist() == pytest.approx([1 - math.exp(0.5), 0.0, 0.0])
    # A token much less likely under the reference than under the policy is not clamped: value and gradient are exact.
    likely = torch.tensor([-0.5]).requires_grad_()
    far = ppo.kl_penalty(likely, torch.tensor([-300.0]), 'k3')
    far.sum().backward()
    assert (far.item(), likely.grad.item()) == pytest.approx((298.5, 1.0))


def test_the_gradient_of_gspo_goes_through_the_sequences_mean():
    new = tensor(-1.0, -2.0, -0.5, -0.7).requires_grad_()
    old, advantages = tensor(-1.1, -1.7, -0.4, -0.9), tensor(2, 2, 2, -1)
    mask, rows = bools(1, 1, 0, 1), torch.tensor([0, 0, 0, 1])
    ratios = [math.exp((0.1 - 0.3) / 2), math.exp(0.2)]
    loss = gspo_policy_loss(new, old, advantages, mask, rows, 2, eps_low=0.5, eps_high=0.5)
    ppo.aggregate(loss, mask, rows, 2, 'sequence', 2).backward()
    # Each of the two tokens has half of the gradient of the sequence's ratio.
    assert new.grad.tolist() == pytest.approx([-ratios[0] / 2, -ratios[0] / 2, 0, ratios[1] / 2])


def test_value_clip_passes_no_gradient_beyond_its_range_when_the_clipped_error_is_larger():
    value = tensor(0.9).requires_grad_()  # old 0, return 3: the clipped value 0.4 is farther away
    for clip, gradient in ((0.4, 0.0), (None, 0.9 - 3)):
        value.grad = None
        ppo.clipped_value_loss(value, tensor(0.0), tensor(3.0), clip).sum().backward()
        assert value.grad.item() == pytest.approx(gradient)


def test_policy_stats_add_up_over_micro_batches():
    torch.manual_seed(0)
    new, old, mask = torch.randn(6), torch.randn(6), bools(1, 0, 1, 1, 1, 0)
    whole = ppo.policy_stats(new, old, mask, eps_low=0.2, eps_high=0.5)
    cuts = (slice(0, 2), slice(2, 5), slice(5, 6))
    parts = [ppo.policy_stats(new[s], old[s], mask[s], eps_low=0.2, eps_high=0.5) for s in cuts]
    for i in range(5):
        assert sum(p[i].item() for p in parts) == pytest.approx(whole[i].item())
    assert min(p.ratio_min.item() for p in parts) == whole.ratio_min.item()
    assert max(p.ratio_max.item() for p in parts) == whole.ratio_max.item()
    ratios = [math.exp(a - b) for a, b, m in zip(new.tolist(), old.tolist(), mask.tolist(), strict=True) if m]
    assert whole.clipped.item() == sum(r < 0.8 or r > 1.5 for r in ratios)
    assert whole.ratio.item() == pytest.approx(sum(ratios), rel=1e-6)
    nothing = parts[2]
    assert nothing.ratio_min.item() == math.inf and nothing.ratio_max.item() == -math.inf and nothing[0].item() == 0


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda x, m, r: ppo.aggregate(x, m, r, 1, 'tokens', 1), "'tokens' is not known; choose one of"),
        (lambda x, m, r: ppo.aggregate(x, m, r, 1, 'token', 0), 'normalizer=0 must be positive'),
        (lambda x, m, r: ppo.aggregation_count(m, r, 1, 'sequence_sum'), 'constant.length of at least 1'),
        (lambda x, m, r: ppo.clipped_policy_loss(x, x, x, eps_low=1.0), 'eps_low=1.0'),
        (lambda x, m, r: ppo.clipped_policy_loss(x, x, x, eps_high=-0.1), 'eps_high=-0.1'),
        (lambda x, m, r: ppo.clipped_policy_loss(x, x, x, dual_clip=1.0), 'dual_clip=1.0 must be greater than 1'),
        (lambda x, m, r: ppo.clipped_value_loss(x, x, x, 0.0), 'value clip 0.0 must be positive'),
        (lambda x, m, r: importance_weights(x, x, m, r, 1, low=2.0, high=2.0), 'low=2.0, high=2.0 are not allowed'),
        (lambda x, m, r: importance_weights(x, x, m, r, 1, 'token'), "'token' is not known; choose one of"),
        (lambda x, m, r: cispo_policy_loss(x, x, x, eps_low=1.5), r'eps_low=1.5 must be in \[0, 1\]'),
    ],
)
def test_wrong_settings_of_losses_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(tensor(0.0), bools(1), torch.tensor([0]))


def test_an_adaptive_kl_coefficient_stays_positive():
    """With more than 5 horizons of samples the published factor would be negative."""
    controller = ppo.AdaptiveKLController(0.5, target=6.0, horizon=10.0)
    controller.update(0.0, 1000)
    assert controller.value == pytest.approx(0.05)
