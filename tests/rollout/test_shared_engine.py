"""One engine for all ranks: each keeps the samples of its own prompts, drawn with rank 0's weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from in_process_workers import InProcessWorkers

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, RemoteEngine, SamplingParams, SharedEngine
from chatgpt.strategies import DDPStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.collect import Collector
from chatgpt.types import Prompt, Sample

SAMPLING = SamplingParams(max_new_tokens=5, eos_token_ids=(2,))


def prompts(num: int) -> list[Prompt]:
    return [Prompt(ids=torch.tensor([5, 3 + i]), text=str(i)) for i in range(num)]


def drawn(samples: list[Sample]) -> list[Any]:
    return [(s.index, s.prompt_text, s.response_ids.tolist(), s.version) for s in samples]


def of_a_rank() -> dict[str, Any]:
    workers = InProcessWorkers(2)
    with DDPStrategy(seed=3, device='cpu') as strategy, SharedEngine(strategy, RemoteEngine(workers)) as engine:
        model = tiny_causal_lm('gpt2')
        if strategy.rank == 1:  # is not asked
            torch.nn.init.zeros_(model.transformer.wte.weight)
        mine = prompts(7)[:3] if strategy.rank == 0 else prompts(7)[3:]
        first = 3 * strategy.rank
        found: dict[str, Any] = {}
        engine.begin(Actor(model))
        tickets = [
            engine.submit(Call.of(mine, SAMPLING, seed=seed, indices=range(first, first + len(mine))))
            for seed in (5, 6)
        ]
        engine.end()
        found['drawn'] = [drawn(engine.take(ticket)) for ticket in reversed(tickets)]
        found['started'] = len(workers.workers)
        # ranks that want different limits, or nothing, still ask alike
        endless = SamplingParams(max_new_tokens=5)
        collector = Collector(strategy, engine, endless, policy=lambda **_: nullcontext(Actor(model)))
        limits = [1, 2, 2] if strategy.rank == 0 else []
        samples = collector.generate(mine[: len(limits)], indices=range(len(limits)), limits=limits)
        found['limited'] = [len(s.response_ids) for s in samples]
        engine.begin(Actor(model))
        try:
            engine.submit(
                Call.of([Prompt(ids=torch.tensor([], dtype=torch.int64))], SAMPLING, seed=0, indices=[strategy.rank])
            )
        except ValueError as error:
            found['error'] = str(error)
        return found


def test_ranks_share_the_workers_of_rank_0():
    results = run_distributed(of_a_rank, 2)
    local, expected = LocalEngine(), []
    local.begin(Actor(tiny_causal_lm('gpt2')))
    for seed in (6, 5):
        samples = local.generate(Call.of(prompts(7), SAMPLING, seed=seed, indices=range(7)))
        expected.append([(i, text, ids, 1) for i, text, ids, _ in drawn(samples)])
    local.end()
    for rank, found in enumerate(results):
        mine = slice(0, 3) if rank == 0 else slice(3, 7)
        assert found['drawn'] == [samples[mine] for samples in expected]
        assert found['error'].startswith('generate: prompt 0 is empty')
    assert [found['started'] for found in results] == [2, 0]
    assert [found['limited'] for found in results] == [[1, 2, 2], []]
