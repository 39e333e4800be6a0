"""Adapters beside frozen weights in decode: fewer kernels, the same numbers up to rounding, the current factors."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch
from cuda_on_cpu import PretendGraph, pretend_cuda
from torch.utils._python_dispatch import TorchDispatchMode

from chatgpt.nn.fused_adapters import fused_adapters
from chatgpt.nn.lora import adapter_disabled, lora_layers
from chatgpt.nn.shared import SharedTrunk
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Prompt

KERNELS = {'mm', 'addmm', 'addmm_', 'bmm', 'mul', 'add'}
IDS = torch.arange(3, 9)[None]


def policy(family: str = 'llama', **quantized: str):
    torch.manual_seed(2)
    actor = SharedTrunk(tiny_causal_lm(family), **quantized).actor(2).eval()
    with torch.no_grad():
        for layer in lora_layers(actor.model).values():
            layer.lora_B.normal_(std=0.1)
    return actor


class Kernels(TorchDispatchMode):
    """Counts the operators that are kernels of a linear layer or an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split('::')[1]
        self.found[name] += name in KERNELS
        return func(*args, **(kwargs or {}))


def trunk_of(actor):
    with torch.no_grad(), Kernels() as kernels:
        hidden = actor.trunk(IDS, position_ids=torch.arange(6)[None])
    return hidden, sum(kernels.found.values())


def test_kernels_of_a_llama_block():
    """Four for each of seven layers; fused one for q, k and v, gate and up, o, down, and one for each layer."""
    actor = policy()
    want, plain = trunk_of(actor)
    with fused_adapters(actor):
        trunk_of(actor)  # makes the factors
        found, fused = trunk_of(actor)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    with adapter_disabled(actor):
        base, without = trunk_of(actor)
    assert not torch.allclose(base, want, atol=1e-3)
    blocks = len(actor.model.model.layers)
    assert (plain - without, fused - without) == (28 * blocks, 11 * blocks)
    assert trunk_of(actor)[1] == plain and not any('forward' in vars(m) for m in actor.modules())


@pytest.mark.parametrize('family', ['gpt2', 'opt', 'bloom'])
def test_other_families(family):
    actor = policy(family)
    want, _ = trunk_of(actor)
    with fused_adapters(actor):
        torch.testing.assert_close(trunk_of(actor)[0], want, atol=1e-5, rtol=1e-5)


def test_beside_weights_in_4_bits_under_autocast():
    pytest.importorskip('bitsandbytes')
    actor = policy(quantize='nf4')
    with torch.autocast('cpu', torch.bfloat16):
        want, _ = trunk_of(actor)
        with fused_adapters(actor):
            found, _ = trunk_of(actor)
    assert found.dtype == want.dtype
    assert float((found.float() - want.float()).norm() / want.float().norm()) < 2e-2


def test_factors_are_the_current_ones_at_the_same_addresses():
    """Captured graphs read them there."""
    actor = policy()
    layer = next(iter(lora_layers(actor.model).values()))
    with fused_adapters(actor), torch.inference_mode():
        trunk_of(actor)
    at = layer.fused.down.data_ptr()
    with torch.no_grad():
        for other in lora_layers(actor.model).values():
            other.lora_A.mul_(1.5)
            other.lora_B.add_(0.05)
    want, _ = trunk_of(actor)
    with fused_adapters(actor):
        found, _ = trunk_of(actor)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    assert layer.fused.down.data_ptr() == at and layer.fused.x is None


def test_an_input_of_its_own_is_not_taken_for_the_shared_one():
    actor = policy()
    attention = actor.model.model.layers[0].self_attn
    x, y = torch.randn(2, 3, attention.q_proj.in_features).unbind(0)
    with torch.no_grad():
        want = attention.q_proj(x), attention.k_proj(y), attention.v_proj(x)
        with fused_adapters(actor):
            found = attention.q_proj(x), attention.k_proj(y), attention.v_proj(x)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_captured_step_of_the_engine_has_them():
    actor, prompts = policy(), [Prompt(ids=torch.arange(3, 6 + i)) for i in range(2)]
    call = Call.of(prompts, SamplingParams(max_new_tokens=6), seed=1, indices=range(2))

    def drawn(engine, actor):
        engine.begin(actor)
        samples = engine.generate(call)
        engine.end()
        return [s.response_ids.tolist() for s in samples]

    want = drawn(LocalEngine(), actor)
    with pretend_cuda(), NaiveStrategy(device='cuda:0', precision='fp32') as strategy:
        on_gpu = strategy.prepare(actor)
        with patch.object(torch.cuda.CUDAGraph, 'replay', autospec=True, side_effect=PretendGraph.replay) as replay:
            assert drawn(LocalEngine(), on_gpu) == want
        steps = replay.call_args_list[-1].args[0].steps
    names = Counter(func._schema.name.split('::')[1] for func, *_ in steps)
    assert names['addmm_'] == 7 * len(actor.model.model.layers)
