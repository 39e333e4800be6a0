"""The padding-free forward: the same numbers as the padded one, in every family that takes part, and no trace of its neighbours."""

from __future__ import annotations

import inspect
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, GemmaConfig, GPTNeoXConfig, LlamaConfig, MistralConfig, Qwen3Config

import chatgpt.nn.packing as packing_module
from chatgpt.batching import collate, packing_of
from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.nn.packing import enable_packing, flat_hidden, packed_attention, packs, window_of
from chatgpt.nn.trunk import base_model
from chatgpt.testing import tiny_causal_lm, tiny_config
from chatgpt.types import Sequence

VOCAB = 64
SIZES = {'vocab_size': VOCAB, 'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'intermediate_size': 64,
         'max_position_embeddings': 64, 'bos_token_id': 1, 'eos_token_id': 2}  # fmt: skip
OTHERS = {
    'mistral': MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=64),
    'qwen3': Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    'gpt_neox': GPTNeoXConfig(**SIZES),
    'gemma': GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=8),
}
LENGTHS = [(9, 12), (3, 7), (5, 5), (4, 2), (2, 2)]


def sequences(lengths=LENGTHS, seed=1) -> list[Sequence]:
    g = torch.Generator().manual_seed(seed)
    return [
        Sequence(
            prompt_ids=torch.randint(3, VOCAB, (p,), generator=g),
            response_ids=torch.randint(3, VOCAB, (a,), generator=g),
            response_mask=torch.ones(a, dtype=torch.bool),
        )
        for p, a in lengths
    ]


def model_of(name: str) -> nn.Module:
    if name in OTHERS:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(OTHERS[name])
    return tiny_causal_lm(name)


def gradients(module: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


# ---------------------------------------------------------------- the plan, by hand


def test_three_rows_by_hand():
    # rows of 4, 3 and 1 tokens at width 4: 3 >= 0.75 * 4 joins the first group, 1 does not
    packing = packing_of([4, 3, 1], 4)
    assert packing is not None
    assert packing.token_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert packing.cu_seqlens.tolist() == [0, 4, 7, 8]
    assert packing.max_length == 4
    first, second = packing.groups
    assert (first.start, first.stop, first.rows, first.width) == (0, 7, 2, 4)
    assert first.index is not None and first.index.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (second.start, second.stop, second.rows, second.width, second.index) == (7, 8, 1, 1, None)


def test_rows_of_one_length_are_left_as_they_are():
    assert packing_of([3, 3], 3) is None
    assert collate(sequences([(2, 2), (2, 2)])).packing is None
    assert collate(sequences(), pack=False).packing is None


def test_attention_against_a_loop():
    """softmax(q k / sqrt(d)) v over the tokens before, per sequence and head, in float64."""
    lengths, heads, kv_heads, d = [5, 2, 4, 1], 4, 2, 3
    total = sum(lengths)
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, total, d, generator=g, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))
    got, _ = packed_attention(nn.Module(), q, k, v, None, scaling=0.7, packing=packing_of(lengths, 5))
    start = 0
    for n in lengths:
        for t in range(n):
            for h in range(heads):
                own = h // (heads // kv_heads)
                scores = torch.tensor([0.7 * float(q[0, h, start + t] @ k[0, own, start + j]) for j in range(t + 1)])
                weights = scores.double().softmax(0)
                want = sum(w * v[0, own, start + j] for j, w in enumerate(weights))
                assert torch.allclose(got[0, start + t, h], want, atol=1e-6)
        start += n


# ---------------------------------------------------------------- against the padded forward


@pytest.mark.parametrize('name', ['gpt2', 'opt', 'llama', *OTHERS])
def test_log_probs_and_gradients_are_those_of_the_padded_forward(name):
    actor = Actor(model_of(name)).eval()
    assert packs(base_model(actor.model))
    packed, padded = collate(sequences()), collate(sequences(), pack=False)
    one, other = actor(packed, with_entropy=True), actor(padded, with_entropy=True)
    assert torch.allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert torch.allclose(one.entropy, other.entropy, atol=1e-5)
    weights = torch.linspace(-1, 1, len(one.logprobs))
    a, b = gradients(actor, (one.logprobs * weights).sum()), gradients(actor, (actor(padded).logprobs * weights).sum())
    assert float((a - b).norm() / b.norm()) < 1e-5


def test_critic_and_reward_model_agree_too():
    packed, padded = collate(sequences()), collate(sequences(), pack=False)
    for module in (Critic(tiny_causal_lm('gpt2')).eval(), RewardModel(tiny_causal_lm('llama')).eval()):
        assert packs(module.model)
        assert torch.allclose(module(packed), module(padded), atol=1e-5)


def test_bf16_against_fp32():
    actor = Actor(tiny_causal_lm('llama')).eval()
    with torch.no_grad():
        want = actor(collate(sequences(), pack=False)).logprobs
        half = deepcopy(actor).bfloat16()
        packed, padded = (half(collate(sequences(), pack=p)).logprobs for p in (True, False))
    error = float((packed - want).norm() / want.norm())
    assert error < 2e-2
    assert error < 1.5 * float((padded - want).norm() / want.norm()) + 1e-3


def test_a_neighbour_changes_nothing():
    """Each sequence alone, and with another one's ids exchanged: equal to the last bit but for the matmuls' own rounding."""
    actor = Actor(tiny_causal_lm('gpt2')).eval()
    items = sequences()
    with torch.no_grad():
        together = actor(collate(items)).logprobs.split([s.num_actions for s in items])
        for item, got in zip(items, together, strict=True):
            assert torch.allclose(actor(collate([item])).logprobs, got, atol=1e-5)


def test_borders_are_what_makes_it_right():
    """The twin: one sequence instead of many, and the numbers are wrong."""
    model = base_model(Actor(tiny_causal_lm('gpt2')).eval().model)
    batch = collate(sequences())
    right = flat_hidden(model, batch)
    assert batch.packing is not None
    total = len(batch.packing.token_index)
    one = packing_of([total], total + 1)
    assert one is not None
    batch.packing.groups = one.groups
    assert not torch.allclose(flat_hidden(model, batch), right, atol=1e-2)


def test_gradient_checkpointing_recomputes_the_packed_attention():
    plain, checkpointed = Actor(tiny_causal_lm('llama')), Actor(tiny_causal_lm('llama'))
    checkpointed.load_state_dict(plain.state_dict())
    checkpointed.model.gradient_checkpointing_enable()
    checkpointed.train()
    plain.train()
    batch = collate(sequences())
    a, b = (gradients(m, m(batch).logprobs.sum()) for m in (plain, checkpointed))
    assert torch.allclose(a, b, atol=1e-6)


# ---------------------------------------------------------------- FlashAttention for variable lengths


def per_sequence(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale=None, enable_gqa=False, borders=True):
    """What `varlen_attn` promises, one sequence after another: (T, H, d)."""
    assert all(x.is_contiguous() for x in (q, k, v)) and q.dtype == k.dtype == v.dtype
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.tolist() == cu_k.tolist() and cu_q[-1] == len(q) == len(k) == len(v)
    assert enable_gqa or q.shape == k.shape
    assert max_q == max_k == max(b - a for a, b in pairwise(cu_q.tolist()))
    parts = []
    for start, end in pairwise(cu_q.tolist() if borders else [0, len(q)]):
        own = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(scaled_dot_product_attention(*own, is_causal=causal, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1))
    return torch.cat(parts)


def first_form(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    """torch 2.10's parameters"""
    return per_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal)


def later_form(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """torch 2.13's, but for those of paged caches"""
    return per_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size == (-1, 0), scale, enable_gqa)


def without_borders(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    return per_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, borders=False)


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
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(attention_of('cpu', torch.float64, kv_heads), plain, strict=True))
    assert calls == [(torch.float64, 4, 4 if form is first_form else kv_heads)]


@pytest.mark.parametrize('form', [first_form, later_form])
@pytest.mark.parametrize('name', ['gpt2', 'llama', 'gemma'])
def test_models_through_variable_lengths(monkeypatch, form, name):
    actor = Actor(model_of(name)).eval()
    packed, padded = collate(sequences()), collate(sequences(), pack=False)
    weights = torch.linspace(-1, 1, len(packed.action_ids))
    calls = stand_in(monkeypatch, form)
    one, other = actor(packed).logprobs, actor(padded).logprobs
    assert len(calls) == 2  # a call in each layer of the packed forward
    assert torch.allclose(one, other, atol=1e-5)
    a, b = gradients(actor, (one * weights).sum()), gradients(actor, (other * weights).sum())
    assert float((a - b).norm() / b.norm()) < 1e-5


def errors_in_bf16(device: str, kv_heads: int, autocast: bool) -> list[list[float]]:
    """Relative errors against fp32 of log-probs and gradients in bf16: packed, and padded."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {'hidden_size': 64}, num_key_value_heads=kv_heads, initializer_range=0.2)  # heads of 16
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
    return [[float((g - w).norm() / w.norm()) for g, w in zip(numbers(half, b, True), want, strict=True)] for b in (packed, padded)]


def check_errors_in_bf16(device: str, kv_heads: int, autocast: bool) -> None:
    packed, padded = errors_in_bf16(device, kv_heads, autocast)
    for error, plain in zip(packed, padded, strict=True):
        assert error < 8e-2
        assert error < 1.5 * plain + 5e-3


@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('kv_heads', [4, 2])
def test_bf16_through_variable_lengths(monkeypatch, kv_heads, autocast):
    calls = stand_in(monkeypatch, later_form)
    check_errors_in_bf16('cpu', kv_heads, autocast)
    assert (torch.bfloat16, 4, kv_heads) in calls


def test_bf16_errors_tell_a_wrong_attention(monkeypatch):
    """The twin: sequences that see their neighbours are far beyond the bounds."""
    stand_in(monkeypatch, without_borders)
    monkeypatch.setattr(packing_module, '_agrees', lambda model: True)
    packed, padded = errors_in_bf16('cpu', 4, False)
    assert min(packed) > 0.15 > 3 * max(padded)


on_flash_attention = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason='needs a CUDA device from sm80 on'
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


# ---------------------------------------------------------------- who takes part


@pytest.mark.parametrize('name', ['bloom'])
def test_position_biases_run_padded(name):
    actor = Actor(model_of(name)).eval()
    assert not packs(base_model(actor.model))
    packed, padded = collate(sequences()), collate(sequences(), pack=False)
    assert torch.equal(actor(packed).logprobs, actor(padded).logprobs)


def test_a_batch_longer_than_the_window_runs_padded():
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8)
    torch.manual_seed(0)
    actor = Actor(AutoModelForCausalLM.from_config(config)).eval()
    assert packs(actor.model.model) and window_of(actor.model.model) == 8
    packed, padded = collate(sequences()), collate(sequences(), pack=False)
    assert packed.packing is not None and packed.packing.max_length > 8
    assert torch.equal(actor(packed).logprobs, actor(padded).logprobs)


def test_a_model_that_disagrees_keeps_its_attention():
    """A trunk that looks at its neighbours is found out when it is built."""
    model = tiny_causal_lm('gpt2')
    trunk = base_model(model)
    plain = type(trunk).forward

    class Mixing(type(trunk)):  # type: ignore[misc]
        def forward(self, input_ids=None, position_ids=None, **kwargs):
            out = plain(self, input_ids=input_ids, position_ids=position_ids, **kwargs)
            out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean(1, keepdim=True)
            return out

    trunk.__class__ = Mixing
    assert enable_packing(trunk) is False
    assert model.config._attn_implementation == 'sdpa'


def test_the_users_model_is_not_changed_otherwise():
    model = tiny_causal_lm('llama').eval()
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        before = model(ids).logits
        made = model.generate(ids, max_new_tokens=4, do_sample=False)
        Actor(model)
        model.eval()
        assert torch.equal(model(ids).logits, before)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), made)


def test_the_setting_is_not_written_into_a_folder(tmp_path):
    Actor(tiny_causal_lm('gpt2')).save_pretrained(tmp_path)
    assert 'packed' not in (tmp_path / 'config.json').read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == 'sdpa'


def test_on_the_meta_device_the_form_decides():
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(tiny_config('gpt2'))
    assert enable_packing(base_model(model))


# ---------------------------------------------------------------- one pass for policy and reference


@pytest.mark.parametrize(('name', 'pack'), [('gpt2', True), ('gpt2', False), ('llama', True), ('opt', True), ('bloom', True)])
def test_a_hydras_reference_comes_with_the_policy(name, pack):
    actor = Actor(model_of(name), num_layers_unfrozen=1, value_head=True).eval()
    optimizer = torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], lr=0.1)
    (-actor(collate(sequences())).logprobs.mean()).backward()
    optimizer.step()
    batch = collate(sequences(), pack=pack)
    with torch.no_grad():
        policy = actor(batch, temperature=0.7)
        with actor.reference():
            reference = actor(batch, temperature=0.7)
        calls = []
        handle = base_model(actor.model).register_forward_hook(lambda *_: calls.append(1))
        both = actor(batch, temperature=0.7, with_reference=True)
        handle.remove()
    assert len(calls) == 1
    assert both.reference is not None and both.reference.values is None
    assert torch.equal(both.logprobs, policy.logprobs) and torch.equal(both.values, policy.values)
    assert torch.equal(both.reference.logprobs, reference.logprobs)
    assert not torch.allclose(both.logprobs, both.reference.logprobs, atol=1e-4)
