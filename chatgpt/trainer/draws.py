"""Timesteps: prompts and sample numbers of each, functions of counters; and timesteps that an engine generates ahead.

    phase v:  ask ─▶ [v .. v + n] are now in flight, the newest with this phase's weights    (n = `max_staleness`)
              take ◀─ the oldest, for this phase; the others continue while the trainer scores and learns

A sample comes from weights at most n phases older than those that learn from it, and at most n + 1 phases' timesteps
are in flight. They are taken in the order of the prompts, so the settings alone determine which weights generate which
sample.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from chatgpt.data.prompts import PromptOrder, PromptSet
from chatgpt.rollout import Call, RolloutEngine, SamplingParams
from chatgpt.rollout.wire import PackedEpisode, PackedSamples, pack_samples, unpack_samples
from chatgpt.strategies.base import Strategy
from chatgpt.types import Episode, Sample, Turn


@dataclass(eq=False, kw_only=True)
class Timestep:
    """A timestep: this rank's share of its prompts, and its samples once they are generated."""

    first_prompt: int
    """number of prompts before it, all ranks together"""
    first_sample: int
    call: Call
    """the call of the engine"""
    version: int
    """learning phases of the weights that generate it"""
    ticket: Any = None
    samples: list[Sample] | None = None

    def generated(self, generate: Callable[[Call], list[Sample]]) -> list[Sample]:
        """Returns the samples of `generate` for its call, with their version."""
        samples = generate(self.call)
        for sample in samples:
            sample.version = self.version
        return samples


class Draws:
    """A source of timesteps, each generated when it is needed. Its counters are part of a checkpoint.

    Args:
        sampling: parameters of every call.
        batch_size: prompts of one timestep, all ranks together.
        num_samples_per_prompt: responses to each prompt.
        begun: a context in which the engine has the policy's weights.
        generate: calls the engine.
        made_from: returns everything that determines samples except the weights, as JSON.
    """

    def __init__(
        self,
        strategy: Strategy,
        sampling: SamplingParams,
        batch_size: int,
        num_samples_per_prompt: int,
        *,
        begun: Callable[[], AbstractContextManager[Any]],
        generate: Callable[[Call], list[Sample]],
        made_from: Callable[[], Any],
    ) -> None:
        self.strategy, self.sampling = strategy, sampling
        self.begun, self.generate, self.made_from = begun, generate, made_from
        self.batch_size, self.num_samples_per_prompt = batch_size, num_samples_per_prompt
        self.prompts: PromptSet | None = None
        self._order: PromptOrder | None = None
        self.prompts_drawn = 0
        """number of prompts used, all ranks together"""
        self.samples_drawn = 0

    def set_prompts(self, prompts: PromptSet) -> None:
        """Sets the prompts, which are sampled without replacement within an epoch."""
        self.prompts, self._order = prompts, PromptOrder(len(prompts), self.strategy.seed)

    def number(self, count: int) -> int:
        """Reserves run-wide numbers for `count` samples of this rank and returns the first. A collective."""
        counts = self.strategy.all_gather_object(count)
        first = self.samples_drawn + sum(counts[: self.strategy.rank])
        self.samples_drawn += sum(counts)
        return first

    def draw(self, version: int) -> Timestep:
        """Returns this rank's share of the next prompts, with their numbers."""
        assert self.prompts is not None and self._order is not None, 'set_prompts first'
        n, k = self.batch_size, self.num_samples_per_prompt
        first_prompt, first_sample, share = self.prompts_drawn, self.samples_drawn, n // self.strategy.world_size
        own = range(self.strategy.rank * share, (self.strategy.rank + 1) * share)
        call = Call.of(
            [self.prompts[self._order[first_prompt + i]] for i in own for _ in range(k)],
            self.sampling,
            seed=self.strategy.seed,
            indices=[first_sample + i * k + j for i in own for j in range(k)],
            groups=[first_prompt + i for i in own for _ in range(k)],
        )
        self.prompts_drawn += n
        self.samples_drawn += n * k
        return Timestep(first_prompt=first_prompt, first_sample=first_sample, call=call, version=version)

    @contextmanager
    def source(self, sizes: SequenceOf[int], version: int) -> Iterator[Callable[[], list[Sample]]]:
        """Yields a function that returns the samples of the next timestep; it may be called `sizes[0]` times.

        Args:
            sizes: numbers of timesteps of this phase and the following ones.
            version: learning phases of the policy.
        """
        with self.begun():
            yield lambda: self.draw(version).generated(self.generate)

    def learned(self) -> None:
        """Forgets the timesteps that were taken, once they are in the replay buffer."""

    def forget(self) -> None:
        """Drops the timesteps in flight; their prompts are used again."""

    @contextmanager
    def dropped(self, version: int) -> Iterator[None]:
        """Context of a `load_state_dict` that drops a phase: samples of older weights stay in flight."""
        yield

    def state_dict(self) -> dict[str, int]:
        return {'prompts_drawn': self.prompts_drawn, 'samples_drawn': self.samples_drawn}

    def state(self) -> dict[str, Any]:
        """Returns everything in flight as JSON and tensors, all ranks together. A collective."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        self.prompts_drawn, self.samples_drawn = int(state['prompts_drawn']), int(state['samples_drawn'])


class Pipeline(Draws):
    """A queue of timesteps that an engine generates up to `max_staleness` phases ahead."""

    def __init__(self, engine: RolloutEngine, max_staleness: int, *given: Any, **functions: Any) -> None:
        super().__init__(*given, **functions)
        self.engine, self.max_staleness = engine, max_staleness
        self.waiting: deque[Timestep] = deque()
        """submitted and not taken, oldest first"""
        self.taken: list[Timestep] = []
        """taken in this phase"""
        self._loaded: Mapping[str, Any] = {}
        """timesteps in flight of a loaded checkpoint, until a phase uses them"""

    @contextmanager
    def source(self, sizes: SequenceOf[int], version: int) -> Iterator[Callable[[], list[Sample]]]:
        sizes = sizes[: 1 + self.max_staleness]
        if not self._take_up(sizes, version):
            self.forget()
        missing = sum(sizes) - len(self.waiting)
        with self.begun() if missing > 0 else nullcontext():
            for _ in range(missing):
                self.ask(version)
        yield lambda: self._take(version)

    def _take_up(self, sizes: SequenceOf[int], version: int) -> bool:
        """Queues the timesteps in flight of a loaded checkpoint. Returns False, with a warning, if they do not fit the
        phases to come or if settings or data have changed."""
        loaded, self._loaded = self._loaded, {}
        records = loaded.get('in_flight', ())
        if not records:
            return True
        due = [phase for phase, size in enumerate(sizes, version) for _ in range(size)]
        fits = len(records) <= len(due) and loaded.get('in_flight_from') == self.made_from()
        fits = fits and all(at - r['version'] <= self.max_staleness for at, r in zip(due, records, strict=False))
        self.waiting.extend(self.draw(version) for _ in records)
        if fits and restored(records, self.waiting, self.strategy.rank, self.strategy.world_size):
            return True
        if self.strategy.is_rank_0:
            text = (
                f'{len(records)} timesteps in flight in the checkpoint do not fit this run; their prompts are asked '
                'for again'
            )
            warnings.warn(text, stacklevel=2)
        return False

    def ask(self, version: int) -> None:
        """Submits the next timestep to the engine."""
        timestep = self.draw(version)
        timestep.ticket = self.engine.submit(timestep.call)
        self.waiting.append(timestep)

    def _take(self, version: int) -> list[Sample]:
        """Waits for the samples of the oldest timestep, for weights of this version, and returns them."""
        timestep = self.waiting[0]
        samples = self._wait(timestep)
        self.taken.append(self.waiting.popleft())
        if version - timestep.version > self.max_staleness:
            raise RuntimeError(
                f'samples of phase {timestep.version + 1} came to phase {version + 1}, with '
                f'max_staleness={self.max_staleness}'
            )
        return samples

    def _wait(self, timestep: Timestep) -> list[Sample]:
        if timestep.samples is None:
            with self.strategy.ranks.untimed():
                timestep.samples = timestep.generated(lambda _: self.engine.take(timestep.ticket))
            timestep.ticket = None
        return timestep.samples

    def learned(self) -> None:
        self.taken.clear()

    def forget(self) -> None:
        super().load(self.state_dict())
        self._clear()

    @contextmanager
    def dropped(self, version: int) -> Iterator[None]:
        everything = [*self.taken, *self.waiting]
        kept = [t for t in everything if t.version < version]
        # the others are generated again by the same weights
        self.waiting = deque(t for t in everything if t.version >= version)
        self._clear()
        yield
        self.waiting.extend(kept)
        self.prompts_drawn += len(kept) * self.batch_size
        self.samples_drawn += len(kept) * self.batch_size * self.num_samples_per_prompt

    def _clear(self) -> None:
        """Cancels and forgets everything in flight."""
        for timestep in self.waiting:
            if timestep.ticket is not None:
                self.engine.cancel(timestep.ticket)
        self.waiting.clear()
        self.taken.clear()
        self._loaded = {}

    def state_dict(self) -> dict[str, int]:
        """Returns the counters before the timesteps in flight, which a resumed run generates again."""
        if not self.waiting:
            return super().state_dict()
        return {'prompts_drawn': self.waiting[0].first_prompt, 'samples_drawn': self.waiting[0].first_sample}

    def state(self) -> dict[str, Any]:
        """Waits until everything in flight is generated and returns it."""
        if not self.waiting:
            return {k: self._loaded[k] for k in ('in_flight', 'in_flight_from') if k in self._loaded}
        records = []
        for t in self.waiting:
            samples = self._wait(t)
            joined = _joined(self.strategy.all_gather_object(_record(pack_samples(samples, t.version))))
            where = {'first_prompt': t.first_prompt, 'first_sample': t.first_sample, 'version': t.version}
            records.append(where | {'temperature': samples[0].temperature} | joined)
        return {'in_flight': records, 'in_flight_from': self.made_from()}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._clear()
        self._loaded = state


def restored(records: SequenceOf[Mapping[str, Any]], timesteps: Iterable[Timestep], rank: int, world_size: int) -> bool:
    """Fills timesteps with the samples of a checkpoint. Returns False if they are not the same timesteps."""
    for record, timestep in zip(records, timesteps, strict=True):
        call = timestep.call
        num_samples, first = len(call.prompts) * world_size, len(call.prompts) * rank
        where = record['first_prompt'], record['first_sample'], len(record['lengths'])
        if where != (timestep.first_prompt, timestep.first_sample, num_samples):
            return False
        packed = _share(record, first, first + len(call.prompts))
        timestep.version = packed.version
        timestep.samples = unpack_samples(packed, call.prompts, call.indices, call.groups, record['temperature'])
    return True


_ARRAYS = {
    'lengths': np.int64,
    'ids': np.int64,
    'logprobs': np.float32,
    'filtered_logprobs': np.float32,
    'edge_distances': np.float32,
    'masks': np.bool_,
    'versions': np.int64,
}


def _record(packed: PackedSamples) -> dict[str, Any]:
    """Returns samples as arrays, None where there are none, and lists of JSON."""
    episodes = [e._asdict() | {'episode': asdict(e.episode)} for e in packed.episodes or ()]
    arrays = {name: getattr(packed, name) for name in _ARRAYS}
    return arrays | {'version': packed.version, 'reasons': list(packed.reasons), 'episodes': episodes}


def _joined(shares: SequenceOf[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the records of all ranks as one, with tensors."""
    joined: dict[str, Any] = {n: [x for share in shares for x in share[n]] for n in ('reasons', 'episodes')}
    for name, dtype in _ARRAYS.items():
        if any(share[name] is not None for share in shares):  # without masks all are True, without versions the same
            missing = [True if name == 'masks' else s['version'] for s in shares]
            arrays = [
                np.full(len(s['ids']), m, dtype) if s[name] is None else s[name]
                for s, m in zip(shares, missing, strict=True)
            ]
            joined[name] = torch.from_numpy(np.concatenate(arrays))
    return joined


def _share(record: Mapping[str, Any], start: int, stop: int) -> PackedSamples:
    """Returns samples [start, stop) of a record."""
    before, inside = int(sum(record['lengths'][:start])), int(sum(record['lengths'][start:stop]))
    arrays: dict[str, Any] = {}
    for name, dtype in _ARRAYS.items():
        first, last = (start, stop) if name == 'lengths' else (before, before + inside)
        values = record.get(name, ())  # a tensor, or a list in checkpoints of earlier versions
        part = values[first:last]
        part = part.numpy() if isinstance(part, torch.Tensor) else np.array(part, dtype=dtype)
        arrays[name] = part if len(values) else None
    episodes = [_episode(e) for e in record.get('episodes', ())[start:stop]]
    return PackedSamples(
        version=record['version'], reasons=list(record['reasons'][start:stop]), episodes=episodes or None, **arrays
    )


def _episode(record: Mapping[str, Any]) -> PackedEpisode:
    turns = tuple(Turn(**turn) for turn in record['episode']['turns'])
    return PackedEpisode(**(dict(record) | {'episode': Episode(**(record['episode'] | {'turns': turns}))}))
