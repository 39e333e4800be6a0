"""Weights from two ranks to vLLM workers, each served by one of them, with the fake vLLM and gloo instead of NCCL."""

from __future__ import annotations

import os
import signal
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from remote_calls import perturb
from spawned_workers import STAND_IN, SpawnedWorkers

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams, SharedEngine, vllm_links, vllm_remote, vllm_worker, wire
from chatgpt.rollout.vllm_remote import VLLMRemoteEngine
from chatgpt.strategies import DDPStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.types import Prompt

GREEDY = SamplingParams(max_new_tokens=4, do_sample=False)
PROMPTS = [Prompt(ids=torch.tensor([5, 3 + i])) for i in range(4)]
BUCKET_BYTES = 4096


def use_stand_in() -> None:
    sys.path.insert(0, str(STAND_IN))
    vllm_remote.SENT_FROM = ('cuda', 'cpu')


def generated(engine: Any, first: int, last: int) -> list[list[int]]:
    samples = engine.generate(Call.of(PROMPTS[first:last], GREEDY, seed=5, indices=range(first, last)))
    return [s.response_ids.tolist() for s in samples]


class Buckets:
    """Counts the bytes of the buckets of a module that exist."""

    def __init__(self, module: Any) -> None:
        self.live = self.most = 0
        self.make, module.bucket_buffer = module.bucket_buffer, self.counted

    def counted(self, num_bytes: int, **options: Any) -> torch.Tensor:
        buffer = self.make(num_bytes, **options)
        self.live += num_bytes
        self.most = max(self.most, self.live)
        weakref.finalize(buffer, self._freed, num_bytes)
        return buffer

    def _freed(self, num_bytes: int) -> None:
        self.live -= num_bytes


def held_by(workers: SpawnedWorkers, worker: int, model: Any) -> bool:
    """Returns True if the worker has exactly the model's weights."""
    own = workers._workers[worker][1].llm.merged_model().state_dict()
    return all(torch.equal(own[name], tensor) for name, tensor in model.state_dict().items())


def send_on_rank() -> dict[str, Any]:
    use_stand_in()
    buckets, of_workers = Buckets(wire), Buckets(vllm_worker)
    model, other, workers = tiny_causal_lm('gpt2'), tiny_causal_lm('gpt2'), SpawnedWorkers(3, {'GPU': 2})
    perturb(other)
    found: dict[str, Any] = {'bytes': sum(p.numel() * p.element_size() for p in model.parameters())}
    engine = VLLMRemoteEngine(workers, weight_transfer='nccl', bucket_bytes=BUCKET_BYTES)
    with DDPStrategy(seed=3, device='cpu') as strategy, SharedEngine(strategy, engine) as shared:
        first = 2 * strategy.rank
        for _ in range(2):
            perturb(model)
            shared.begin(Actor(model))
        found['generated'] = generated(shared, first, first + 2)
        found['links'], found['ways'] = sorted(engine.links), engine.ways
        found['most'], found['of_workers'] = buckets.most, of_workers.most
        # what a rank sends is what its workers have
        shared.begin(Actor(other if strategy.rank == 1 else model))
        found['held'] = strategy.is_rank_0 and [held_by(workers, w, other if w == 1 else model) for w in range(3)]
        # sending that fails on rank 1 is an error of both
        vllm_links.STOPPING_S = 0.2
        if strategy.rank == 1:
            engine.links[1].group.broadcast = lambda *_: 1 // 0
        with pytest.raises((RuntimeError, ConnectionError)) as error:
            shared.begin(Actor(model))
        found['error'] = str(error.value)
    return found


def test_each_rank_sends_all_buckets_to_its_own_workers():
    results = run_distributed(send_on_rank, 2)
    model, local = tiny_causal_lm('gpt2'), LocalEngine()
    perturb(model), perturb(model)
    local.begin(Actor(model))
    expected = generated(local, 0, 4)
    for rank, found in enumerate(results):
        assert found['generated'] == expected[2 * rank : 2 * rank + 2]
        assert found['links'] == ([0, 2] if rank == 0 else [1])
        assert 0 < found['most'] <= BUCKET_BYTES < found['bytes'] / 20
    assert results[0]['ways'] == ['nccl'] * 3
    assert 0 < results[0]['of_workers'] <= 3 * 2 * BUCKET_BYTES, 'one for each GPU of each worker'
    assert results[0]['held'] == [True] * 3
    assert 'sending weights to rollout worker 1 by nccl: ZeroDivisionError' in results[1]['error']


def kill_on_rank() -> dict[str, Any]:
    use_stand_in()
    found: list[Any] = []
    model, workers = tiny_causal_lm('gpt2'), SpawnedWorkers(2, {'GPU': 2}, spawn=True)
    fill, kills = vllm_remote.fill_buckets, []

    def killing(*given: Any, **options: Any) -> Any:
        for number, bucket in enumerate(fill(*given, **options)):
            if number == at and not kills:
                kills.append(number)
                os.kill(pid, signal.SIGKILL)
            yield bucket

    vllm_remote.fill_buckets = killing
    engine = VLLMRemoteEngine(workers, weight_transfer='nccl', bucket_bytes=BUCKET_BYTES)
    with DDPStrategy(seed=3, device='cpu') as strategy, SharedEngine(strategy, engine) as shared:
        first = 2 * strategy.rank
        for dies in (None, 1, 0):
            pids = [p for pool, _ in workers._workers for p in pool._processes]
            pid = strategy.broadcast_object(pids)[dies] if dies is not None else 0
            at = 3 if dies == strategy.rank else None
            kills.clear()
            perturb(model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                shared.begin(Actor(model))
            lines = [str(w.message) for w in caught if 'rollout worker' in str(w.message)]
            ids = generated(shared, first, first + 2)
            found.append((ids, lines, list(kills), engine.num_replaced, engine.num_able))
    return {'found': found}


@pytest.mark.system
def test_a_worker_that_dies_in_the_middle_of_a_transfer_is_replaced_whichever_rank_serves_it():
    results = run_distributed(kill_on_rank, 2)
    model, local = tiny_causal_lm('gpt2'), LocalEngine()
    for version, dies in enumerate((None, 1, 0)):
        perturb(model)
        local.begin(Actor(model))
        expected = generated(local, 0, 4)
        for rank in range(2):
            ids, lines, kills, replaced, able = results[rank]['found'][version]
            assert ids == expected[2 * rank : 2 * rank + 2]
            assert kills == ([3] if dies == rank else [])
            if rank == 0:
                assert (replaced, able) == (version, 2) and len(lines) == (dies is not None)
                assert dies is None or f'worker {dies} died (its process ended); a new one takes its place' in lines[0]
