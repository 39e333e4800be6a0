"""One frozen base in several roles: the same results as separate models, one copy of the base."""

from __future__ import annotations

import resource
import weakref
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file

from chatgpt.batching import collate
from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.nn.computed import on_disk
from chatgpt.nn.heads import critic_head
from chatgpt.nn.lora import LoRANF4Linear, lora_layers, merged_state_dict
from chatgpt.nn.peft_format import export_peft
from chatgpt.nn.quantized import NF4Linear
from chatgpt.nn.shared import SharedTrunk
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.tiny import tiny_sequences

FAMILIES = ('gpt2', 'llama', 'opt', 'bloom')


def batch():
    return collate(tiny_sequences(6))


def adapted(role, seed):
    """Returns the role with nonzero adapters by the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora_layers(role).values():
            layer.lora_A.copy_(torch.randn(layer.lora_A.shape, generator=generator) * 0.05)
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator) * 0.05)
    return role


@pytest.mark.parametrize('family', FAMILIES)
def test_roles_compute_what_separate_models_compute(family):
    model = tiny_causal_lm(family)
    trunk = SharedTrunk(deepcopy(model))
    head = critic_head(model.config.hidden_size)
    alone = [
        adapted(Actor(deepcopy(model), 4), 1),
        adapted(Critic(deepcopy(model), deepcopy(head), 4), 2),
        adapted(RewardModel(deepcopy(model), deepcopy(head), 4), 3),
    ]
    shared = [
        adapted(trunk.actor(4), 1),
        adapted(trunk.critic(4, value_head=deepcopy(head)), 2),
        adapted(trunk.reward_model(4, value_head=deepcopy(head)), 3),
    ]
    for one, other in zip(alone, shared, strict=True):
        a, b = one(batch()), other(batch())
        a, b = (a.logprobs, b.logprobs) if isinstance(one, Actor) else (a, b)
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        a.sum().backward()
        b.sum().backward()
        for (name, x), (_, y) in zip(lora_layers(one).items(), lora_layers(other).items(), strict=True):
            assert torch.equal(x.lora_A.grad, y.lora_A.grad), name
            assert torch.equal(x.lora_B.grad, y.lora_B.grad), name
    with shared[0].reference():
        reference = shared[0](batch()).logprobs
    torch.testing.assert_close(reference, Actor(model)(batch()).logprobs, rtol=0, atol=0)


def test_an_adapter_takes_the_place_of_the_settings_of_a_new_one(tmp_path):
    trunk = SharedTrunk(tiny_causal_lm('gpt2'))
    actor = adapted(trunk.actor(4), 1)
    export_peft(actor, tmp_path)
    again = trunk.actor(2, adapter=tmp_path, lora_options={'alpha': 3})
    torch.testing.assert_close(again(batch()).logprobs, actor(batch()).logprobs)


def test_a_reward_model_does_not_take_an_adapter_without_a_head(tmp_path):
    trunk = SharedTrunk(tiny_causal_lm('gpt2'))
    export_peft(adapted(trunk.critic(4), 1), tmp_path)
    with pytest.raises(ValueError, match=f'{tmp_path}: an adapter without value_head.safetensors, which the scores'):
        trunk.reward_model(adapter=tmp_path)
    assert trunk.reward_model(adapter=tmp_path, value_head=critic_head(32)).value_head is not None


def test_an_unknown_quantization_is_refused_before_loading():
    with pytest.raises(ValueError, match="quantize='int8'; give 'nf4' or None"):
        SharedTrunk.from_pretrained('nowhere', quantize='int8')


@pytest.mark.parametrize('quantize', [None, 'nf4'])
def test_there_is_one_base(quantize):
    trunk = SharedTrunk(tiny_causal_lm('llama', hidden_size=64), quantize=quantize)
    roles = [trunk.actor(4), trunk.critic(4), trunk.reward_model(4)]
    held = [{t.data_ptr() for t in (*r.parameters(), *r.buffers())} for r in roles]
    own = [
        {p.data_ptr() for n, p in r.named_parameters() if 'lora' in n or 'value_head' in n}
        | {b.data_ptr() for n, b in r.named_buffers() if n == 'score_bias'}
        for r in roles
    ]
    base = {t.data_ptr() for t in (*trunk.model.parameters(), *trunk.model.buffers())}
    for h, o in zip(held, own, strict=True):
        assert h - o <= base
    assert not own[0] & own[1]


def test_nf4_is_near_and_trains_through():
    model = tiny_causal_lm('gpt2', hidden_size=64)
    dense = Actor(deepcopy(model))(batch()).logprobs
    actor = SharedTrunk(model, quantize='nf4').actor(4)
    assert sum(isinstance(m, NF4Linear) for m in actor.modules()) == 4 * model.config.n_layer
    out = actor(batch()).logprobs
    assert 0 < (out - dense).abs().max() < 0.5
    out.sum().backward()
    assert all(layer.lora_B.grad.abs().sum() > 0 for layer in lora_layers(actor).values())


def test_nf4_keeps_its_constants_where_a_model_is_converted():
    actor = SharedTrunk(tiny_causal_lm('gpt2', hidden_size=64), quantize='nf4').actor(4)
    want = [m.dense() for m in actor.modules() if isinstance(m, NF4Linear)]
    actor.to(torch.bfloat16).to('cpu', torch.float16)
    for m, dense in zip((m for m in actor.modules() if isinstance(m, NF4Linear)), want, strict=True):
        assert torch.equal(m.dense(), dense)


def test_a_weight_of_4_bits_with_its_adapter_folded_in_is_in_fp32():
    pytest.importorskip('bitsandbytes')
    actor = adapted(SharedTrunk(tiny_causal_lm('gpt2', hidden=64), quantize='nf4', dtype=torch.bfloat16).actor(4), 1)
    for layer in lora_layers(actor).values():
        dense, folded = layer.base.dense(), layer.folded_weight()
        assert dense.dtype is torch.bfloat16 and folded.dtype is torch.float32
        product = sum(torch.outer(a, b) for a, b in zip(layer.lora_A, layer.lora_B.T, strict=True))
        want = dense.float() + layer.scaling * product  # Conv1D keeps W as (in, out)
        torch.testing.assert_close(folded, want, rtol=0, atol=1e-6)
        assert not torch.allclose(folded, want.bfloat16().float(), rtol=0, atol=1e-6)
        assert not torch.allclose(folded, dense.float() - layer.scaling * product, rtol=0, atol=1e-6)


@pytest.mark.parametrize('role', ['actor', 'reward_model'])
def test_merged_weights_are_written_one_at_a_time(role, tmp_path, monkeypatch):
    """All merged weights together may be several times the 4-bit model, and more than the machine's memory."""
    trunk = SharedTrunk(tiny_causal_lm('llama', hidden_size=64), quantize='nf4')
    model = getattr(trunk, role)(4)
    folded, alive, most = LoRANF4Linear.folded_weight, [], []

    def counted(layer):
        weight = folded(layer)
        alive[:] = [*(ref for ref in alive if ref() is not None), weakref.ref(weight.untyped_storage())]
        most.append(len(alive))
        return weight

    expected = {n: t.clone() for n, t in merged_state_dict(model.model).items()}
    monkeypatch.setattr(LoRANF4Linear, 'folded_weight', counted)
    model.save_pretrained(tmp_path)
    assert len(most) == len(lora_layers(model)) and max(most) <= 2
    written = load_file(tmp_path / 'model.safetensors')
    prefix = 'model.' if role == 'reward_model' else ''
    assert all(torch.equal(written[prefix + n], t) for n, t in expected.items() if prefix + n in written)
    assert len(written) >= len(expected) - 1
    assert not list(tmp_path.glob('.weights-*'))


def test_a_file_that_cannot_grow_is_an_error_and_not_a_signal(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError):
            on_disk(torch.ones(4096), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(on_disk(torch.arange(6.0).view(2, 3), tmp_path), torch.arange(6.0).view(2, 3))
    assert not list(tmp_path.iterdir())


def test_nf4_rounds_to_the_sixteen_numbers_of_the_paper():
    # Dettmers et al. 2023, appendix E
    table = torch.tensor(
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
        + [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
        + [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
    )
    layer = torch.nn.Linear(64, 32, bias=False)
    dense = NF4Linear(layer).dense()
    for row, exact in zip(dense, layer.weight.detach(), strict=True):  # a row is a block of 64
        scale = exact.abs().max()
        nearest = table[(exact[:, None] / scale - table).abs().argmin(1)]
        # scales are rounded to 8 bits, of the largest deviation from their mean
        torch.testing.assert_close(row, nearest * scale, rtol=0.02, atol=1e-3)
