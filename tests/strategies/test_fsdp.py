"""FSDP2 on gloo: the conformance suite with and without CPU offload, activation checkpointing, full copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from chatgpt.batching import collate
from chatgpt.nn import Actor, GPTActor
from chatgpt.rollout.local.cpu_speed import PackedModules
from chatgpt.strategies import FSDPStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.conformance import BF16, FP32, all_checks, run_conformance
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.types import Sequence


def conform(folder: str, precision: str, cpu_offload: bool) -> dict[str, str]:
    tolerance = FP32 if precision == 'fp32' else BF16
    return run_conformance(
        lambda: FSDPStrategy(precision=precision, cpu_offload=cpu_offload, device='cpu'),
        tolerance=tolerance,
        folder=folder,
    )


@pytest.mark.parametrize(
    ('world_size', 'precision', 'cpu_offload'),
    [(1, 'fp32', False), (2, 'fp32', False), (2, 'fp32', True), (2, 'bf16', False)],
)
def test_conformance(world_size, precision, cpu_offload, tmp_path):
    fresh = (world_size, precision, cpu_offload) == (2, 'fp32', False)  # each rank with an order of sets of its own
    for results in run_distributed(conform, world_size, str(tmp_path), precision, cpu_offload, fresh=fresh):
        assert set(results) == set(all_checks())
        assert set(results.values()) == {'passed'}, results


def block_forwards() -> dict[bool, tuple[int, float]]:
    """By `activation_checkpointing`: how often a block's MLP computes in one forward and backward, and the gradient
    norm."""
    calls, original = list[int](), GPT2MLP.forward

    def counted(self: Any, *args: Any) -> Any:
        calls.append(1)
        return original(self, *args)

    GPT2MLP.forward = counted  # type: ignore[method-assign]
    ids = torch.arange(3, 9)
    batch = collate([Sequence(prompt_ids=ids[:2], response_ids=ids, response_mask=torch.ones(6, dtype=torch.bool))])
    results = {}
    try:
        for recompute in (False, True):
            with FSDPStrategy(device='cpu', activation_checkpointing=recompute) as strategy:
                actor = GPTActor(config=tiny_config('gpt2', layers=3))
                actor, optimizer = strategy.prepare((actor, torch.optim.AdamW(actor.parameters())))
                calls.clear()
                with strategy.accumulate(actor, last=True):
                    strategy.backward(actor(batch).logprobs.sum(), actor, optimizer)
                results[recompute] = len(calls), strategy.optimizer_step(optimizer)
    finally:
        GPT2MLP.forward = original  # type: ignore[method-assign]
    return results


def test_each_block_computes_twice():
    for results in run_distributed(block_forwards, 2):
        (plain_calls, plain_norm), (calls, norm) = results[False], results[True]
        assert (plain_calls, calls) == (3, 6)
        assert norm == pytest.approx(plain_norm, rel=1e-5)


def before_within_after() -> tuple[bool, int, int]:
    """Whether the sharded weights stand as they were while a copy is made and after it; modules that the local engine
    runs packed, and those that it could."""
    with FSDPStrategy(device='cpu', activation_checkpointing=True) as strategy:
        strategy.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4)))  # frozen
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        with pytest.raises(ValueError, match='Sequential has no model that can recompute its activations'):
            strategy.prepare((model, torch.optim.AdamW(model.parameters())))
    with FSDPStrategy(device='cpu', precision='fp32') as strategy:
        actor = Actor(tiny_causal_lm('gpt2'), lora_rank=2)
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if 'lora_B' in name:
                    parameter.fill_(0.5)
        optimizer = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad])
        actor, optimizer = strategy.prepare((actor, optimizer))

        shards = {n: p.to_local().detach() for n, p in strategy.unwrap(actor).named_parameters()}
        before = {n: t.clone() for n, t in shards.items()}

        def unchanged() -> bool:
            return all(torch.equal(before[n], t) for n, t in shards.items())

        with strategy.full_model(actor) as full:
            packed = PackedModules(full)
            within = unchanged()
            with packed.active(), torch.no_grad():
                replaced = sum('forward' in vars(module) for module in packed.modules)
        return within and unchanged(), replaced, len(packed.modules)


def test_a_model_that_cannot_recompute_is_refused_and_generating_moves_no_adapter():
    ((stands, replaced, packable),) = run_distributed(before_within_after, 1, init_group=True)
    assert stands
    assert replaced == packable > 4  # folded adapters take no part: their layers decode like plain ones
