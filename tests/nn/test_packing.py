"""The padding-free forward: the same results as the padded one in every supported family, independent of other
sequences. FlashAttention for variable lengths: its call with fakes of its signatures, its results on a GPU."""

from __future__ import annotations

import inspect
from copy import deepcopy
from itertools import pairwise

import model_cases
import pytest
import torch
import transformers
from cuda_on_cpu import pretend_cuda
from model_cases import OTHERS, SIZES, gradients, model_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig
from transformers.models.doge.modeling_doge import DogeModel

import chatgpt.nn.packing as packing_module
from chatgpt.batching import collate, packing_of
from chatgpt.nn import Actor, AutoActor, AutoCritic, Critic, RewardModel, initial_tensors
from chatgpt.nn.packing import check_loaded_packing, enable_packing, flat_hidden, packed_attention, packs, window_of
from chatgpt.nn.trunk import base_model
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Prompt

LENGTHS = [(9, 12), (3, 7), (5, 5), (4, 2), (2, 2)]


def sequences(lengths=LENGTHS):
    return model_cases.sequences(lengths, seed=1)


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
    assert packing_of([3, 3], 3) is None  # rows of equal length need no packing
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
    for module in (Critic(actor.model).eval(), RewardModel(actor.model).eval()):
        assert packs(module.model) and torch.allclose(module(packed), module(padded), atol=1e-5)


def test_borders_are_what_makes_it_right():
    """Negative control: one sequence instead of several gives other results."""
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


def test_position_biases_and_batches_longer_than_the_window_run_padded():
    mistral = Actor(model_of(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8))).eval()
    assert packs(mistral.model.model) and window_of(mistral.model.model) == 8
    bloom = Actor(tiny_causal_lm('bloom')).eval()
    assert not packs(base_model(bloom.model))
    packed, padded = collate(sequences()), collate(sequences(), pack=False)
    assert packed.packing is not None and packed.packing.max_length > 8
    for actor in (mistral, bloom):
        assert torch.equal(actor(packed).logprobs, actor(padded).logprobs)


def test_a_model_that_disagrees_keeps_its_attention():
    """A trunk that mixes neighbouring sequences is detected when the actor is built."""
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


def test_the_setting_is_not_written_into_a_folder(tmp_path):
    Actor(tiny_causal_lm('gpt2')).save_pretrained(tmp_path)
    assert 'packed' not in (tmp_path / 'config.json').read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == 'sdpa'


@pytest.mark.parametrize(('name', 'pack'), [('gpt2', False), ('llama', True), ('bloom', True)])
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


def small_config(kind):
    sizes = SIZES | {'num_key_value_heads': 2, 'initializer_range': 0.1}
    if kind != 'phi3':
        return {'nemotron': transformers.NemotronConfig, 'doge': transformers.DogeConfig}[kind](**sizes)
    rope = {'rope_type': 'longrope', 'rope_theta': 10000.0, 'short_factor': [1.0] * 4, 'long_factor': [4.0] * 4}
    return transformers.Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=16)


def filled(build):
    """Returns a module that was built on the meta device and filled."""
    torch.manual_seed(0)
    with torch.device('meta'):
        module = build()
    tensors = dict(initial_tensors(module))
    module.to_empty(device='cpu')
    for owner_name, owner in module.named_modules():
        for store in (owner._parameters, owner._buffers):
            for name, tensor in store.items():
                full = f'{owner_name}.{name}' if owner_name else name
                if tensor is not None and full in tensors:
                    store[name].data = tensors[full]
    module.model.tie_weights()
    return module.eval()


@pytest.mark.parametrize(('kind', 'make'), [('nemotron', AutoActor), ('nemotron', AutoCritic), ('doge', AutoActor)])
def test_a_model_that_drops_the_packing_warns_and_then_runs_padded(kind, make):
    torch.manual_seed(0)
    if kind == 'doge' and 'allow_is_causal_skip' not in inspect.getsource(DogeModel.forward):
        # that of transformers 5.17 is bidirectional
        with pytest.raises(ValueError, match='DogeModel gives a token other numbers'):
            make(config=small_config(kind))
        return
    want = make(config=small_config(kind)).eval()
    module = filled(lambda: make(config=small_config(kind)))
    trunk = base_model(module.model)
    assert packs(trunk) and not packs(base_model(want.model)), 'on the meta device nothing could be compared'
    batch = collate(sequences())
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match='attn_implementation=|must match the size'):
        module(batch)
    assert not check_loaded_packing(module, torch.device('cpu'))
    with torch.no_grad():
        got, plain = module(batch), want(batch)
    got, plain = (x if isinstance(x, torch.Tensor) else x.logprobs for x in (got, plain))
    assert torch.allclose(got, plain, atol=1e-5)


def test_sequences_beyond_the_length_where_frequencies_change_are_refused():
    """Phi-3 with long context: transformers chooses the rotary frequencies of a batch by its longest sequence."""
    module = filled(lambda: AutoActor(config=small_config('phi3')))
    assert check_loaded_packing(module, torch.device('cpu')) and packs(base_model(module.model))
    actor = AutoActor(config=small_config('phi3')).eval()
    short, long = sequences([(3, 6), (4, 8)]), sequences([(3, 6), (9, 8)])
    with torch.no_grad():
        alone = actor(collate(short[:1])).logprobs
        assert torch.allclose(actor(collate(short)).logprobs[: len(alone)], alone, atol=1e-5)
        with pytest.raises(ValueError, match=r'a sequence of 17 tokens is past 16 tokens, from which on .*longrope'):
            actor(collate(long))
    engine = LocalEngine()
    engine.begin(actor)
    with pytest.raises(ValueError, match=r'may grow by 10, past 16 tokens, from which on'):
        engine.generate(
            Call.of([Prompt(ids=torch.arange(3, 10))], SamplingParams(max_new_tokens=10), seed=0, indices=[0])
        )
    engine.end()


def test_a_model_with_results_that_depend_on_other_sequences_is_refused():
    """BERT's decoder class is bidirectional unless configured otherwise, and is not in the list of such models."""
    torch.manual_seed(0)
    causal, ahead = (
        transformers.BertGenerationDecoder(
            transformers.BertGenerationConfig(**SIZES, initializer_range=0.3, is_decoder=is_decoder)
        ).eval()
        for is_decoder in (True, False)
    )
    for cls in (Actor, Critic, RewardModel):
        cls(causal)
        with pytest.raises(ValueError, match='gives a token other numbers when padding, other sequences or later'):
            cls(ahead)


def per_sequence(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size):
    """Computes `varlen_attn` sequence by sequence: (T, H, d)."""
    assert all(x.is_contiguous() for x in (q, k, v)) and q.dtype == k.dtype == v.dtype
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.tolist() == cu_k.tolist()
    assert cu_q[-1] == len(q) == len(k) == len(v)
    assert max_q == max_k == max(b - a for a, b in pairwise(cu_q.tolist()))
    parts = []
    for start, end in pairwise(cu_q.tolist()):
        own = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(*own, is_causal=window_size == (-1, 0), scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def first_form(query, key, value, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """The parameters of torch 2.11, which does not compare the numbers of heads; its kernel reads groups."""
    return per_sequence(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size)


def later_form(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """The parameters of torch 2.12 and later, without those of paged caches."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    return per_sequence(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size)


def use_varlen(monkeypatch, attend) -> list[tuple[torch.dtype, int, int]]:
    """Makes packed attention call `attend` on any device. Returns dtype, heads and key heads of every call."""
    calls = []

    def counting(q, k, v, *args, **kwargs):
        calls.append((q.dtype, q.shape[1], k.shape[1]))
        return attend(q, k, v, *args, **kwargs)

    names = frozenset(inspect.signature(attend).parameters)
    monkeypatch.setattr(packing_module, '_varlen', lambda: (counting, names))
    return calls


def fake_varlen(monkeypatch, form) -> list[tuple[torch.dtype, int, int]]:
    """`use_varlen` with a fake on a CPU, where torch's own does not run."""
    monkeypatch.setattr(packing_module, '_fits_varlen', lambda q, k, v: q.dtype == k.dtype == v.dtype)
    monkeypatch.setattr(packing_module, 'NARROW', 0)  # 16 bits stay 16 bits
    return use_varlen(monkeypatch, form)


def attention_of(device, dtype, kv_heads) -> list[torch.Tensor]:
    """Returns attention of sequences of 5, 2, 4 and 1 tokens, and the gradients of query, key and value."""
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
    calls = fake_varlen(monkeypatch, form)
    for ours, want in zip(attention_of('cpu', torch.float64, kv_heads), plain, strict=True):
        assert torch.allclose(ours, want, atol=1e-9)
    assert calls == [(torch.float64, 4, kv_heads)]  # no version copies keys and values


@pytest.mark.parametrize('allowed', [False, True])
def test_torch_itself_says_where_flash_attention_may_run(monkeypatch, allowed):
    """Its backward above a head width of 192 lacks shared memory on sm86 and sm89, among others."""
    asked = []

    def can_use(params):
        shapes = [tuple(x.shape) for x in (params.query, params.key)]
        asked.append((shapes, params.query.requires_grad, params.is_causal, params.enable_gqa))
        return allowed

    monkeypatch.setattr(torch.backends.cuda, 'can_use_flash_attention', can_use)
    q, k = (torch.zeros(11, heads, 224, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
    assert not packing_module._fits_varlen(q, k, k) and not asked  # on a CPU
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, 'is_cuda', property(lambda self: True))
        assert packing_module._fits_varlen(q, k, k) is allowed
        assert not packing_module._fits_varlen(*(x.float() for x in (q, k, k)))
    assert asked == [([(1, 4, 11, 224), (1, 2, 11, 224)], True, True, True)]


@pytest.mark.parametrize('tokens', [7, 1])
def test_grouped_heads_in_fp32_do_not_reach_the_maths_kernel(monkeypatch, tokens):
    """On CUDA only SDPA's maths kernel takes grouped heads in fp32, with memory for the (T, T) scores."""
    seen = []

    def sdpa(q, k, v, **kwargs):
        seen.append((q.shape[1], k.shape[1], bool(kwargs.get('enable_gqa'))))
        return scaled_dot_product_attention(q, k, v, **kwargs)

    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', sdpa)
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, heads, tokens, 16, generator=g) for heads in (4, 2, 2))
    module = nn.Module()
    module.num_key_value_groups = 2
    want, _ = packed_attention(module, q, k, v, None)
    with pretend_cuda():
        found, _ = packed_attention(module, *(x.to('cuda:0') for x in (q, k, v)), None)
        torch.testing.assert_close(found.cpu(), want)
    on_cpu, on_cuda = seen
    assert on_cpu == (4, 2, True) and on_cuda == ((4, 4, False) if tokens > 1 else on_cpu)


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
    """In bf16, by relative errors of log-probs and gradients against fp32."""
    calls = real_varlen(monkeypatch)
    torch.manual_seed(0)
    sizes = SIZES | {'hidden_size': 64, 'num_key_value_heads': kv_heads, 'initializer_range': 0.2}  # heads of 16
    actor = Actor(AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).to('cuda')).eval()
    assert packs(base_model(actor.model))
    half = actor if autocast else deepcopy(actor).bfloat16()
    packed, padded = (collate(sequences(), pack=p).to(torch.device('cuda')) for p in (True, False))
    weights = torch.linspace(-1, 1, len(packed.action_ids), device='cuda')

    def numbers(module, batch, narrow):
        with torch.autocast('cuda', torch.bfloat16, enabled=narrow and autocast):
            logprobs = module(batch).logprobs.float()
        return logprobs.detach(), gradients(module, (logprobs * weights).sum()).float()

    for want, ours, plain in zip(
        numbers(actor, padded, False), numbers(half, packed, True), numbers(half, padded, True), strict=True
    ):
        error, other = (float((got - want).norm() / want.norm()) for got in (ours, plain))
        assert error < 8e-2 and error < 1.5 * other + 5e-3
    assert len(calls) == 2 and all(dtype is torch.bfloat16 for dtype, _, _ in calls)


@pytest.mark.gpu
@on_flash_attention
def test_the_backward_of_wide_heads_on_a_gpu():
    """FlashAttention's lacks shared memory for them on sm86 and sm89, where torch's guard takes another kernel."""
    q, k, v = (torch.randn(1, n, 11, 224, device='cuda', dtype=torch.bfloat16).requires_grad_() for n in (4, 2, 2))
    packing = packing_of([5, 6], 6)
    assert packing is not None
    packed_attention(nn.Module(), q, k, v, None, packing=packing.to(torch.device('cuda')))[0].sum().backward()
    assert all(bool(torch.isfinite(x.grad).all()) for x in (q, k, v))


@pytest.mark.gpu
@on_flash_attention
def test_memory_of_grouped_heads_in_fp32_on_a_gpu():
    tokens, module = 8192, nn.Module()
    module.num_key_value_groups = 2
    q, k, v = (torch.randn(1, n, tokens, 64, device='cuda') for n in (4, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed_attention(module, q, k, v, None)
    assert torch.cuda.max_memory_allocated() - before < 4 * tokens * tokens  # of one head's scores
