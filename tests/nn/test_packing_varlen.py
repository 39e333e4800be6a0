"""FlashAttention for variable lengths: the call on a CPU with stand-ins of its forms, its numbers on a GPU."""

from __future__ import annotations

import inspect
from copy import deepcopy
from itertools import pairwise

import model_cases
import pytest
import torch
from model_cases import SIZES, gradients
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig

import chatgpt.nn.packing as packing_module
from chatgpt.batching import collate, packing_of
from chatgpt.nn import Actor
from chatgpt.nn.packing import packed_attention, packs
from chatgpt.nn.trunk import base_model


def sequences():
    return model_cases.sequences([(9, 12), (3, 7), (5, 5), (4, 2), (2, 2)], seed=1)


def per_sequence(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale=None, enable_gqa=False):
    """What `varlen_attn` promises, one sequence after another: (T, H, d)."""
    assert all(x.is_contiguous() for x in (q, k, v)) and q.dtype == k.dtype == v.dtype
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.tolist() == cu_k.tolist()
    assert cu_q[-1] == len(q) == len(k) == len(v)
    assert enable_gqa or q.shape == k.shape
    assert max_q == max_k == max(b - a for a, b in pairwise(cu_q.tolist()))
    parts = []
    for start, end in pairwise(cu_q.tolist()):
        own = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(*own, is_causal=causal, scale=scale, enable_gqa=enable_gqa)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def first_form(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    """torch 2.10's parameters"""
    return per_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal)


def later_form(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """torch 2.13's, but for those of paged caches"""
    return per_sequence(query, key, value, cu_q, cu_k, max_q, max_k, window_size == (-1, 0), scale, enable_gqa)


def use_varlen(monkeypatch, attend) -> list[tuple[torch.dtype, int, int]]:
    """Let packed attention go through `attend` on any device. Returns dtype, heads and key heads of every call."""
    calls = []

    def counting(q, k, v, *args, **kwargs):
        calls.append((q.dtype, q.shape[1], k.shape[1]))
        return attend(q, k, v, *args, **kwargs)

    names = frozenset(inspect.signature(attend).parameters)
    monkeypatch.setattr(packing_module, '_varlen', lambda: (counting, names))
    return calls


def stand_in(monkeypatch, form) -> list[tuple[torch.dtype, int, int]]:
    """The same on a CPU, where torch's own does not run."""
    monkeypatch.setattr(packing_module, '_fits_varlen', lambda q, k, v: q.dtype == k.dtype == v.dtype)
    monkeypatch.setattr(packing_module, 'NARROW', 0)  # 16 bits stay 16 bits
    return use_varlen(monkeypatch, form)


def attention_of(device, dtype, kv_heads) -> list[torch.Tensor]:
    """What attention gives for sequences of 5, 2, 4 and 1 tokens, and the gradients of query, key and value."""
    lengths, heads, d = [5, 2, 4, 1], 4, 16
    g = torch.Generator().manual_seed(3)
    made = [torch.randn(1, n, sum(lengths), d, generator=g, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (x.to(device, dtype).requires_grad_() for x in made)
    packing = packing_of(lengths, 5)
    assert packing is not None
    out, _ = packed_attention(nn.Module(), q, k, v, None, scaling=0.3, packing=packing.to(torch.device(device)))
    (out * torch.linspace(-1, 1, out.numel(), device=device, dtype=dtype).view_as(out)).sum().backward()
    return [x.detach().double().cpu() for x in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize('form', [first_form, later_form])
@pytest.mark.parametrize('kv_heads', [4, 2, 1])
def test_the_call_for_variable_lengths(monkeypatch, form, kv_heads):
    plain = attention_of('cpu', torch.float64, kv_heads)
    calls = stand_in(monkeypatch, form)
    for ours, want in zip(attention_of('cpu', torch.float64, kv_heads), plain, strict=True):
        assert torch.allclose(ours, want, atol=1e-9)
    assert calls == [(torch.float64, 4, 4 if form is first_form else kv_heads)]


def errors_in_bf16(device: str, kv_heads: int, autocast: bool) -> list[list[float]]:
    """Relative errors against fp32 of log-probs and gradients in bf16: packed, and padded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES | {'hidden_size': 64}, num_key_value_heads=kv_heads, initializer_range=0.2
    )  # heads of 16
    actor = Actor(AutoModelForCausalLM.from_config(config).to(device)).eval()
    assert packs(base_model(actor.model))
    half = actor if autocast else deepcopy(actor).bfloat16()
    packed, padded = (collate(sequences(), pack=p).to(torch.device(device)) for p in (True, False))
    weights = torch.linspace(-1, 1, len(packed.action_ids), device=device)

    def numbers(module, batch, narrow):
        with torch.autocast(device, torch.bfloat16, enabled=narrow and autocast):
            logprobs = module(batch).logprobs.float()
        return logprobs.detach(), gradients(module, (logprobs * weights).sum()).float()

    want = numbers(actor, padded, False)
    return [
        [float((g - w).norm() / w.norm()) for g, w in zip(numbers(half, b, True), want, strict=True)]
        for b in (packed, padded)
    ]


def check_errors_in_bf16(device: str, kv_heads: int, autocast: bool) -> None:
    packed, padded = errors_in_bf16(device, kv_heads, autocast)
    for error, plain in zip(packed, padded, strict=True):
        assert error < 8e-2
        assert error < 1.5 * plain + 5e-3


on_flash_attention = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason='needs a CUDA device from sm80 on',
)


def real_varlen(monkeypatch) -> list[tuple[torch.dtype, int, int]]:
    found = packing_module._varlen()
    assert found is not None, f'torch {torch.__version__} has no varlen_attn'
    return use_varlen(monkeypatch, found[0])


@pytest.mark.gpu
@on_flash_attention
@pytest.mark.parametrize('kv_heads', [4, 2])
def test_flash_attention_against_fp64(monkeypatch, kv_heads):
    plain = attention_of('cpu', torch.float64, kv_heads)
    calls = real_varlen(monkeypatch)
    for got, want in zip(attention_of('cuda', torch.bfloat16, kv_heads), plain, strict=True):
        assert float((got - want).norm() / want.norm()) < 2e-2
    assert len(calls) == 1


@pytest.mark.gpu
@on_flash_attention
@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('kv_heads', [4, 2])
def test_flash_attention_gives_the_padded_forwards_numbers(monkeypatch, kv_heads, autocast):
    calls = real_varlen(monkeypatch)
    check_errors_in_bf16('cuda', kv_heads, autocast)
    assert len(calls) == 2 and all(dtype is torch.bfloat16 for dtype, _, _ in calls)
