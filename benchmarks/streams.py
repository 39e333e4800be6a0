"""Updates per hour of a stream of samples against a synchronous run, where a tenth of the responses are ten times longer.

    python benchmarks/streams.py [--page]

The clock is simulated: the queue of samples is the trainer's own, one decode step of a worker takes one unit, however
many rows it has, and prefill takes a unit for as many tokens as `PREFILL`. The same rows per worker, responses and
learning for all.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

from harness import markdown, script_parser, write_page

from chatgpt.trainer.sample_queue import Entry, SampleQueue

SHORT, LONG, PREFILL, PHASES = 200, 2000, 512, 40


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


def simulated() -> str:
    parts = []
    for workers in (2, 4):
        base = rates(workers, max_staleness=0)
        rows = [['synchronous', f'{base[0]:,.0f}', '1.00', f'{base[1]:.2f}', '0']]
        for n in (1, 2, 4):
            for size in (None, 100):
                rate, busy, age = rates(workers, max_staleness=n, slice_tokens=size)
                name = f'max_staleness {n}, {"whole responses" if size is None else f"parts of {size} tokens"}'
                rows.append([name, f'{rate:,.0f}', f'{rate / base[0]:.2f}', f'{busy:.2f}', f'{age:.2f}'])
        head = ['run', 'updates per million steps', 'against synchronous', 'share of workers busy', 'mean age']
        parts.append(f'{workers} workers:\n\n{markdown(head, rows)}')
    return '\n\n'.join(parts)


def main() -> None:
    args = script_parser(__doc__, 'streams.md').parse_args()
    table = simulated()
    print(table)
    if args.page:
        write_page('streams.md', simulated=table)


if __name__ == '__main__':
    main()
