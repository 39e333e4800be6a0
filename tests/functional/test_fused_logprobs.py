"""Log-probs by blocks of the vocabulary against slow loops and the computation by rows; a detached entropy saves
nothing for the backward pass."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from chatgpt.functional.fused_logprobs import fused_logprobs
from chatgpt.functional.logprobs import chunked_logprobs

N, WIDTH, VOCAB = 11, 6, 29


def case(dtype=torch.float64, bias=True, trained=True, seed=0):
    """States, head, ids and one weight per token for each of log-prob and entropy."""
    torch.manual_seed(seed)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=bias).to(dtype).requires_grad_(trained)
    hidden = (3 * torch.randn(N, WIDTH)).to(dtype).requires_grad_()
    return hidden, head, torch.randint(VOCAB, (N,)), torch.randn(N, dtype=dtype), torch.randn(N, dtype=dtype)


def slow(hidden, head, ids, temperature):
    logprobs, entropies = [], []
    for row, token in zip(head(hidden).tolist(), ids.tolist(), strict=True):
        row = [x / temperature for x in row]
        top = max(row)
        total = math.fsum(math.exp(x - top) for x in row)
        logp = [x - top - math.log(total) for x in row]
        logprobs.append(logp[token])
        entropies.append(-math.fsum(math.exp(x) * x for x in logp))
    return logprobs, entropies


@pytest.mark.parametrize('block_size', [1, 7, VOCAB, 100])
@pytest.mark.parametrize('temperature', [1.0, 0.7])
@pytest.mark.parametrize('trained', [True, False])
def test_numbers_are_those_of_a_slow_loop(block_size, temperature, trained):
    hidden, head, ids, *_ = case(trained=trained)
    want, want_entropy = slow(hidden, head, ids, temperature)
    for with_entropy in (True, 'detached'):
        options = {'temperature': temperature, 'with_entropy': with_entropy, 'block_size': block_size}
        logprobs, entropy = fused_logprobs(hidden, head.weight, head.bias, ids, **options)
        assert logprobs.tolist() == pytest.approx(want, abs=1e-12)
        assert entropy.tolist() == pytest.approx(want_entropy, abs=1e-12)
        assert logprobs.requires_grad and entropy.requires_grad is (with_entropy is True)
    shifted, _ = fused_logprobs(hidden, head.weight, head.bias, (ids + 1) % VOCAB, block_size=block_size)
    assert shifted.tolist() != pytest.approx(want, abs=1e-3)  # negative control: log-probs of shifted ids


@pytest.mark.parametrize(
    ('temperature', 'trained', 'with_entropy'),
    [(0.7, True, True), (1.0, True, True), (0.7, False, True), (0.7, True, 'detached'), (1.0, False, False)],
)
def test_gradients_are_finite_differences(temperature, trained, with_entropy):
    hidden, head, ids, of_logprobs, of_entropy = case(trained=trained)
    inputs = [hidden, head.weight, head.bias] if trained else [hidden]
    options = {'temperature': temperature, 'with_entropy': with_entropy, 'block_size': 7}

    def loss(*values):
        given = values if trained else (*values, head.weight, head.bias)
        logprobs, entropy = fused_logprobs(*given, ids, **options)
        total = (logprobs * of_logprobs).sum()
        return total + (entropy * of_entropy).sum() if with_entropy is True else total

    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize('trained', [True, False])
def test_autocast_computes_in_its_dtype_and_agrees_with_the_path_by_rows(trained):
    hidden, head, ids, weights, _ = case(torch.float32, trained=trained)
    found = []
    for fused in (False, True):
        hidden.grad = head.weight.grad = None
        given = (head.weight, head.bias) if fused else (head,)
        compute = partial(fused_logprobs, block_size=7) if fused else chunked_logprobs
        with torch.autocast('cpu', dtype=torch.bfloat16):
            logprobs, entropy = compute(hidden, *given, ids, with_entropy='detached')
        (logprobs * weights).sum().backward()
        found.append((logprobs, entropy, hidden.grad, head.weight.grad if trained else torch.zeros(1)))
    for plain, ours in zip(*found, strict=True):
        assert ours.dtype == plain.dtype == torch.float32
        assert (plain - ours).abs().max() <= 0.02 * plain.abs().max().clamp_min(1)
    assert not torch.equal(found[0][0], chunked_logprobs(hidden, head, ids)[0])  # 16 bits differ from fp32


def test_a_whole_block_of_masked_logits_is_no_nan():
    hidden, head, ids, *_ = case()
    with torch.no_grad():
        head.bias[:14] = -math.inf
    compute = partial(fused_logprobs, with_entropy=True, block_size=7)
    logprobs, entropy = compute(hidden, head.weight, head.bias, ids % 15 + 14)
    want, want_entropy = compute(hidden, head.weight[14:], head.bias[14:], ids % 15)
    assert torch.allclose(logprobs, want) and torch.allclose(entropy, want_entropy)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(head.weight.grad).all()


def kept(act):
    """Counts elements that autograd saves for the backward pass of `act`, without leaves."""
    total = 0

    def pack(x):
        nonlocal total
        total += 0 if x.is_leaf and x.requires_grad else x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        act()
    return total


def test_what_is_kept_does_not_grow_with_the_vocabulary():
    hidden, head, ids, *_ = case()
    trained = kept(lambda: fused_logprobs(hidden, head.weight, head.bias, ids, with_entropy='detached', block_size=7))
    assert trained == 3 * N  # ids, log-sum-exp, entropy
    head.requires_grad_(False)
    frozen = kept(lambda: fused_logprobs(hidden, head.weight, head.bias, ids, with_entropy='detached', block_size=7))
    assert frozen == N * WIDTH  # the gradient of the states: backward needs no matrix product
    assert kept(lambda: chunked_logprobs(hidden, head, ids)) >= N * VOCAB  # by rows, in one chunk


def test_no_tokens():
    _, head, *_ = case()
    none = torch.zeros(0, dtype=torch.int64)
    hidden = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    logprobs, entropy = fused_logprobs(hidden, head.weight, head.bias, none, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert head.weight.grad.abs().sum() == 0


def test_bad_arguments():
    hidden, head, ids, *_ = case()
    with pytest.raises(ValueError, match='temperature=0 must be positive'):
        fused_logprobs(hidden, head.weight, head.bias, ids, temperature=0)
    with pytest.raises(ValueError, match=r'ids \(N,\); got \(11, 6\), \(29, 6\) and \(10,\)'):
        fused_logprobs(hidden, head.weight, head.bias, ids[:10])


@pytest.mark.parametrize('chunk_size', [VOCAB, 4])
def test_a_detached_entropy_keeps_nothing_and_changes_no_bit(chunk_size):
    hidden, head, ids, weights, _ = case(torch.float32)
    found, kept_numbers = {}, {}
    for with_entropy in (False, True, 'detached'):
        hidden.grad = head.weight.grad = head.bias.grad = None
        logprobs, entropy = chunked_logprobs(hidden, head, ids, with_entropy=with_entropy, chunk_size=chunk_size)
        loss = (logprobs * weights).sum()
        if with_entropy is True:
            loss = loss - 0.0 * entropy.sum()
        loss.backward()
        found[with_entropy] = (logprobs, entropy, hidden.grad, head.weight.grad, head.bias.grad)
        kept_numbers[with_entropy] = kept(
            lambda w=with_entropy: chunked_logprobs(hidden, head, ids, with_entropy=w, chunk_size=VOCAB)
        )
    assert not found['detached'][1].requires_grad
    assert torch.equal(found['detached'][1], found[True][1])
    for name in (0, 2, 3, 4):
        assert torch.equal(found['detached'][name], found[True][name])
    assert kept_numbers['detached'] == kept_numbers[False] < kept_numbers[True]
