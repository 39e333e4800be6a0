"""The queue of a stream of samples: which samples a free worker gets, which groups a phase takes, and a record of both.

    add ─▶ [fresh samples, and responses that are not at their end] ─▶ hand_out ─▶ a worker: some tokens more
           [                                                      ] ◀─ give_back
           [groups of which every response has ended              ] ─▶ take, for the phase that collects

A token is learned at most `max_staleness` phases after the weights that sampled it. A group, the samples of one prompt,
is therefore due `max_staleness` phases after the weights of its first token. Only as many groups are begun as the
phases until then take, and a phase takes a group only if those that are due earlier still fit.

Bookkeeping alone, without token ids, weights, clock and threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Entry:
    """A sample that no phase has taken."""

    index: int
    group: int
    num_tokens: int = 0
    version: int | None = None
    """of the weights of its first token: learning phases before it; None before it is handed out"""
    ended: bool = False
    busy: bool = False
    """a worker has it"""


@dataclass(eq=False)
class Schedule:
    """The order of a run: what was handed out with which weights, and which groups each phase took."""

    requests: list[tuple[int, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    """(version, ((index, number of tokens before), ...)) of each request"""
    takes: list[tuple[int, int]] = field(default_factory=list)
    """(version, group)"""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Schedule:
        """Makes a schedule of the tensors of `state`."""
        lists: Any = {name: tensor.tolist() for name, tensor in state.items()}
        versions = lists.get('versions', [])
        parts: list[list[tuple[int, int]]] = [[] for _ in versions]
        for request, index, start in lists.get('parts', []):
            parts[request].append((index, start))
        requests = list(zip(versions, map(tuple, parts), strict=True))
        return cls(requests, [(version, group) for version, group in lists.get('takes', [])])

    def state(self) -> dict[str, Tensor]:
        """Returns int64 tensors of a checkpoint: `versions` (R,) of R requests, `parts` (M, 3) with request, index and
        number of tokens before, `takes` (G, 2); without those that are empty."""
        lists: Any = {
            'versions': [version for version, _ in self.requests],
            'parts': [(at, *part) for at, (_, parts) in enumerate(self.requests) for part in parts],
            'takes': self.takes,
        }
        return {name: torch.tensor(values, dtype=torch.int64) for name, values in lists.items() if values}

    def cut(self, version: int) -> None:
        """Removes everything from these weights on."""
        self.requests = [r for r in self.requests if r[0] < version]
        self.takes = [t for t in self.takes if t[0] < version]


class SampleQueue:
    """The untaken samples of a rank.

    Args:
        max_staleness: largest age of a token's weights in the phase that learns from it, in learning phases.
        apart: fresh and continued samples go into separate requests.
    """

    def __init__(self, max_staleness: int, *, apart: bool = False) -> None:
        self.max_staleness, self.apart = max_staleness, apart
        self.groups: dict[int, list[Entry]] = {}
        self.entries: dict[int, Entry] = {}
        self.taken: dict[int, list[Entry]] = {}
        """of the phase that collects"""
        self.version = 0
        """of the newest weights, and number of the phase that collects"""
        self.sizes: list[int] = []
        """groups that this phase and each later one still take"""
        self.schedule = Schedule()
        self.replayed: Schedule | None = None
        """the schedule of an earlier run, which this one follows to its end"""

    def add(self, group: int, entries: Iterable[Entry]) -> None:
        self.groups[group] = list(entries)
        self.entries |= {e.index: e for e in self.groups[group]}

    def begin(self, version: int, sizes: Sequence[int]) -> None:
        """Begins a phase with new weights, or goes on with one that takes further groups.

        sizes: groups that it and the next `max_staleness` phases take.
        """
        self.version, self.sizes = version, list(sizes)

    def misfits(self) -> bool:
        """Returns True if phases of these sizes cannot take every group in time."""
        rooms = [sum(self.sizes[: j + 1]) for j in range(len(self.sizes))]
        due = [self._due(group) for group in self.groups.values()]
        late = any(d is not None and d < self.version for d in due)
        return late or any(
            sum(d is not None and d <= self.version + j for d in due) > room for j, room in enumerate(rooms)
        )

    def _due(self, entries: Iterable[Entry]) -> int | None:
        """Returns the last phase that may take a group; None if it is not begun."""
        versions = [e.version for e in entries if e.version is not None]
        return min(versions) + self.max_staleness if versions else None

    # ------------------------------------------------------------------ to workers and back

    def hand_out(self, rows: int) -> list[Entry]:
        """Returns at most `rows` samples for a worker with the newest weights, those that are due first before others;
        [] if there are none, or none yet under a replayed schedule."""
        recorded = self._recorded_request()
        chosen = self._chosen(rows) if recorded is None else self._recorded(*recorded)
        for entry in chosen:
            entry.busy = True
            entry.version = self.version if entry.version is None else entry.version
        if chosen:
            self.schedule.requests.append((self.version, tuple((e.index, e.num_tokens) for e in chosen)))
        return chosen

    def _chosen(self, rows: int) -> list[Entry]:
        due = {number: self._due(group) for number, group in self.groups.items()}
        room = sum(self.sizes[: self.max_staleness + 1]) - sum(d is not None for d in due.values())
        idle = [e for e in self.entries.values() if not (e.busy or e.ended)]
        chosen: list[Entry] = []
        for entry in sorted(idle, key=lambda e: (due[e.group] is None, due[e.group] or 0, e.index)):
            if len(chosen) == rows:
                break
            if self.apart and chosen and (entry.num_tokens > 0) != (chosen[0].num_tokens > 0):
                continue
            if due[entry.group] is None:
                if room <= 0:
                    break
                room, due[entry.group] = room - 1, self.version + self.max_staleness
            chosen.append(entry)
        return chosen

    def give_back(self, index: int, num_tokens: int, ended: bool) -> None:
        """Receives a sample with its tokens so far."""
        entry = self.entries[index]
        entry.busy, entry.num_tokens, entry.ended = False, num_tokens, ended

    def reset(self, entry: Entry, num_tokens: int = 0) -> None:
        """Makes a sample wait again, with the first of its tokens."""
        entry.busy = entry.ended = False
        entry.num_tokens = num_tokens
        entry.version = entry.version if num_tokens else None

    def lose(self, version: int, starts: Mapping[int, int]) -> None:
        """Forgets a request that is not answered, {index: number of tokens before}: its samples wait again."""
        request = version, tuple(starts.items())
        if request in self.schedule.requests:  # not forgotten since
            self.schedule.requests.remove(request)
        for index, start in starts.items():
            self.reset(self.entries[index], start)

    # ------------------------------------------------------------------ to the phase

    def take(self) -> list[Entry] | None:
        """Returns the next group of the phase; None if it must wait for one.

        Raises RuntimeError for a group that comes later than `max_staleness` allows.
        """
        number = self._recorded_take()
        if number is None:
            whole = [n for n, group in sorted(self.groups.items()) if all(e.ended for e in group)]
            number = next((n for n in whole if self._fits(n)), None)
        if number is None or not all(e.ended for e in self.groups[number]):
            return None
        due = self._due(self.groups[number])
        if due is not None and due < self.version:
            raise RuntimeError(
                f'samples of phase {due - self.max_staleness + 1} came to phase {self.version + 1}, with '
                f'max_staleness={self.max_staleness}'
            )
        self.taken[number] = group = self.groups.pop(number)
        for entry in group:
            del self.entries[entry.index]
        self.sizes[0] -= 1
        self.schedule.takes.append((self.version, number))
        return group

    def _fits(self, number: int) -> bool:
        """Returns True if groups that are due before this one can still be taken in time after it."""
        due = [self._due(group) for n, group in self.groups.items() if n != number]
        room, last = self.sizes[0] - 1, self._due(self.groups[number])
        for phase in range(self.version, self.version if last is None else last):
            if sum(d is not None and d <= phase for d in due) > room:
                return False
            later = phase + 1 - self.version
            if later >= len(self.sizes):  # the run ends, and takes all of them
                break
            room += self.sizes[later]
        return True

    def untake(self) -> None:
        """Returns the groups of a phase that is dropped."""
        for number, group in self.taken.items():
            self.add(number, group)
        self.taken.clear()

    # ------------------------------------------------------------------ a schedule that is followed

    def _recorded_request(self) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        at = len(self.schedule.requests)
        return self.replayed.requests[at] if self.replayed is not None and at < len(self.replayed.requests) else None

    def _recorded(self, version: int, parts: Sequence[tuple[int, int]]) -> list[Entry]:
        """Returns the samples of a recorded request, or [] while its weights or the tokens before it are not here."""
        entries = [self.entries.get(index) for index, _ in parts]
        if version > self.version or any(e is not None and e.busy for e in entries):
            return []
        found = [e for e, (_, start) in zip(entries, parts, strict=True) if e and not e.ended and e.num_tokens == start]
        if len(found) < len(parts) or version < self.version:
            raise ValueError(
                f'the schedule does not fit this run: with weights {version} it asks for samples '
                f'{parts[0][0]} to {parts[-1][0]}, which are not at this point; follow it with the settings, prompts '
                'and checkpoint of the run that recorded it'
            )
        return found

    def _recorded_take(self) -> int | None:
        at = len(self.schedule.takes)
        if self.replayed is None or at >= len(self.replayed.takes):
            return None
        version, number = self.replayed.takes[at]
        if version != self.version or number not in self.groups:
            raise ValueError(
                f'the schedule does not fit this run: phase {version + 1} takes group {number}, and here phase '
                f'{self.version + 1} takes another'
            )
        return number

    def must_send(self, version: int) -> bool:
        """Returns True if the replayed schedule has further requests of weights before `version`."""
        recorded = self._recorded_request()
        return recorded is not None and recorded[0] < version
