"""Engines that ranks share: workers of rank 0, to which every rank sends weights, and neighbouring ranks that generate
together."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from in_process_workers import InProcessWorkers
from remote_calls import call_of, local, perturb
from spawned_workers import STAND_IN, SpawnedWorkers

from chatgpt.nn import Actor
from chatgpt.rollout import (
    Call,
    LocalEngine,
    NeighboursEngine,
    RemoteEngine,
    SamplingParams,
    SharedEngine,
    remote,
    vllm_remote,
)
from chatgpt.rollout.vllm_remote import VLLMRemoteEngine
from chatgpt.strategies import DDPStrategy, FSDPStrategy, fsdp
from chatgpt.testing.fakes import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.collect import Collector
from chatgpt.types import Prompt, Sample

FEW = SamplingParams(max_new_tokens=5, eos_token_ids=(2,))
GREEDY = SamplingParams(max_new_tokens=5, eos_token_ids=(2,), do_sample=False)


def numbered_prompts(num: int) -> list[Prompt]:
    return [Prompt(ids=torch.tensor([5, 3 + i]), text=str(i)) for i in range(num)]


def versions(samples: list[Sample]) -> list[Any]:
    return [(s.index, s.prompt_text, s.response_ids.tolist(), s.version) for s in samples]


def generate_on_rank() -> dict[str, Any]:
    workers = InProcessWorkers(2)
    with (
        DDPStrategy(seed=3, device='cpu') as strategy,
        strategy.failure_guard(),  # as in a run
        SharedEngine(strategy, RemoteEngine(workers)) as engine,
    ):
        model = tiny_causal_lm('gpt2')
        if strategy.rank == 1:  # its weights are not used
            torch.nn.init.zeros_(model.transformer.wte.weight)
        mine = numbered_prompts(7)[:3] if strategy.rank == 0 else numbered_prompts(7)[3:]
        first = 3 * strategy.rank
        found: dict[str, Any] = {}
        engine.begin(Actor(model))
        tickets = [
            engine.submit(Call.of(mine, FEW, seed=seed, indices=range(first, first + len(mine)))) for seed in (5, 6)
        ]
        engine.end()
        found['versions'] = [versions(engine.take(ticket)) for ticket in reversed(tickets)]
        found['started'] = len(workers.workers)
        # ranks with different limits, or without prompts, make the same calls
        endless = SamplingParams(max_new_tokens=5)
        collector = Collector(strategy, engine, endless, policy=lambda **_: nullcontext(Actor(model)))
        limits = [1, 2, 2] if strategy.rank == 0 else []
        samples = collector.generate(mine[: len(limits)], indices=range(len(limits)), limits=limits)
        found['limited'] = [len(s.response_ids) for s in samples]
        engine.begin(Actor(model))
        with pytest.raises(ValueError, match='^generate: prompt 0 is empty'):
            engine.submit(call_of([Prompt(ids=torch.tensor([], dtype=torch.int64))], FEW))
        return found


def test_ranks_share_the_workers_of_rank_0():
    results = run_distributed(generate_on_rank, 2)
    local, expected = LocalEngine(), []
    local.begin(Actor(tiny_causal_lm('gpt2')))
    for seed in (6, 5):
        samples = local.generate(Call.of(numbered_prompts(7), FEW, seed=seed, indices=range(7)))
        expected.append([(i, text, ids, 1) for i, text, ids, _ in versions(samples)])
    local.end()
    for rank, found in enumerate(results):
        mine = slice(0, 3) if rank == 0 else slice(3, 7)
        assert found['versions'] == [samples[mine] for samples in expected]
    assert [found['started'] for found in results] == [2, 0]
    assert [found['limited'] for found in results] == [[1, 2, 2], []]


def send_on_rank() -> dict[str, Any]:
    found: dict[str, Any] = {'numbers': []}
    fill = remote.fill_buckets

    def watched(manifest: Any, tensors: Any, numbers: Any) -> Any:
        found['numbers'].append((list(numbers), len(manifest.buckets)))
        return fill(manifest, tensors, numbers)

    remote.fill_buckets = watched
    model, workers = tiny_causal_lm('gpt2'), InProcessWorkers(2)
    engine = RemoteEngine(workers, weight_transfer='tcp', bucket_bytes=8192)
    with (
        DDPStrategy(seed=3, device='cpu') as strategy,
        strategy.failure_guard(),
        SharedEngine(strategy, engine) as shared,
    ):
        for _ in range(2):
            perturb(model)
            shared.begin(Actor(model))
        mine = numbered_prompts(4)[2 * strategy.rank : 2 * strategy.rank + 2]
        call = Call.of(mine, FEW, seed=5, indices=range(2 * strategy.rank, 2 * strategy.rank + 2))
        found['versions'] = versions(shared.generate(call))
        if strategy.rank == 1:  # a share of other weights
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.neg_()
        with pytest.raises(RuntimeError, match='differs from the actor') as error:
            shared.begin(Actor(model))
        found['error'] = str(error.value)
        if strategy.rank == 1:
            remote.connect = unreachable
        with pytest.raises(RuntimeError, match="weight_transfer='tcp': rank 1 cannot connect to rollout workers"):
            shared.begin(Actor(model))
    return found


def unreachable(*_: Any) -> Any:
    raise OSError('no route to host')


def test_every_rank_sends_a_share_of_the_weights():
    """And an error of one is raised on both."""
    results = run_distributed(send_on_rank, 2)
    model = tiny_causal_lm('gpt2')
    perturb(model), perturb(model)
    samples = local(Actor(model), numbered_prompts(4), sampling=FEW)
    expected = [(i, text, ids, 2) for i, text, ids, _ in versions(samples)]
    for rank, found in enumerate(results):
        assert found['versions'] == expected[2 * rank : 2 * rank + 2]
        numbers, size = found['numbers'][0]
        assert size > 10 and numbers == list(range(rank, size, 2))
        assert len(found['numbers']) == 3
    assert results[0]['error'] == results[1]['error']


def actor_with_adapters(lora_rank: int) -> Actor:
    torch.manual_seed(0)
    made = Actor(tiny_causal_lm('llama', heads=4), lora_rank)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if 'lora_B' in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return made


def generate_with_neighbours() -> dict[str, Any]:
    asked: list[list[int]] = []

    class Watched(LocalEngine):
        def answer(self, call: Call, limits: list[int]) -> list[Sample]:
            asked.append(list(call.indices))
            return super().answer(call, limits)

    with DDPStrategy(seed=3, device='cpu') as strategy:
        engine = NeighboursEngine(strategy, Watched(), 2)
        first, number = 2 * strategy.rank, 0 if strategy.rank == 3 else 2
        actor = Actor(tiny_causal_lm('gpt2'))
        collector = Collector(strategy, engine, FEW, policy=lambda **_: nullcontext(actor))
        mine = numbered_prompts(6)[first : first + number]
        samples = versions(collector.generate(mine, indices=range(first, first + number)))
    return {'samples': samples, 'asked': asked}


def test_neighbours_generate_each_others_prompts_and_keep_their_own_samples():
    local = LocalEngine()
    local.begin(Actor(tiny_causal_lm('gpt2')))
    expected = versions(local.generate(Call.of(numbered_prompts(6), FEW, seed=3, indices=range(6))))
    ranks = run_distributed(generate_with_neighbours, 4)
    assert [r['samples'] for r in ranks] == [expected[:2], expected[2:4], expected[4:], []]
    assert [r['asked'] for r in ranks] == [[[0, 1, 2, 3]], [[0, 1, 2, 3]], [[4, 5]], [[4, 5]]]


def generate_from_shards(engine_kind: str, tensor_parallel: int, lora_rank: int) -> dict[str, Any]:
    fsdp.streams = lambda *_: True  # as if the weights did not fit on the device
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
        prepared = strategy.prepare(actor_with_adapters(lora_rank))
        begin = engine.begin

        def watched(model: Any) -> None:
            seen['streamed'] = any(getattr(m, 'is_streamed', False) for m in model.modules())
            seen['whole'] = sum(p.numel() for p in model.parameters())
            begin(model)

        engine.begin = watched
        collector = Collector(strategy, shared, GREEDY, policy=partial(strategy.full_model, prepared))
        share = 6 // strategy.world_size
        first = share * strategy.rank
        samples = collector.generate(numbered_prompts(6)[first : first + share], indices=range(first, first + share))
        seen['generated'] = [(s.index, s.response_ids.tolist()) for s in samples]
    return seen


@pytest.mark.parametrize(
    ('engine_kind', 'tensor_parallel', 'lora_rank'),
    [('remote', 1, 0), ('store', 2, 0), ('tcp', 2, 0), ('nccl', 2, 2)],
)
def test_workers_have_the_whole_policy(engine_kind, tensor_parallel, lora_rank):
    alone = actor_with_adapters(lora_rank)
    expected = [(s.index, s.response_ids.tolist()) for s in local(alone, numbered_prompts(6), sampling=GREEDY)]
    results = run_distributed(generate_from_shards, 2, engine_kind, tensor_parallel, lora_rank)
    share = 6 if tensor_parallel == 2 else 3  # processes that share a tensor-parallel model have the same prompts
    assert results[0]['generated'] == expected[:share]
    assert results[1]['generated'] == (expected if tensor_parallel == 2 else expected[3:])
    assert results[0]['streamed'] is False and results[0]['whole'] == sum(p.numel() for p in alone.parameters())
