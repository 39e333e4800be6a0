"""Timesteps that were asked of a rollout engine and not learned from yet: a queue, and what a checkpoint needs to know
of it.

    phase v:  ask ─▶ [v .. v + n] are now in flight, the newest with this phase's weights    (n = `max_staleness`)
              take ◀─ the oldest, for this phase; the others go on while the trainer scores and learns

So a sample is at most n phases older than the weights it teaches, and never more than n + 1 phases' timesteps are in
flight. The order is that of the prompts, so which weights draw which sample follows from the settings alone. Left out:
the engine, and scoring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from chatgpt.rollout import AheadEngine
from chatgpt.rollout.wire import PackedEpisode, PackedSamples, pack_samples, unpack_samples
from chatgpt.types import Episode, Prompt, Sample, Turn


@dataclass(eq=False, kw_only=True)
class Timestep:
    """One timestep that was given out: this rank's share of its prompts."""

    first_prompt: int
    """draws of prompts before it, all ranks together"""
    first_sample: int
    prompts: list[Prompt]
    indices: list[int]
    groups: list[int]
    version: int = 0
    """learning phases behind the weights it was asked of"""
    ticket: Any = None
    samples: list[Sample] | None = None


class Pipeline:
    """First in, first out."""

    def __init__(self, engine: AheadEngine) -> None:
        self.engine = engine
        self.waiting: deque[Timestep] = deque()
        """asked and not taken, oldest first"""
        self.taken: list[Timestep] = []
        """taken in this phase"""

    def ask(self, timestep: Timestep, submit: Callable[..., Any]) -> None:
        timestep.ticket = submit(timestep.prompts, timestep.indices, timestep.groups)
        self.waiting.append(timestep)

    def put_back(self, timesteps: Iterable[Timestep]) -> None:
        """Timesteps that were asked for before, in order."""
        self.waiting.extend(timesteps)

    def take(self) -> Timestep:
        """The oldest timestep, with its samples; waits for them."""
        timestep = self.waiting[0]
        self._wait(timestep)
        self.taken.append(self.waiting.popleft())
        return timestep

    def _wait(self, timestep: Timestep) -> list[Sample]:
        if timestep.samples is None:
            timestep.samples = self.engine.take(timestep.ticket)
            timestep.ticket = None
            for sample in timestep.samples:
                sample.version = timestep.version
        return timestep.samples

    def give_up(self, phase: int) -> list[Timestep]:
        """End a phase without learning from it.

        Returns the timesteps, taken or not, that were asked of older weights than the phase's own. The others are
        dropped, because the same weights will generate them again.
        """
        everything = [*self.taken, *self.waiting]
        kept = [t for t in everything if t.version < phase]
        self.waiting = deque(t for t in everything if t.version >= phase)
        self.clear()
        return kept

    def learned(self) -> None:
        """What was taken will not be given up any more."""
        self.taken.clear()

    def clear(self) -> None:
        """Forget everything; nobody generates for it any more."""
        for timestep in self.waiting:
            if timestep.ticket is not None:
                self.engine.cancel(timestep.ticket)
        self.waiting.clear()
        self.taken.clear()

    def record(self, gather: Callable[[Any], list[Any]]) -> list[dict[str, Any]]:
        """Everything in flight as JSON, all ranks together. Waits until it is generated; a collective."""
        records = []
        for t in self.waiting:
            samples = self._wait(t)
            shares = gather(_to_json(pack_samples(samples, t.version)))
            joined = {name: [x for share in shares for x in share[name]] for name in shares[0]}
            where = {'first_prompt': t.first_prompt, 'first_sample': t.first_sample, 'version': t.version}
            records.append(where | {'temperature': samples[0].temperature} | joined)
        return records


def restored(
    records: SequenceOf[Mapping[str, Any]], timesteps: SequenceOf[Timestep], rank: int, world_size: int
) -> bool:
    """Fill timesteps that were drawn again with the samples of a checkpoint; False when they are not the same
    timesteps."""
    for record, timestep in zip(records, timesteps, strict=True):
        num_samples, first = len(timestep.prompts) * world_size, len(timestep.prompts) * rank
        where = record['first_prompt'], record['first_sample'], len(record['lengths'])
        if where != (timestep.first_prompt, timestep.first_sample, num_samples):
            return False
        packed = _share(record, first, first + len(timestep.prompts))
        timestep.version = packed.version
        timestep.samples = unpack_samples(
            packed, timestep.prompts, timestep.indices, timestep.groups, record['temperature']
        )
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
