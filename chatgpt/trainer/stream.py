"""A stream of samples: prompts that an engine generates ahead, and phases that take groups of samples as they end.

    phase v:  draw ─▶ the prompts of phases v to v + n are in the queue of samples       (n = `max_staleness`)
              take ◀─ groups for this phase; workers go on with others while the trainer scores and learns

A token comes from weights at most n phases older than those that learn from it (`chatgpt.trainer.sample_queue`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from chatgpt.rollout import Call, RolloutEngine, SamplingParams, WeightsLost
from chatgpt.rollout.wire import pack_samples
from chatgpt.trainer.draws import Draws
from chatgpt.trainer.in_flight import indices_of, joined_records, record_of, samples_of
from chatgpt.trainer.sample_queue import Entry, SampleQueue, Schedule
from chatgpt.types import FinishReason, Prompt, Sample

POLL_S = 0.05
"""seconds after which the thread of a stream looks for new requests"""


@dataclass(eq=False, kw_only=True)
class Open:
    """A request without an answer."""

    ticket: Any
    call: Call
    rooms: list[int]
    """the most tokens of each response"""
    version: int


class Stream(Draws):
    """Samples that an engine generates up to `max_staleness` phases ahead, of which a phase takes groups as they end.

    With an engine's `slice_tokens` and `max_staleness`, requests are small: `chunk_size` responses for so many tokens
    more, one request per worker. What has not ended then returns to the queue, and a free worker continues it with the
    newest weights and computes the keys and values of all its tokens again: a request is a function of token ids and of
    one version of the weights, on whichever worker, and can be repeated. A thread serves workers that compute while the
    trainer learns. Which worker is free depends on time, so the order is recorded (`Schedule`).

    Without, each timestep is one request, sent when its phase is drawn, and timesteps are taken in their order, but for
    one whose workers have died.
    """

    def __init__(self, engine: RolloutEngine, max_staleness: int, *given: Any, **functions: Any) -> None:
        super().__init__(*given, **functions)
        self.engine: Any = engine
        self.slice_tokens = engine.slice_tokens if max_staleness else None
        self.queue = SampleQueue(max_staleness, apart=bool(self.sampling.min_new_tokens))
        self.held: dict[int, Sample] = {}
        """tokens of untaken samples and of those that this phase took, by index"""
        self.firsts: dict[int, tuple[int, int]] = {}
        """first prompt and first sample of a group's timestep"""
        self.open: list[Open] = []
        """oldest first"""
        self._weights: int | None = None  # the engine's version of the queue's weights; None if workers have others
        self._lost = False  # every worker with the weights has died, and samples wait for `_begin`
        self._changed = threading.Condition()  # guards everything above, and the engine
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the thread
        self._at_start = 0, 0, 0  # the phase that collects, and the counters at its beginning
        self._keeps = False  # True in `dropped`
        self._loaded: Mapping[str, Any] = {}
        """a loaded checkpoint, until a phase uses it"""

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            if self._weights is not None and not self._lost:
                self._send_recorded(self.queue.version + 1)
            self._weights = None  # workers are about to get others
            yield

    @property
    def _stopped(self) -> bool:
        """True if the workers have died, or an evaluation has given them other weights."""
        return self._lost or (self.slice_tokens is not None and self._weights is None)

    @property
    def share(self) -> int:
        """Groups of a timestep on this rank."""
        return self.batch_size // self.strategy.world_size

    # ------------------------------------------------------------------ phases

    @contextmanager
    def source(self, sizes: SequenceOf[int], version: int) -> Iterator[Callable[[], list[Sample]]]:
        sizes = [self.share * size for size in sizes[: 1 + self.queue.max_staleness]]
        with self._changed:
            self._raise_error()
            self._take_up()
            self._send_recorded(version)
            self._weights = None
            if self._at_start[0] != version or not self.queue.taken:
                self._at_start = version, self.prompts_drawn, self.samples_drawn
            self.queue.begin(version, sizes)
            if self.queue.misfits():
                self._warn_of_misfit(len(self._timesteps()))
                self.forget()
            for _ in range(-(-(sum(sizes) - len(self.queue.groups)) // self.share)):
                call, first_prompt, first_sample = self.draw()
                self._add(call.indices, first_prompt, first_sample)
            idle = any(not e.ended and (self.slice_tokens or not e.busy) for e in self.queue.entries.values())
            if any(self.strategy.all_gather_object(idle)):
                self._begin()
        yield self._take

    def _begin(self) -> None:
        """Gives the engine the newest weights and sends requests. A collective, called with the lock."""
        with self.begun():
            self._weights, self._lost = self.engine.version if self.slice_tokens else None, False
            self._send()
        self._serve()

    def _add(self, indices: Iterable[int], first_prompt: int, first_sample: int) -> None:
        """Adds samples of a timestep to the queue."""
        groups: dict[int, list[Entry]] = {}
        for index in indices:
            group = first_prompt + (index - first_sample) // self.num_samples_per_prompt
            groups.setdefault(group, []).append(Entry(index, group))
        for group, entries in groups.items():
            self.queue.add(group, entries)
            self.firsts[group] = first_prompt, first_sample

    def _take(self) -> list[Sample]:
        """Waits for the groups of a timestep and returns their samples, in the order of their numbers."""
        entries: list[Entry] = []
        while any(self.strategy.all_gather_object(not self._fill(entries))):
            with self._changed:
                self._begin()
        return [uniform(self.held[e.index]) for e in sorted(entries, key=lambda e: e.index)]

    def _fill(self, entries: list[Entry]) -> bool:
        """Waits for the groups of a timestep. Returns False if weights must be sent again for them."""
        with self.strategy.ranks.untimed(), self._changed:
            while len(entries) < self.share * self.num_samples_per_prompt:
                if (group := self.queue.take()) is not None:
                    entries += group
                elif self._stopped and not self.open:
                    return False
                else:
                    self._wait()
        return True

    def learned(self) -> None:
        with self._changed:
            for group, entries in self.queue.taken.items():
                del self.firsts[group]
                for entry in entries:
                    del self.held[entry.index]
            self.queue.taken.clear()
            if not self.slice_tokens:  # the settings alone determine the order
                self.queue.schedule = Schedule()
            if not self.queue.entries:
                self._weights = None

    def forget(self) -> None:
        with self._changed:
            self._withdraw(self.open)
            self._loaded, self._error = {}, None
            self.queue.taken.clear()
            self.held.clear()
            for entry in self.queue.entries.values():
                self.queue.reset(entry)
            self.queue.schedule = Schedule()

    @contextmanager
    def dropped(self, version: int) -> Iterator[None]:
        with self._changed:
            self._withdraw([o for o in self.open if o.version >= version])
            self.queue.untake()
            self.queue.schedule.cut(version)
            if self._at_start[0] == version:  # what was drawn for this phase is drawn again
                _, self.prompts_drawn, self.samples_drawn = self._at_start
            for index, entry in list(self.queue.entries.items()):
                sample = self.held.pop(index, None)
                if index >= self.samples_drawn:
                    del self.queue.entries[index]
                    self.queue.groups.pop(entry.group, None)
                elif sample is not None:  # further tokens are generated again by the same weights
                    num_older = int((sample.token_versions < version).sum())
                    if num_older:
                        self.held[index] = sample if num_older == sample.num_actions else cut(sample, num_older)
                    if num_older < sample.num_actions:
                        self.queue.reset(entry, num_older)
            self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    # ------------------------------------------------------------------ requests

    def _send(self) -> None:
        """Sends requests as long as a worker is free, or, without `slice_tokens`, all."""
        sliced, rows = self.slice_tokens, self.share * self.num_samples_per_prompt
        if self._stopped:
            return
        while not sliced or len(self.open) < self.engine.num_able:
            entries = self.queue.hand_out(self.engine.chunk_size if sliced else rows)
            if not entries:
                return
            call, rooms = self._call(entries)
            ticket = self.engine.submit(call, self._weights) if sliced else self.engine.submit(call)
            self.open.append(Open(ticket=ticket, call=call, rooms=rooms, version=self.queue.version))

    def _call(self, entries: SequenceOf[Entry]) -> tuple[Call, list[int]]:
        """Returns the call that continues samples, and the most tokens that each may have."""
        prompts, starts = [self._prompt(e) for e in entries], [e.num_tokens for e in entries]
        given: Any = {'indices': [e.index for e in entries], 'groups': [e.group for e in entries]}
        given['seed'] = self.strategy.seed
        whole = Call.of(prompts, self.sampling, **given)
        rooms = [whole.room(i) for i in range(len(entries))]
        if not self.slice_tokens and not any(starts):
            return whole, rooms
        sampling, longest = self.sampling, self.slice_tokens or max(rooms)
        if any(starts):  # the first part has `min_new_tokens`
            sampling = replace(sampling, min_new_tokens=0)
        else:
            longest = max(longest, sampling.min_new_tokens)
        limits = [min(longest, room - start) for room, start in zip(rooms, starts, strict=True)]
        prompts = [
            replace(p, ids=torch.cat([p.ids.cpu(), self.held[e.index].response_ids])) if e.num_tokens else p
            for p, e in zip(prompts, entries, strict=True)
        ]
        return Call.of(prompts, sampling, offsets=starts, limits=limits, **given), rooms

    def _prompt(self, entry: Entry) -> Prompt:
        assert self.prompts is not None and self._order is not None, 'set_prompts first'
        return self.prompts[self._order[entry.group]]

    def _receive(self, request: Open) -> None:
        """Waits for the answer to a request and keeps its tokens."""
        try:
            pieces = self.engine.take(request.ticket)
        except WeightsLost:
            self.open.remove(request)
            self.queue.lose(request.version, dict(zip(request.call.indices, request.call.offsets, strict=True)))
            self._lost |= not self.slice_tokens or request.version == self.queue.version
            return
        self.open.remove(request)
        for piece, room, start in zip(pieces, request.rooms, request.call.offsets, strict=True):
            piece.version = request.version
            sample = joined(self.held[piece.index], piece, self.sampling) if start else piece
            self.held[piece.index] = sample
            ended = not self.slice_tokens or sample.ended or sample.num_actions >= room
            self.queue.give_back(piece.index, sample.num_actions, ended)

    def _withdraw(self, requests: Iterable[Open]) -> None:
        for request in list(requests):
            self.engine.cancel(request.ticket)
            self.open.remove(request)
            for index in request.call.indices:
                self.queue.reset(self.queue.entries[index], self.queue.entries[index].num_tokens)

    def replay(self, schedule: Schedule) -> None:
        """Repeats a run: hands out and takes what its schedule has, in this order, as long as it has anything.

        Raises ValueError for an engine without `slice_tokens`, whose order the settings alone determine.
        """
        if not self.slice_tokens:
            raise ValueError('a schedule is of an engine with slice_tokens, under max_staleness: others need none')
        self.queue.replayed = schedule

    def _send_recorded(self, version: int) -> None:
        """Sends everything that a replayed schedule has before weights of this version."""
        while self.queue.must_send(version):
            self._send()
            if self.queue.must_send(version):
                self._wait()

    # ------------------------------------------------------------------ waiting

    def _wait(self) -> None:
        """Waits until a request is answered, and sends further ones. Called with the lock."""
        self._raise_error()
        if self._thread is not None:
            self._changed.wait()
        elif (request := self._first(self.open)) is not None:
            self._receive(request)
            self._send()
        else:
            raise RuntimeError('a phase waits for samples, and nothing is in flight')

    def _raise_error(self) -> None:
        """Raises the error that has ended the thread, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _first(self, requests: SequenceOf[Open], timeout_s: float | None = None) -> Open | None:
        ticket = self.engine.first([r.ticket for r in requests], timeout_s) if requests else None
        return next((r for r in requests if r.ticket is ticket), None)

    def _serve(self) -> None:
        """Starts a thread for workers that compute beside this process."""
        if self.open and self.slice_tokens and self._thread is None and getattr(self.engine.workers, 'beside', False):
            self._thread = threading.Thread(target=self._run, name='chatgpt-stream', daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Receives answers and sends further requests until nothing is in flight."""
        error = None
        while error is None:
            with self._changed:
                requests = list(self.open)
                if not requests:  # within the lock, so that requests of `_begin` find no thread that is about to end
                    self._thread = None
                    self._changed.notify_all()
                    return
            try:
                request = self._first(requests, POLL_S)
                with self._changed:
                    if request in self.open:
                        self._receive(request)
                        self._send()
                        self._changed.notify_all()
            except BaseException as raised:  # raised again by `_wait`
                error = raised
        with self._changed:
            self._thread, self._error = None, error
            self._changed.notify_all()

    # ------------------------------------------------------------------ state

    def before_in_flight(self) -> dict[str, int]:
        if self.slice_tokens or not self.queue.groups:
            return {}
        first_prompt, first_sample = self.firsts[min(self.queue.groups)]
        return {'prompts_drawn': first_prompt, 'samples_drawn': first_sample}

    def state(self) -> dict[str, Any]:
        """Waits until everything in flight is answered and returns it, with the schedule so far."""
        if not self.queue.entries and not (self.slice_tokens and self.queue.schedule.requests):
            return {k: self._loaded[k] for k in ('in_flight', 'in_flight_from', 'schedule') if k in self._loaded}
        with self.strategy.ranks.untimed(), self._changed:
            self._raise_error()
            self._send_recorded(self.queue.version + 1)
            for request in list(self.open):
                self._receive(request)
            own = {first: self._record(entries) for first, entries in self._timesteps().items()}
        shares = self.strategy.all_gather_object(own)
        records = []
        for first in sorted({first for share in shares for first in share}):
            parts = [share[first] for share in shares if first in share]
            where = parts[0]['where'] | {'version': min(part['arrays']['version'] for part in parts)}
            records.append(where | joined_records([part['arrays'] for part in parts]))
        state: dict[str, Any] = {'in_flight': records, 'in_flight_from': self.made_from()} if records else {}
        if self.slice_tokens:
            state['schedule'] = self.strategy.all_gather_object(self.queue.schedule.state())
        return state

    def _timesteps(self) -> dict[int, list[Entry]]:
        """Returns the untaken samples by the first prompt of their timestep."""
        found: dict[int, list[Entry]] = {}
        for _, entry in sorted(self.queue.entries.items()):
            found.setdefault(self.firsts[entry.group][0], []).append(entry)
        return found

    def _record(self, entries: SequenceOf[Entry]) -> dict[str, Any]:
        samples = [self.held.get(e.index) or self._without_tokens(e) for e in entries]
        first_prompt, first_sample = self.firsts[entries[0].group]
        version = min((e.version for e in entries if e.version is not None), default=self.queue.version)
        if self.slice_tokens:
            samples = [replace(s, versions=s.token_versions) for s in samples]
        arrays = record_of(pack_samples(samples, version))
        arrays['reasons'] = [s.finish_reason if e.ended else '' for s, e in zip(samples, entries, strict=True)]
        arrays['indices'] = np.array([e.index for e in entries])
        where: dict[str, Any] = {'first_prompt': first_prompt, 'first_sample': first_sample}
        where |= {'num_prompts': self.batch_size, 'temperature': self.sampling.temperature}
        return {'where': where, 'arrays': arrays}

    def _without_tokens(self, entry: Entry) -> Sample:
        call = Call.of([self._prompt(entry)], self.sampling, seed=0, indices=[entry.index], groups=[entry.group])
        none = torch.zeros(0)
        return call.sample(0, none.long(), none, none, none, 'length')

    def load(self, state: Mapping[str, Any]) -> None:
        if self._keeps:
            return
        super().load(state)
        with self._changed:
            self.forget()
            self.queue.groups.clear()
            self.queue.entries.clear()
            self.firsts.clear()
            self._loaded = state

    def _take_up(self) -> None:
        """Queues what was in flight in a loaded checkpoint; without its tokens if prompts or settings are others."""
        loaded, self._loaded = self._loaded, {}
        schedules, records = loaded.get('schedule', ()), loaded.get('in_flight', ())
        if len(schedules) == self.strategy.world_size:
            self.queue.schedule = Schedule.of(schedules[self.strategy.rank])
        k, n, own = self.num_samples_per_prompt, self.batch_size, set(self._own(records))
        fits = loaded.get('in_flight_from') == self.made_from()
        if any(r.get('num_prompts', n) != n or ('indices' not in r and len(r['lengths']) != n * k) for r in records):
            self._warn_of_misfit(len(records), again=not schedules)
            if not schedules:
                self.go_back(records)
            return
        for record in records:
            first_prompt, first_sample, indices = record['first_prompt'], record['first_sample'], indices_of(record)
            self.prompts_drawn = max(self.prompts_drawn, first_prompt + n)
            self.samples_drawn = max(self.samples_drawn, first_sample + n * k)
            at = [i for i, index in enumerate(indices) if first_prompt + (index - first_sample) // k in own]
            self._add([indices[i] for i in at], first_prompt, first_sample)
            if fits and at:
                self._restore(record, at[0], at[-1] + 1)
        if records and not fits:
            self._warn_of_misfit(len(records))

    def _own(self, records: SequenceOf[Mapping[str, Any]]) -> list[int]:
        """Returns the groups in flight that are this rank's: its share of each timestep, or, where ranks would have
        unequal numbers, as many for each."""
        k, rank, size = self.num_samples_per_prompt, self.strategy.rank, self.strategy.world_size
        by_rank: list[list[int]] = [[] for _ in range(size)]
        for record in records:
            for offset in dict.fromkeys((index - record['first_sample']) // k for index in indices_of(record)):
                by_rank[min(offset // self.share, size - 1)].append(record['first_prompt'] + offset)
        if len({len(groups) for groups in by_rank}) == 1:
            return by_rank[rank]
        everything = sorted(group for groups in by_rank for group in groups)
        return everything[rank * len(everything) // size : (rank + 1) * len(everything) // size]

    def _restore(self, record: Mapping[str, Any], start: int, stop: int) -> None:
        """Gives the tokens of a record's samples [start, stop) to their entries."""
        entries = [self.queue.entries[i] for i in indices_of(record)[start:stop]]
        if not sum(record['lengths'][start:stop]):
            return
        samples = samples_of(record, start, stop, [self._prompt(e) for e in entries], [e.group for e in entries])
        for entry, sample, reason in zip(entries, samples, record['reasons'][start:stop], strict=True):
            if sample.num_actions:
                self.held[entry.index] = sample
                entry.num_tokens, entry.version, entry.ended = sample.num_actions, sample.version, bool(reason)

    def _warn_of_misfit(self, num_timesteps: int, *, again: bool = True) -> None:
        if self.strategy.is_rank_0:
            what = 'asked for again' if again else 'left out'
            text = (
                f'{num_timesteps} timesteps in flight in the checkpoint do not fit this run; their prompts are {what}'
            )
            warnings.warn(text, stacklevel=2)


_TOKENS = ('response_ids', 'response_mask', 'logprobs', 'filtered_logprobs', 'edge_distances')


def uniform(sample: Sample) -> Sample:
    """Returns a sample without `versions` if all its tokens have the same."""
    same = sample.versions is not None and bool((sample.versions == sample.version).all())
    return replace(sample, versions=None) if same else sample


def cut(sample: Sample, size: int, reason: FinishReason = 'length') -> Sample:
    """Returns the first tokens of a response that has no episode."""
    tensors: dict[str, Any] = {name: getattr(sample, name)[:size].clone() for name in _TOKENS}
    return replace(sample, finish_reason=reason, versions=sample.token_versions[:size].clone(), **tensors)


def joined(before: Sample, piece: Sample, sampling: SamplingParams) -> Sample:
    """Returns a response with a further part, up to the first stop string that began before the part."""
    tensors: dict[str, Any] = {name: torch.cat([getattr(before, name), getattr(piece, name)]) for name in _TOKENS}
    versions = torch.cat([before.token_versions, piece.token_versions])
    sample = replace(before, finish_reason=piece.finish_reason, versions=versions, **tensors)
    if sampling.stop is not None:
        ids = sample.response_ids.tolist()
        last = len(ids) if piece.finish_reason == 'length' else len(ids) - 1  # where nothing else ends it
        for size in range(max(before.num_actions + 1, sampling.min_new_tokens), last + 1):
            if sampling.stop(ids[:size]):
                return cut(sample, size, 'stop')
    return sample
