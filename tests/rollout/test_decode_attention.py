"""Attention over pages gives the tokens of the plain one, on a CPU with a fake of FlashAttention, on a GPU with torch's
own."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from engine_calls import assert_same, generated_turns
from engine_calls import generated as generated_by
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

import chatgpt.nn.packing
import chatgpt.rollout.local.attention as attention_module
from chatgpt.nn import Actor
from chatgpt.nn.packing import packed_attention
from chatgpt.rollout import LocalEngine, SamplingParams
from chatgpt.rollout.local.attention import PagedAttention, paged_varlen
from chatgpt.testing import FAMILIES, tiny_causal_lm
from chatgpt.types import Prompt

PROMPTS = [Prompt(ids=torch.arange(3, 5 + i % 4)) for i in range(5)]
SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.9, eos_token_ids=(2, 5, 11))
SIZES = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'intermediate_size': 64, 'head_dim': 8}
SIZES |= {'vocab_size': 64, 'max_position_embeddings': 512}


def grouped_model(kind=LlamaConfig, kv_heads=2, **settings):
    """A random model with fewer key heads than query heads."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**SIZES, num_key_value_heads=kv_heads, **settings))


def slow_attention(query, key, value, counts, scale):
    """Computes attention by a loop over rows and heads. query (n, H, d); key, value (n, H_kv, K, d) → (n, H, d)."""
    out = torch.zeros_like(query)
    for i, count in enumerate(counts.tolist()):
        for h in range(query.shape[1]):
            of = h // (query.shape[1] // key.shape[1])
            weights = torch.softmax(key[i, of, :count] @ query[i, h] * scale, dim=0)
            out[i, h] = weights @ value[i, of, :count]
    return out


def fake_varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """Has the parameters of torch 2.13 and checks the requirements of FlashAttention (flash_api.cpp)."""
    pages, page_size, kv_heads, d = key.shape
    n, heads, _ = query.shape
    assert enable_gqa and heads % kv_heads == 0 and d % 8 == 0 and d <= 256
    assert page_size % 256 == 0 and key.stride(-1) == value.stride(-1) == query.stride(-1) == 1
    assert seqused_k.dtype == block_table.dtype == cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert seqused_k.is_contiguous() and block_table.stride(-1) == 1 and block_table.shape == (n, 1)
    assert cu_seq_q.tolist() == list(range(n + 1)) and cu_seq_k.shape == (n + 1,)
    assert (max_q, max_k) == (1, page_size) and int(seqused_k.max()) <= page_size and pages >= n
    rows = block_table[:, 0].long()
    key, value = (x[rows].transpose(1, 2) for x in (key, value))
    out = slow_attention(query, key, value, seqused_k, scale or 1 / math.sqrt(d))
    if num_splits is None and heads == kv_heads and page_size >= 512 and n < 64:
        # without groups, splits are combined into the first row (pytorch#194167)
        out = torch.cat([out[-1:], torch.full_like(out[1:], 7.0)])
    return out


@pytest.fixture
def pages(monkeypatch):
    """Replaces torch's function by the fake, on any device and in any dtype, and records its calls."""
    calls = []

    def counting(*args, **kwargs):
        calls.append(len(args[0]))
        return fake_varlen_attn(*args, **kwargs)

    original = attention_module.why_no_pages

    def why_no_pages(actor):
        why = original(actor)
        return '' if why.startswith('it needs CUDA') else why

    monkeypatch.setattr(attention_module, 'paged_varlen', lambda: counting)
    monkeypatch.setattr(attention_module, 'why_no_pages', why_no_pages)
    return calls


def generated(engine, actor, sampling=SAMPLING):
    return generated_by(engine, actor, sampling, PROMPTS, seed=1)


@pytest.mark.parametrize(('kv_heads', 'scale'), [(4, None), (2, 0.3), (1, None)])
def test_both_forms_against_a_slow_loop(kv_heads, scale, pages):
    g = torch.Generator().manual_seed(2)
    query = torch.randn(3, 4, 1, 8, generator=g, dtype=torch.float64)
    key, value = (torch.randn(3, kv_heads, 256, 8, generator=g, dtype=torch.float64) for _ in range(2))
    counts = torch.tensor([5, 1, 256], dtype=torch.int32)
    want = slow_attention(query[:, :, 0], key, value, counts, scale or 1 / math.sqrt(8))[:, None]
    beyond = torch.arange(256) >= counts[:, None]
    mask = torch.zeros(3, 256, dtype=torch.float64).masked_fill(beyond, torch.finfo(torch.float64).min)[:, None, None]
    torch.testing.assert_close(packed_attention(nn.Module(), query, key, value, mask, scaling=scale)[0], want)
    torch.testing.assert_close(PagedAttention(counts)(query, key, value, None, scale), want)
    wrong = PagedAttention(counts - torch.tensor([1, 0, 0], dtype=torch.int32))(query, key, value, None, scale)
    assert not torch.allclose(wrong, want)  # negative control: one slot less


@pytest.mark.parametrize('fixed', [False, True])
@pytest.mark.parametrize('kv_heads', [4, 2])
def test_tokens_are_those_of_plain_attention(kv_heads, fixed, pages):
    actor = Actor(grouped_model(kv_heads=kv_heads))
    engine = LocalEngine(attention='varlen', fixed_steps=fixed, max_batch_size=4)
    assert_same(generated(engine, actor), generated(LocalEngine(attention='plain', max_batch_size=4), actor))
    assert engine.attention_form == 'varlen' and pages


@pytest.mark.parametrize('family', FAMILIES)
def test_families_take_pages_or_say_why_not(family, pages):
    actor = Actor(tiny_causal_lm(family, tie_word_embeddings=False))
    engine = LocalEngine(attention='varlen')
    if family == 'bloom':  # ALiBi
        with pytest.raises(ValueError, match="'varlen' cannot be had: BloomForCausalLM has an attention of its"):
            engine.begin(actor)
        return
    assert_same(generated(engine, actor), generated(LocalEngine(), actor))
    assert pages


@pytest.mark.parametrize('fixed', [False, True])
def test_turns_by_pages(fixed, pages):
    actor, sampling = Actor(grouped_model()), SamplingParams(max_new_tokens=16)
    wanted = generated_turns(LocalEngine(max_batch_size=3), actor, PROMPTS, sampling)
    engine = LocalEngine(attention='varlen', fixed_steps=fixed, max_batch_size=3)
    assert generated_turns(engine, actor, PROMPTS, sampling) == wanted and pages


def test_windows_and_soft_caps(pages):
    """A window longer than the sequences changes nothing; a soft cap is rejected."""
    window = Actor(grouped_model(MistralConfig, sliding_window=64))
    assert_same(generated(LocalEngine(attention='varlen'), window), generated(LocalEngine(), window))
    settings = {'attn_logit_softcapping': 5.0, 'query_pre_attn_scalar': 8, 'sliding_window': 64}
    capped = Actor(grouped_model(Gemma2Config, attn_implementation='eager', **settings))
    with pytest.raises(ValueError, match="'varlen' cannot be had: Gemma2ForCausalLM has an attention of its"):
        LocalEngine(attention='varlen').begin(capped)


@pytest.mark.parametrize('tokens', [1, 2])
def test_one_query_per_row_repeats_no_keys(tokens, monkeypatch):
    """Whatever the version of transformers, and in a compiled step too."""
    heads = []

    def sdpa(q, k, v, **kwargs):
        heads.append((q.shape[1], k.shape[1]))
        return kept(q, k, v, **kwargs)

    kept = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', sdpa)
    monkeypatch.setattr(chatgpt.nn.packing, 'scaled_dot_product_attention', sdpa)
    monkeypatch.setattr(transformers.integrations.sdpa_attention, 'is_torchdynamo_compiling', lambda: True)
    module, mask = nn.Module(), torch.zeros(3, 1, tokens, 9)
    module.num_key_value_groups = 2
    packed_attention(module, torch.zeros(3, 4, tokens, 8), *(torch.zeros(3, 2, 9, 8) for _ in range(2)), mask)
    assert heads == [(2, 2) if tokens == 1 else (4, 4)]


def test_a_form_that_does_not_agree_is_refused(monkeypatch, pages):
    """Pages without the newest token fail the check of `begin`."""
    kept = PagedAttention.__init__
    monkeypatch.setattr(PagedAttention, '__init__', lambda self, counts: kept(self, counts - 1))
    with pytest.raises(ValueError, match=r"attention='varlen' cannot be had: hidden states differ by"):
        LocalEngine(attention='varlen').begin(Actor(grouped_model()))


@pytest.mark.parametrize('kv_heads', [4, 2])
def test_long_pages_of_few_rows(kv_heads, pages):
    """Heads without groups ask for one split; splits of groups are right, and chosen by the kernel."""
    g = torch.Generator().manual_seed(2)
    query = torch.randn(3, 4, 1, 8, generator=g, dtype=torch.float64)
    key, value = (torch.randn(3, kv_heads, 1024, 8, generator=g, dtype=torch.float64) for _ in range(2))
    counts = torch.tensor([5, 1, 900], dtype=torch.int32)
    want = slow_attention(query[:, :, 0], key, value, counts, 1 / math.sqrt(8))[:, None]
    torch.testing.assert_close(PagedAttention(counts)(query, key, value, None, None), want)


def test_a_kernel_that_is_wrong_on_long_pages_only_is_found(pages, monkeypatch):
    splits = attention_module.paged_varlen()
    monkeypatch.setattr(
        attention_module, 'paged_varlen', lambda: lambda *args, **kwargs: splits(*args, **kwargs | {'num_splits': None})
    )
    with pytest.raises(ValueError, match=r"attention='varlen' cannot be had: hidden states differ by"):
        LocalEngine(attention='varlen').begin(Actor(grouped_model(kv_heads=4)))
    LocalEngine(attention='varlen').begin(Actor(grouped_model(kv_heads=2)))


@pytest.mark.parametrize(
    ('lacks', 'message'), [(True, r'torch .* has no varlen_attn with pages'), (False, 'hidden states differ by')]
)
def test_one_line_says_which_form_is_taken_instead_of_pages(lacks, message, pages, monkeypatch):
    """As torch 2.11, and as a kernel that does not agree; on CUDA, whose way is given here to a CPU."""
    monkeypatch.setitem(attention_module.WAYS, 'cpu', attention_module.Way(False, 'varlen'))
    if lacks:
        monkeypatch.setattr(attention_module, 'paged_varlen', lambda: None)
    else:
        kept = PagedAttention.__init__
        monkeypatch.setattr(PagedAttention, '__init__', lambda self, counts: kept(self, counts - 1))
    engine = LocalEngine()
    with pytest.warns(UserWarning, match=rf"LocalEngine: attention='plain', which reads every slot: {message}"):
        engine.begin(Actor(grouped_model()))
    assert engine.attention_form == 'plain'


def test_what_a_cpu_does_by_default_and_what_is_refused():
    engine = LocalEngine()
    engine.begin(Actor(grouped_model()))
    assert engine.attention_form == 'plain'
    engine.end()
    with pytest.raises(ValueError, match='it needs CUDA and 16 bits, and the policy is torch.float32 on cpu'):
        LocalEngine(attention='varlen').begin(Actor(grouped_model()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('kv_heads', [4, 2, 1])
@pytest.mark.parametrize('fixed', [False, True])
def test_pages_on_a_gpu(kv_heads, fixed):
    """In bf16 greedy tokens may differ by rounding, so log-probs are compared up to the first different token."""
    actor = Actor(grouped_model(kv_heads=kv_heads).to('cuda', torch.bfloat16))
    sampling = SamplingParams(max_new_tokens=6, do_sample=False)
    engine = LocalEngine(fixed_steps=fixed)
    found = generated(engine, actor, sampling)
    want = generated(LocalEngine(attention='plain', fixed_steps=fixed), actor, sampling)
    assert engine.attention_form == ('varlen' if paged_varlen() is not None else 'plain')
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a.logprobs[:1], b.logprobs[:1], atol=0.05, rtol=0)
        same = (a.response_ids != b.response_ids).nonzero().flatten().tolist() or [len(a.response_ids)]
        torch.testing.assert_close(a.logprobs[: same[0]], b.logprobs[: same[0]], atol=0.05, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('kv_heads', [4, 2])
def test_pages_against_a_slow_loop_on_a_gpu(kv_heads):
    if paged_varlen() is None or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip('this torch or GPU has no pages')
    g = torch.Generator().manual_seed(2)
    query = torch.randn(3, 4, 1, 64, generator=g)
    key, value = (torch.randn(3, kv_heads, 1024, 64, generator=g) for _ in range(2))
    counts = torch.tensor([5, 300, 1024], dtype=torch.int32)
    want = slow_attention(query[:, :, 0], key, value, counts, 1 / 8)[:, None]
    q, k, v = (x.to('cuda', torch.bfloat16) for x in (query, key, value))
    found = PagedAttention(counts.cuda())(q, k, v, None, None).float().cpu()
    torch.testing.assert_close(found, want, atol=0.03, rtol=0.03)
