"""Timesteps that were asked of a rollout engine and not learned from yet: a queue, and what a checkpoint needs to know
of it.

    phase v:  ask ─▶ [v .. v + n] are now in flight, the newest with this phase's weights    (n = `max_staleness`)
              take ◀─ the oldest, for this phase; the others go on while the trainer scores and learns

So a sample is at most n phases older than the weights it teaches, and never more than n + 1 phases' timesteps are in
flight. The order is that of the prompts, so which weights draw which sample follows from the settings alone. Left out:
the engine, and scoring.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from chatgpt.rollout import Call, RolloutEngine
from chatgpt.rollout.wire import PackedEpisode, PackedSamples, pack_samples, unpack_samples
from chatgpt.strategies.base import Strategy
from chatgpt.types import Episode, Sample, Turn


@dataclass(eq=False, kw_only=True)
class Timestep:
    """One timestep that was given out: this rank's share of its prompts."""

    first_prompt: int
    """draws of prompts before it, all ranks together"""
    first_sample: int
    call: Call
    """what the engine is asked"""
    version: int = 0
    """learning phases behind the weights it was asked of"""
    ticket: Any = None
    samples: list[Sample] | None = None

    def stamped(self, generate: Callable[[Call], list[Sample]]) -> list[Sample]:
        """What `generate` gives for its call, which weights of its version have drawn."""
        samples = generate(self.call)
        for sample in samples:
            sample.version = self.version
        return samples


class Pipeline:
    """First in, first out.

    Args:
        max_staleness: learning phases that the weights behind a sample may be old.
        draw: gives out the next timestep, for weights with so many learning phases behind them.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        strategy: Strategy,
        max_staleness: int,
        draw: Callable[[int], Timestep],
    ) -> None:
        self.engine, self.strategy, self.max_staleness, self._draw = engine, strategy, max_staleness, draw
        self.waiting: deque[Timestep] = deque()
        """asked and not taken, oldest first"""
        self.taken: list[Timestep] = []
        """taken in this phase"""
        self._loaded: Mapping[str, Any] = {}
        """what a checkpoint says was in flight, until a phase takes it up"""

    def take_up(self, sizes: SequenceOf[int], version: int, made_from: Callable[[], Any]) -> bool:
        """Let what was in flight in a checkpoint that was loaded wait here again, its prompts given out anew. False,
        with a warning, where it does not fit the phases to come (`sizes` in timesteps, the present one first), or
        where settings or data have changed (`made_from`): then its prompts must be forgotten."""
        loaded, self._loaded = self._loaded, {}
        records = loaded.get('in_flight', ())
        if not records:
            return True
        due = [phase for phase, size in enumerate(sizes, version) for _ in range(size)]
        fits = len(records) <= len(due) and loaded.get('in_flight_from') == made_from()
        fits = fits and all(at - r['version'] <= self.max_staleness for at, r in zip(due, records, strict=False))
        self.waiting.extend(self._draw(version) for _ in records)
        if fits and restored(records, self.waiting, self.strategy.rank, self.strategy.world_size):
            return True
        if self.strategy.is_rank_0:
            told = (
                f'{len(records)} timesteps in flight in the checkpoint do not fit this run; their prompts are asked '
                'for again'
            )
            warnings.warn(told, stacklevel=2)
        return False

    def ask(self, version: int) -> None:
        """Give the next timestep out, and ask the engine for it."""
        timestep = self._draw(version)
        timestep.ticket = self.engine.submit(timestep.call)
        self.waiting.append(timestep)

    def take(self, version: int) -> list[Sample]:
        """The samples of the oldest timestep, for weights of this version; waits for them."""
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
            timestep.samples = timestep.stamped(lambda _: self.engine.take(timestep.ticket))
            timestep.ticket = None
        return timestep.samples

    def give_up(self, version: int) -> list[Timestep]:
        """End a phase without learning from it.

        Returns the timesteps, taken or not, that were asked of older weights than the phase's own. The others are
        dropped, because the same weights will generate them again.
        """
        everything = [*self.taken, *self.waiting]
        kept = [t for t in everything if t.version < version]
        self.waiting = deque(t for t in everything if t.version >= version)
        self.clear()
        return kept

    def clear(self) -> None:
        """Forget everything; nobody generates for it any more."""
        for timestep in self.waiting:
            if timestep.ticket is not None:
                self.engine.cancel(timestep.ticket)
        self.waiting.clear()
        self.taken.clear()
        self._loaded = {}

    def state(self, made_from: Callable[[], Any]) -> dict[str, Any]:
        """Everything in flight as JSON, all ranks together. Waits until it is generated; a collective."""
        if not self.waiting:
            return {k: self._loaded[k] for k in ('in_flight', 'in_flight_from') if k in self._loaded}
        records = []
        for t in self.waiting:
            samples = self._wait(t)
            shares = self.strategy.all_gather_object(_to_json(pack_samples(samples, t.version)))
            joined = {name: [x for share in shares for x in share[name]] for name in shares[0]}
            where = {'first_prompt': t.first_prompt, 'first_sample': t.first_sample, 'version': t.version}
            records.append(where | {'temperature': samples[0].temperature} | joined)
        return {'in_flight': records, 'in_flight_from': made_from()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Of a checkpoint; see `take_up`."""
        self.clear()
        self._loaded = state


def restored(records: SequenceOf[Mapping[str, Any]], timesteps: Iterable[Timestep], rank: int, world_size: int) -> bool:
    """Fill timesteps that were drawn again with the samples of a checkpoint; False when they are not the same
    timesteps."""
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
}


def _to_json(packed: PackedSamples) -> dict[str, list[Any]]:
    """A number of fp32 is written with all its bits: JSON's decimals are those of the equal fp64. What only episodes
    have is empty for others."""
    arrays = {name: getattr(packed, name) for name in _ARRAYS}
    record: dict[str, list[Any]] = {name: [] if array is None else array.tolist() for name, array in arrays.items()}
    episodes = [e._asdict() | {'episode': asdict(e.episode)} for e in packed.episodes or ()]
    return record | {'reasons': list(packed.reasons), 'episodes': episodes}


def _share(record: Mapping[str, Any], start: int, stop: int) -> PackedSamples:
    """Samples [start, stop) of a record."""
    before, inside = sum(record['lengths'][:start]), sum(record['lengths'][start:stop])
    arrays: dict[str, Any] = {}
    for name, dtype in _ARRAYS.items():
        first, last = (start, stop) if name == 'lengths' else (before, before + inside)
        values = record.get(name, ())
        arrays[name] = np.array(values[first:last], dtype=dtype) if values else None
    episodes = [_episode(e) for e in record.get('episodes', ())[start:stop]]
    return PackedSamples(
        version=record['version'], reasons=list(record['reasons'][start:stop]), episodes=episodes or None, **arrays
    )


def _episode(record: Mapping[str, Any]) -> PackedEpisode:
    turns = tuple(Turn(**turn) for turn in record['episode']['turns'])
    return PackedEpisode(**(dict(record) | {'episode': Episode(**(record['episode'] | {'turns': turns}))}))
