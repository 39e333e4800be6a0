"""Activation checkpointing under FSDP computes each block again in the backward pass, and is refused where nothing
can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chatgpt.nn import GPTActor
from chatgpt.strategies import FSDPStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed


def block_forwards(world_size: int) -> dict[bool, tuple[int, float]]:
    """By `activation_checkpointing`: how often a block's MLP computes in one forward and backward, and the gradient
    norm."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    from chatgpt.batching import collate
    from chatgpt.types import Sequence

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
                    strategy.backward(actor(batch).logprobs.sum() / world_size, actor, optimizer)
                results[recompute] = len(calls), strategy.optimizer_step(optimizer)
    finally:
        GPT2MLP.forward = original  # type: ignore[method-assign]
    return results


@pytest.mark.parametrize('world_size', [1, 2])
def test_each_block_computes_twice(world_size):
    for results in run_distributed(block_forwards, world_size, world_size):
        (plain_calls, plain_norm), (calls, norm) = results[False], results[True]
        assert (plain_calls, calls) == (3, 6)
        assert norm == pytest.approx(plain_norm, rel=1e-5)


def refusal() -> tuple[str, str]:
    """What `prepare` says of a trained model that cannot recompute; a frozen one passes."""
    with FSDPStrategy(device='cpu', activation_checkpointing=True) as strategy:
        strategy.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4)))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        try:
            strategy.prepare((model, torch.optim.AdamW(model.parameters())))
        except ValueError as error:
            return type(error).__name__, str(error)
    return '', ''


def test_a_model_that_cannot_recompute_is_refused():
    (said,) = run_distributed(refusal, 1)
    assert said == (
        'ValueError',
        'activation_checkpointing: Sequential has no model that can recompute its activations',
    )
