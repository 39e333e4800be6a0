"""Packed modules compute the same as plain ones, follow changes of the weights, and leave the model unchanged."""

from __future__ import annotations

import pytest
import torch

from chatgpt.nn.lora import convert_to_lora, lora_layers, merge_lora, unmerge_lora
from chatgpt.rollout.local import cpu_speed
from chatgpt.rollout.local.cpu_speed import PackedModules
from chatgpt.testing import FAMILIES, tiny_causal_lm


@pytest.fixture(autouse=True)
def narrow_weights_too(monkeypatch):
    """Tiny models have only narrow weights."""
    monkeypatch.setattr(cpu_speed, 'LEAST_PACKED', 0)


IDS = torch.arange(24).view(2, 12) + 3


def plain_and_packed(model, packed):
    with torch.no_grad():
        plain = model(IDS).logits
        with packed.active():
            changed = sum('forward' in vars(m) for m in model.modules())
            fast = model(IDS).logits
    assert not any('forward' in vars(m) for m in model.modules())
    torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-4)
    return plain, fast, changed


@pytest.mark.parametrize('family', FAMILIES)
def test_same_logits(family):
    model = tiny_causal_lm(family)
    packed = PackedModules(model)
    changed = plain_and_packed(model, packed)[2]
    if packed.modules:
        assert changed >= 4 * model.config.num_hidden_layers


def test_written_weights_are_packed_again():
    model = tiny_causal_lm('gpt2')
    packed = PackedModules(model)
    before = plain_and_packed(model, packed)[1]
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.mul_(3.0)
        model.transformer.h[1].attn.c_attn.bias.add_(1.0)
    assert float((plain_and_packed(model, packed)[1] - before).abs().max()) > 1e-2
    layer = model.transformer.h[0].mlp.c_fc
    layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight))
    plain_and_packed(model, packed)


@pytest.mark.parametrize('family', ['gpt2', 'llama'])
def test_adapters_count_merged_or_not(family):
    model = tiny_causal_lm(family)
    convert_to_lora(model, 2)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_B.fill_(0.3)
    packed = PackedModules(model)
    num_layers = len(lora_layers(model))
    plain, _, few = plain_and_packed(model, packed)
    merge_lora(model)
    merged, _, many = plain_and_packed(model, packed)
    torch.testing.assert_close(merged, plain, atol=1e-3, rtol=1e-3)
    if packed.modules:
        assert many == few + num_layers
    unmerge_lora(model)
    assert plain_and_packed(model, packed)[2] == few


def test_an_error_inside_leaves_nothing_behind():
    model = tiny_causal_lm('gpt2')
    with pytest.raises(RuntimeError, match='inside'), PackedModules(model).active():
        raise RuntimeError('inside')
    assert not any('forward' in vars(m) for m in model.modules())


def test_other_precisions_and_wrapped_modules_stay_as_they_are():
    assert not PackedModules(tiny_causal_lm('gpt2').to(torch.bfloat16)).modules
    model = tiny_causal_lm('gpt2')
    layer = model.transformer.h[0].mlp.c_fc
    own = layer.forward
    layer.forward = lambda x: own(x) + 1.0
    packed = PackedModules(model)
    assert layer not in packed.modules
    with torch.no_grad():
        plain = model(IDS).logits
        with packed.active():
            torch.testing.assert_close(model(IDS).logits, plain, atol=1e-4, rtol=1e-4)
    assert 'forward' in vars(layer)


def test_narrow_linear_layers_stay_as_they_are(monkeypatch):
    """gpt2 has four Conv1D in each of two layers and a linear head of 64 x 32; llama has seven linear layers in each of
    two and the head, the largest being the head and those of the MLP, 64 x 32."""
    gpt2, llama = tiny_causal_lm('gpt2'), tiny_causal_lm('llama')
    if not PackedModules(gpt2).modules:
        pytest.skip('this torch packs nothing')
    for least, of_gpt2, of_llama in ((0, 9, 15), (64 * 32, 9, 7), (64 * 32 + 1, 8, 0)):
        monkeypatch.setattr(cpu_speed, 'LEAST_PACKED', least)
        assert len(PackedModules(gpt2).modules) == of_gpt2
        assert len(PackedModules(llama).modules) == of_llama
