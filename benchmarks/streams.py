"""Updates per hour of a stream of samples against a synchronous run, where a tenth of the responses are ten times longer.

    python benchmarks/streams.py [--page]

First on a simulated clock: the queue of samples is the trainer's own, one decode step of a worker takes one unit,
however many rows it has, and prefill takes a unit for as many tokens as `PREFILL`. The same rows per worker, responses
and learning for all.

Then in seconds: a trainer scores and learns with a tiny model, and Ray actors take up its weights and sleep for
`STEP_S` for each decode step and for as many tokens of prefill as `PREFILL`. Such an actor stands in for a GPU, whose
steps take as long with one row as with many, and needs no core.
"""

from __future__ import annotations

import heapq
import math
import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

import harness
import torch
from harness import markdown, script_parser, write_page

from chatgpt.rollout.engine import EngineAround
from chatgpt.trainer.sample_queue import Entry, SampleQueue

SHORT, LONG, PREFILL, PHASES = 200, 2000, 512, 40
STEP_S, SCALE, BATCH_S, PHASES_S, PARTS_S = 0.04, 10, 32, 12, (10, 20)
"""of the runs in seconds: those of a decode step, how much shorter responses are, responses of a phase, phases,
and tokens of parts"""


@dataclass
class Simulation:
    """A run on a clock of decode steps.

    Attributes:
        workers: number of workers; `joining` ones come at their times.
        batch: samples of a phase.
        slice_tokens: None generates whole responses.
        learn: steps that learning takes.
        slowness: factors of workers' times.
    """

    workers: int
    max_staleness: int
    batch: int = 64
    slice_tokens: int | None = None
    learn: float = 200.0
    phases: int = PHASES
    seed: int = 0
    slowness: dict[int, float] = field(default_factory=dict)
    joining: list[float] = field(default_factory=list)
    killed: dict[int, float] = field(default_factory=dict)
    """time at which a worker dies, with what it has; a new one takes its place"""
    replayed: Any = None

    def __post_init__(self) -> None:
        self.queue = SampleQueue(self.max_staleness)
        self.queue.replayed = self.replayed
        self.rows = self.batch // self.workers
        self.now = self.steps = 0.0
        self.ages: list[list[int]] = []
        """per phase, the ages of the first tokens"""
        self.takers: dict[int, set[int]] = {}
        """the workers that generated a sample"""
        self._events: list[tuple[float, int, Any]] = []
        self._idle = list(range(self.workers))
        self._drawn = self._number = 0
        for at in self.joining:
            self._at(at, 'join', None)

    def length(self, index: int) -> int:
        """Tokens of a response, a function of its number."""
        return LONG if random.Random(f'{self.seed} {index}').random() < 0.1 else SHORT

    def run(self) -> float:
        """Returns the steps until the last phase is learned."""
        for phase in range(self.phases):
            left = self.phases - phase
            sizes = [self.batch] * min(left, 1 + self.max_staleness)
            while self.queue.must_send(phase):
                self._send()
                if self.queue.must_send(phase):
                    self._next()
            self.queue.begin(phase, sizes)
            while len(self.queue.groups) < sum(sizes):
                self.queue.add(self._drawn, [Entry(self._drawn, self._drawn)])
                self._drawn += 1
            self._send()
            ages: list[int] = []
            while self.queue.sizes[0]:
                group = self.queue.take()
                if group is None:
                    self._next()
                    continue
                ages += [phase - e.version for e in group if e.version is not None]
            self.ages.append(ages)
            self.queue.taken.clear()
            learned = self.now + self.learn
            while self._events and self._events[0][0] <= learned:
                self._next()
            self.now = learned
        return self.now

    def _at(self, time: float, kind: str, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, (kind, what)))

    def _send(self) -> None:
        while self._idle and (entries := self.queue.hand_out(self.rows)):
            worker = self._idle.pop(0)
            parts = [min(self.slice_tokens or LONG, self.length(e.index) - e.num_tokens) for e in entries]
            steps = max(parts) + sum(e.num_tokens for e in entries) / PREFILL
            self.steps += steps
            steps *= self.slowness.get(worker, 1.0)
            dies = self.killed.get(worker, float('inf'))
            if self.now < dies <= self.now + steps:  # the new worker begins the request again
                steps += dies - self.now
                del self.killed[worker]
            self._at(self.now + steps, 'answer', (worker, list(zip(entries, parts, strict=True))))

    def _next(self) -> None:
        """Goes to the next event."""
        self.now, _, (kind, what) = heapq.heappop(self._events)
        if kind == 'join':
            self._idle.append(self.workers)
            self.workers += 1
        else:
            worker, parts = what
            self._idle.append(worker)
            for entry, part in parts:
                self.takers.setdefault(entry.index, set()).add(worker)
                size = entry.num_tokens + part
                self.queue.give_back(entry.index, size, size == self.length(entry.index))
        self._send()


def rates(workers: int, **settings: Any) -> tuple[float, float, float]:
    """Returns updates per million steps, the share of the workers' time that they compute, and the mean age."""
    run = Simulation(workers, **settings)
    steps = run.run()
    ages = [age for phase in run.ages for age in phase]
    return 1e6 * run.phases / steps, run.steps / steps / workers, sum(ages) / len(ages)


def simulated() -> list[dict[str, Any]]:
    ways = [(0, None), *((n, size) for n in (1, 2, 4) for size in (None, 100))]
    found = []
    for workers in (2, 4):
        for n, size in ways:
            rate, busy, age = rates(workers, max_staleness=n, slice_tokens=size)
            found.append({'workers': workers, 'max_staleness': n, 'part': size, 'rate': rate, 'busy': busy, 'age': age})
    return found


def name_of(run: dict[str, Any]) -> str:
    if not run['max_staleness']:
        return 'synchronous'
    return f'max_staleness {run["max_staleness"]}, ' + (
        'whole responses' if run['part'] is None else f'parts of {run["part"]} tokens'
    )


def simulated_table(runs: list[dict[str, Any]]) -> str:
    head = ['run', 'updates per million steps', 'against synchronous', 'share of workers busy', 'mean age']
    parts = []
    for workers in (2, 4):
        own = [run for run in runs if run['workers'] == workers]
        rows = [
            [
                name_of(run),
                f'{run["rate"]:,.0f}',
                f'{run["rate"] / own[0]["rate"]:.2f}',
                f'{run["busy"]:.2f}',
                f'{run["age"]:.2f}' if run['max_staleness'] else '0',
            ]
            for run in own
        ]
        parts.append(f'{workers} workers:\n\n{markdown(head, rows)}')
    return '\n\n'.join(parts)


# ---------------------------------------------------------------------- in seconds


def length_of(index: int) -> int:
    """Tokens of a response in the runs in seconds, a function of its number."""
    return (LONG if random.Random(f'0 {index}').random() < 0.1 else SHORT) // SCALE


class FixedSteps(EngineAround):
    """Computes nothing: answers with one token over and over, in fixed lengths, when a GPU would have decoded them."""

    def generate(self, call: Any) -> Any:
        left = [length_of(i) - offset for i, offset in zip(call.indices, call.offsets, strict=True)]
        sizes = [n if limit is None else min(n, limit) for n, limit in zip(left, call.limits, strict=True)]
        time.sleep((max(sizes) + sum(call.offsets) / PREFILL) * STEP_S)
        samples = []
        for i, (size, n) in enumerate(zip(sizes, left, strict=True)):
            ids, logprobs = torch.full((size,), 7), torch.full((size,), -math.log(64))
            samples.append(call.sample(i, ids, logprobs, logprobs, logprobs.exp(), 'stop' if size == n else 'length'))
        return samples


def in_seconds(workers: int, max_staleness: int, part: int | None) -> dict[str, Any]:
    """Returns seconds, phases and mean age of a run with that many Ray actors."""
    from chatgpt.nn import Actor, Critic
    from chatgpt.rollout import RemoteEngine
    from chatgpt.rollout.ray_workers import RayWorkers
    from chatgpt.strategies import NaiveStrategy
    from chatgpt.testing.fakes import tiny_causal_lm
    from chatgpt.trainer.callbacks import Callback

    ages: list[float] = []
    learning: list[float] = []

    class Ages(Callback):
        def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            ages.append(metrics.get('rollout/staleness_mean', 0.0))
            learning.append(metrics['perf/learn_s'])

    size: dict[str, Any] = {'hidden': 16, 'layers': 1, 'heads': 2, 'positions': 256, 'vocab_size': 64}
    prompts = [torch.tensor([3 + i % 7, 5, 6]) for i in range(BATCH_S)]
    pool = RayWorkers(workers, resources={'CPU': 1})
    with (
        NaiveStrategy(seed=1, device='cpu') as strategy,
        RemoteEngine(pool, chunk_size=BATCH_S // workers, slice_tokens=part) as engine,
    ):
        engine.put_around(FixedSteps)
        critic = tiny_causal_lm('gpt2', 1, **size)
        trainer = harness.ppo_trainer(
            strategy,
            Actor(tiny_causal_lm('gpt2', 0, **size)),
            Critic(critic.transformer, torch.nn.Linear(16, 1)),
            lambda prompts, responses: [0.0] * len(prompts),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            callbacks=[Ages()],
            engine=engine,
            experience_batch_size=BATCH_S,
            train_batch_size=BATCH_S,
            max_epochs=1,
            max_new_tokens=LONG // SCALE,
            kl_coef=0.0,
            recompute_logprobs=True,
            max_staleness=max_staleness,
        )
        trainer.generate(prompts)  # actors have started and have a model
        _, spent = harness.timed(lambda: trainer.fit(prompts, 1, PHASES_S, 1))
    return {
        'workers': workers,
        'max_staleness': max_staleness,
        'part': part,
        'phases': PHASES_S,
        'age': sum(ages) / len(ages),
        'learn_s': sum(learning) / len(learning),
        'load': os.getloadavg()[0],
        **spent,
    }


def table_in_seconds(runs: list[dict[str, Any]]) -> str:
    rows = []
    base = {run['workers']: run['phases'] / run['wall_s'] for run in runs if not run['max_staleness']}
    for run in runs:
        rate = run['phases'] / run['wall_s']
        against, age = rate / base[run['workers']], f'{run["age"]:.2f}' if run['max_staleness'] else '0'
        rows.append([run['workers'], name_of(run), f'{3600 * rate:,.0f}', f'{against:.2f}', f'{1 / rate:.2f}', age])
    return markdown('workers | run | updates per hour | against synchronous | seconds per update | mean age', rows)


def main() -> None:
    args = script_parser(__doc__, 'streams.md').parse_args()
    results, runs = harness.Results('streams.json'), []
    for workers in (2, 4):
        for n, part in ((0, None), *((n, part) for n in (1, 2) for part in PARTS_S)):
            key = f'{workers} workers, max_staleness {n}, parts {part}'
            runs.append(results.measure(key, lambda w=workers, n=n, part=part: in_seconds(w, n, part)))
    steps = results.measure('simulated', simulated, len)
    if args.page:
        write_page('streams.md', simulated=simulated_table(steps), wall=table_in_seconds(runs))


if __name__ == '__main__':
    main()
