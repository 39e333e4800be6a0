"""Our adapted layers beside PEFT's: the same numbers to the bit, and what keeps ours."""

from __future__ import annotations

import copy

import pytest
import torch

from chatgpt.nn.lora import convert_to_lora, lora_layers, merge_lora, unmerge_lora
from chatgpt.testing import tiny_causal_lm

peft = pytest.importorskip('peft')
TARGETS = {
    'gpt2': ['c_attn', 'c_proj', 'c_fc'],
    'llama': ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'],
}


def pair(family: str, dtype: torch.dtype):
    """One model with our adapters and one with PEFT's, of the same numbers; the layers of both by name."""
    base = tiny_causal_lm(family).to(dtype)
    mine, theirs = base, copy.deepcopy(base)
    convert_to_lora(mine, 2, alpha=3.0)
    config = peft.LoraConfig(r=2, lora_alpha=3.0, target_modules=TARGETS[family], fan_in_fan_out=family == 'gpt2')
    peft.inject_adapter_in_model(config, theirs)
    found = {name: (layer, theirs.get_submodule(name)) for name, layer in lora_layers(mine).items()}
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for ours, other in found.values():
            ours.lora_B.copy_(torch.randn(ours.lora_B.shape, generator=g))
            other.lora_A['default'].weight.copy_(ours.lora_A)
            other.lora_B['default'].weight.copy_(ours.lora_B)
    return mine, theirs, found


@pytest.mark.parametrize('family', TARGETS)
@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_forward_and_gradients_are_equal_to_the_bit(family, autocast, dtype):
    mine, theirs, found = pair(family, dtype)
    ids = torch.arange(3, 20).remainder(mine.config.vocab_size)[None]
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        ours, others = mine(ids).logits, theirs(ids).logits
        for logits in (ours, others):
            logits.float().square().mean().backward()
    assert torch.equal(ours, others)
    for layer, other in found.values():
        assert layer.lora_B.grad.abs().sum() > 0
        assert torch.equal(layer.lora_B.grad.to(dtype), other.lora_B['default'].weight.grad)


def test_only_ours_put_the_bits_back_and_keep_the_names():
    mine, theirs, found = pair('llama', torch.float32)
    before = {name: layer.weight.detach().clone() for name, (layer, _) in found.items()}
    merge_lora(mine)
    unmerge_lora(mine)
    for _, other in found.values():
        other.merge()
        other.unmerge()
    assert all(torch.equal(layer.weight, before[name]) for name, (layer, _) in found.items())
    assert not any(torch.equal(other.base_layer.weight, before[name]) for name, (_, other) in found.items())
    names = set(tiny_causal_lm('llama').state_dict())
    assert names <= set(mine.state_dict()) and not names <= set(theirs.state_dict())
