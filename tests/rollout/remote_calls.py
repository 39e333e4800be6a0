"""Prompts, calls and policies of the tests of remote and shared engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.testing.fakes import tiny_causal_lm
from chatgpt.types import Prompt, Sample

SAMPLING = SamplingParams(max_new_tokens=10, eos_token_ids=(2,), temperature=0.8, top_p=0.95)


def prompts(num: int = 12) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 64, (1 + i % 5,), generator=generator) for i in range(num)]
    return [Prompt(ids=x, text=f'prompt {i}', columns={'answer': i}) for i, x in enumerate(ids)]


def call_of(given: list[Prompt], sampling: SamplingParams = SAMPLING, first: int = 0, **kw: Any) -> Call:
    return Call.of(given, sampling, seed=5, indices=range(first, first + len(given)), **kw)


def actor_of(family: str = 'gpt2', seed: int = 0) -> Actor:
    return Actor(tiny_causal_lm(family, seed=seed))


def generated(engine: Any, actor: Any, given: list[Prompt], **kw: Any) -> list[Sample]:
    engine.begin(actor)
    samples = engine.generate(call_of(given, **kw))
    engine.end()
    return samples


def local(actor: Any, given: list[Prompt], **kw: Any) -> list[Sample]:
    return generated(LocalEngine(), actor, given, **kw)


def assert_same(a: list[Sample], b: list[Sample]) -> None:
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        for name in Sample.__dataclass_fields__:
            if name == 'version':
                continue
            u, v = getattr(x, name), getattr(y, name)
            assert (u.dtype == v.dtype and torch.equal(u, v)) if isinstance(u, torch.Tensor) else u == v, name


def perturb(model: nn.Module) -> None:
    """Changes all weights, like a training step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
