"""A policy whose whole weights the device has no room for, and engines that only read them: they are in host memory
then, whole, whoever held which part."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_workers import InProcessWorkers
from spawned_workers import SpawnedWorkers

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, RemoteEngine, SamplingParams, SharedEngine, vllm_remote
from chatgpt.rollout.vllm_remote import VLLMRemoteEngine
from chatgpt.strategies import FSDPStrategy, fsdp
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.collect import Collector
from chatgpt.types import Prompt

GREEDY = SamplingParams(max_new_tokens=5, eos_token_ids=(2,), do_sample=False)
STAND_IN = Path(__file__).parent / 'stand_in'


def prompts() -> list[Prompt]:
    return [Prompt(ids=torch.tensor([5, 3 + i])) for i in range(6)]


def actor(lora_rank: int) -> Actor:
    torch.manual_seed(0)
    made = Actor(tiny_causal_lm('llama', heads=4), lora_rank)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if 'lora_B' in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return made


def of_a_rank(engine_kind: str, tensor_parallel: int, lora_rank: int) -> dict[str, Any]:
    fsdp.streams = lambda *_: True  # the device has no room
    if engine_kind == 'remote':
        engine: Any = RemoteEngine(InProcessWorkers(1))
    else:
        sys.path.insert(0, str(STAND_IN))
        vllm_remote.SENT_FROM = ('cuda', 'cpu')
        engine = VLLMRemoteEngine(
            SpawnedWorkers(1, {'GPU': 2}), weight_transfer=engine_kind, engine_options={'dtype': 'float32'}
        )
    seen: dict[str, Any] = {}
    with (
        FSDPStrategy(device='cpu', tensor_parallel=tensor_parallel) as strategy,
        SharedEngine(strategy, engine) as shared,
    ):
        prepared = strategy.prepare(actor(lora_rank))
        begin = engine.begin

        def watched(model: Any) -> None:
            seen['streamed'] = any(getattr(m, 'is_streamed', False) for m in model.modules())
            seen['whole'] = sum(p.numel() for p in model.parameters())
            begin(model)

        engine.begin = watched
        collector = Collector(strategy, shared, GREEDY, policy=partial(strategy.full_model, prepared))
        share = 6 // strategy.world_size
        first = share * strategy.rank
        samples = collector.generate(prompts()[first : first + share], indices=range(first, first + share))
        seen['drawn'] = [(s.index, s.response_ids.tolist()) for s in samples]
    return seen


@pytest.mark.parametrize(
    ('engine_kind', 'tensor_parallel', 'lora_rank'),
    [('remote', 1, 0), ('remote', 2, 2), ('store', 2, 0), ('nccl', 2, 2)],
)
def test_workers_have_the_whole_policy(engine_kind, tensor_parallel, lora_rank):
    alone, local = actor(lora_rank), LocalEngine()
    with torch.no_grad():
        local.begin(alone.eval())
        samples = local.generate(Call.of(prompts(), GREEDY, seed=0, indices=range(6)))
        expected = [(s.index, s.response_ids.tolist()) for s in samples]
        local.end()
    results = run_distributed(of_a_rank, 2, engine_kind, tensor_parallel, lora_rank)
    share = 6 if tensor_parallel == 2 else 3  # processes that hold a model together have the same prompts
    assert results[0]['drawn'] == expected[:share]
    assert results[1]['drawn'] == (expected if tensor_parallel == 2 else expected[3:])
    assert results[0]['streamed'] is False and results[0]['whole'] == sum(p.numel() for p in alone.parameters())
