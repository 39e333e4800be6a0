"""PPO's formulas against numbers by hand and slow float64 loops. Negative controls are here and in
test_negative_controls.py."""

from __future__ import annotations

import math

import pytest
import torch
from float64 import F64, all_count, tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chatgpt.functional.logprobs import chunked_logprobs, entropy_of, logprobs_of
from chatgpt.functional.losses import kl_full
from chatgpt.functional.masking import masked_mean, masked_sum, masked_var
from chatgpt.functional.ppo import AdaptiveKLController, FixedKLController, gae, kl_penalty


def test_masked_moments_ignore_what_does_not_count_even_when_it_is_not_finite():
    x, mask = tensor(1, math.inf, 3, math.nan), torch.tensor([True, False, True, False])
    assert masked_sum(x, mask).item() == 4
    assert masked_mean(x, mask).item() == 2
    assert masked_var(x, mask).item() == 2  # ((1-2)² + (3-2)²) / (2 - 1)
    assert masked_var(x, mask, unbiased=False).item() == 1


def test_logprobs_and_entropy_by_hand():
    logits = tensor(0.0, math.log(3.0))[None]  # probabilities 1/4 and 3/4
    assert logprobs_of(logits, torch.tensor([1])).item() == pytest.approx(math.log(0.75))
    assert entropy_of(logits).item() == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    # At temperature 1/2 the odds are squared: 1 to 9. Negative control: forgetting the temperature gives the first
    # number.
    assert logprobs_of(logits, torch.tensor([1]), 0.5).item() == pytest.approx(math.log(0.9))


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any floating-point tensor made."""

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
    assert kl_penalty(logprobs, ref, 'k1').item() == 0.5
    assert kl_penalty(logprobs, ref, 'k2').item() == 0.125
    assert kl_penalty(logprobs, ref, 'k3').item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert kl_penalty(logprobs, ref, 'abs').item() == 0.5
    # Negative control: the flipped direction.
    assert kl_penalty(ref, logprobs, 'k1').item() == -0.5


def test_k1_and_k3_are_unbiased_for_the_full_kl():
    p, q = tensor(0.1, 0.2, 0.7), tensor(0.3, 0.3, 0.4)  # policy, reference
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert kl_full(p.log()[None], q.log()[None]).item() == pytest.approx(exact)
    for kind in ('k1', 'k3'):
        assert (p * kl_penalty(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact)
    assert kl_full(q.log()[None], p.log()[None]).item() != pytest.approx(exact)  # the other direction
    barred = kl_full(tensor(0.5, 0.5, 0.0).log(), tensor(0.25, 0.75, 0.0).log())
    assert barred.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert (p * kl_penalty(p.log(), q.log(), 'k2')).sum().item() != pytest.approx(exact)


def test_adaptive_controller_by_the_published_rule():
    controller = AdaptiveKLController(0.2, 6.0, 10000)
    controller.update(12.0, 256)  # error 1 is clipped to 0.2
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 256 / 10000))
    controller.update(5.4, 256)  # error -0.1
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 0.0256) * (1 - 0.1 * 0.0256))
    fixed = FixedKLController(0.1)
    fixed.update(100.0, 256)
    assert fixed.value == 0.1


def slow_gae(
    rewards: list[float], values: list[float], counts: list[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
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
    masks = [
        torch.tensor([True]),
        torch.tensor([True, False, True]),
        torch.tensor([False, True, True, False, True, False]),
    ]
    for given in (all_count(rewards), masks):
        advantages, returns = gae(rewards, values, given, gamma=0.9, lam=0.8)
        for i in range(3):
            a, r = slow_gae(rewards[i].tolist(), values[i].tolist(), given[i].tolist(), 0.9, 0.8)
            assert advantages[i].tolist() == pytest.approx(a)
            assert returns[i].tolist() == pytest.approx(r)
    # Negative control: a wrong sign of the value difference.
    right, _ = gae(rewards, values, masks, gamma=0.9, lam=0.8)
    wrong, _ = gae(rewards, [-v for v in values], masks, gamma=0.9, lam=0.8)
    assert wrong[2].tolist() != pytest.approx(right[2].tolist())


def test_gae_of_a_sequence_does_not_depend_on_its_company_to_the_bit():
    r, v = [torch.randn(5), torch.randn(9)], [torch.randn(5), torch.randn(9)]
    m = all_count(r)
    alone, together = gae(r[:1], v[:1], m[:1])[0][0], gae(r, v, m)[0][0]
    assert torch.equal(alone, together)
