"""Edges of masking, log-probs and KL: gradients beside what does not count, chunk bounds, refusals of wrong input."""

from __future__ import annotations

import math

import pytest
import torch
from float64 import F64, bools, tensor

from chatgpt.functional import logprobs as logprobs_module
from chatgpt.functional.logprobs import chunked_logprobs, entropy_of, logprobs_of, map_row_chunks, rows_per_chunk
from chatgpt.functional.losses import importance_weighted, kl_full
from chatgpt.functional.masking import masked_mean, masked_sum, masked_var, segment_mean, segment_sum, whiten
from chatgpt.functional.ppo import AdaptiveKLController, FixedKLController, kl_penalty


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
    # Negative control: whitening that includes padding gives other numbers.
    assert whiten(x, bools(1, 1, 1, 1)).tolist()[:3] != pytest.approx([-1, 0, 1])


def test_nothing_that_counts_divides_by_nothing():
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


def test_sums_of_many_small_numbers_keep_their_digits():
    x = torch.full((200_000,), 0.1)
    assert masked_mean(x, torch.ones_like(x, dtype=torch.bool)).item() == float(torch.tensor(0.1))


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


def test_rows_of_a_chunk_are_bounded_by_the_vocabulary(monkeypatch):
    monkeypatch.setattr(logprobs_module, 'CHUNK_ELEMENTS_CPU', 100)
    hidden = torch.randn(8, 4)
    head = CountingHead(4, 30)
    assert rows_per_chunk(hidden, head) == 3
    assert head.calls == 0
    assert rows_per_chunk(hidden, lambda h: head(h)) == 3  # asks with one row
    assert head.calls == 1
    assert rows_per_chunk(hidden, head, vocab_size=10_000) == 1
    head.calls = 0
    logprobs, entropy = chunked_logprobs(hidden, head, torch.zeros(8, dtype=torch.int64))
    assert head.calls == 3 and logprobs.shape == (8,) and entropy is None


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
    pieces.sum().backward()  # a chunk is computed again, outside of the context
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
    """Exact expectations over three tokens, drawn from the policy itself and from another."""
    logits, ref = tensor(0.3, -0.2, 0.9), tensor(-0.5, 0.4, 0.1).log_softmax(-1)
    want = logits.clone().requires_grad_()
    value = kl_full(want, ref)
    value.backward()
    for old in (logits.log_softmax(-1), tensor(1.2, -0.7, 0.2).log_softmax(-1)):
        for kind in ('k1', 'k3'):
            x = logits.clone().requires_grad_()
            logp = x.log_softmax(-1)
            expected = (old.exp() * importance_weighted(kl_penalty(logp, ref, kind), logp, old)).sum()
            expected.backward()
            assert expected.item() == pytest.approx(value.item())
            assert torch.allclose(x.grad, want.grad)
    # Negative controls: no weight, a weight without gradient, the ratio upside down.
    for weigh in (
        lambda k, new, old: k,
        lambda k, new, old: k * (new - old).exp().detach(),
        lambda k, new, old: importance_weighted(k, old, new),
    ):
        x = logits.clone().requires_grad_()
        logp = x.log_softmax(-1)
        (old.exp() * weigh(kl_penalty(logp, ref, 'k3'), logp, old)).sum().backward()
        assert not torch.allclose(x.grad, want.grad, rtol=1e-2)


def test_k3_keeps_its_digits_near_the_reference_in_fp32():
    got = kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12]), 'k3').item()
    assert got == pytest.approx(0.5 * 2**-24 + 2**-36 / 6, rel=1e-2)
    # Negative control: r − 1 from exp has no digit left of it.
    log_r = torch.tensor([2.0**-12])
    assert (log_r.exp() - 1 - log_r).item() != pytest.approx(got, rel=0.1)


def test_kinds_and_controllers_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match='k4.*choose one of'):
        kl_penalty(tensor(0.0), tensor(0.0), 'k4')
    with pytest.raises(ValueError, match='call kl_full'):
        kl_penalty(tensor(0.0), tensor(0.0), 'full')
    with pytest.raises(ValueError, match='target=0'):
        AdaptiveKLController(0.1, 0, 100)
    with pytest.raises(ValueError, match='must not be negative'):
        FixedKLController(-0.1)
    with pytest.raises(ValueError, match='fixed.*adaptive'):
        AdaptiveKLController(0.1, 6, 100).load_state_dict(FixedKLController(0.1).state_dict())
