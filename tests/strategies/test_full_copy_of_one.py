"""A full copy of a model that one process holds alone: the copy may be the weights themselves, and nothing may move."""

from __future__ import annotations

import torch

from chatgpt.nn import Actor
from chatgpt.rollout.local.cpu_speed import PackedModules
from chatgpt.strategies import FSDPStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed


def before_within_after() -> tuple[bool, int, int]:
    """Whether the sharded weights stand as they were while a copy is made and after it; modules that the local engine
    runs packed, and those that it could."""
    with FSDPStrategy(device='cpu', precision='fp32') as strategy:
        actor = Actor(tiny_causal_lm('gpt2'), lora_rank=2)
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if 'lora_B' in name:
                    parameter.fill_(0.5)
        optimizer = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad])
        actor, optimizer = strategy.prepare((actor, optimizer))

        def weights() -> dict[str, torch.Tensor]:
            return {n: p.to_local().detach().clone() for n, p in strategy.unwrap(actor).named_parameters()}

        def unchanged() -> bool:
            return all(torch.equal(before[name], now) for name, now in weights().items())

        before = weights()
        with strategy.full_model(actor) as full:
            packed = PackedModules(full)
            within = unchanged()
            with packed.active(), torch.no_grad():
                replaced = sum('forward' in vars(module) for module in packed.modules)
        return within and unchanged(), replaced, len(packed.modules)


def test_generating_moves_no_adapter():
    ((stands, replaced, packable),) = run_distributed(before_within_after, 1, init_group=True)
    assert stands
    assert replaced == packable > 4  # folded adapters take no part: their layers decode like plain ones
