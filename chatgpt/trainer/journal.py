"""What environments answered in a phase that was dropped, so that a resume can tell whether they answer so again.

A resume plays the episodes of a dropped phase again, from the same seeds with the same responses, which gives the same
run to the bit if environments follow from these alone. So a checkpoint holds, of each turn of each such episode, a
digest of the response, a digest of what the environment answered (observation and rewards), and the observation's
beginning. An answer that differs is a warning: the new episode is whole in itself, and an environment over live data
cannot repeat itself.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from torch import Tensor

from chatgpt.strategies.base import Strategy
from chatgpt.types import Sample

BEGINNING = 60
"""characters of an observation that are kept for being shown"""

Entry = list[str]
"""digest of the response, digest of the answer to it, the answer's beginning; the first entry of an episode is of
`reset`, without a response"""


class Journal:
    """Episodes of the phase that is collected, by sample index.

    Args:
        name: of the environment, for messages.
        decode: ids -> text.
    """

    def __init__(self, name: str, decode: Callable[[list[int]], str], strategy: Strategy) -> None:
        self.name, self.decode, self.strategy = name, decode, strategy
        self._played: dict[int, list[Entry]] = {}
        self._expected: dict[int, list[Entry]] = {}
        self._loaded: Mapping[str, Any] = {}
        """of a checkpoint, until the first episodes are recorded"""
        self._has_warned = False

    def record(self, samples: SequenceOf[Sample], made_from: Callable[[], Any]) -> None:
        """Note the episodes, and compare those that a checkpoint knows, unless settings or data (`made_from`) have
        changed."""
        loaded, self._loaded = self._loaded, {}
        if 'journal' in loaded and loaded['journal_from'] == made_from():
            self._expected = {int(index): list(entries) for index, entries in loaded['journal'].items()}
        for sample in samples:
            if sample.episode is None:
                continue
            self._played[sample.index] = now = self._entries(sample)
            before = self._expected.pop(sample.index, None)
            found = None if before is None else _difference(before, now)
            if found is not None and not self._has_warned:
                self._has_warned = True  # of one that answers by the clock every turn differs
                turn, was, is_ = found
                warnings.warn(
                    f'{self.name} answers differently when it is played again, so this run does not repeat the one it '
                    f'resumes: sample {sample.index}, turn {turn}: {was!r} before, {is_!r} now; let it follow from its '
                    'seed and the responses alone',
                    stacklevel=2,
                )

    def clear(self) -> None:
        """The phase is learned from."""
        self._played, self._expected = {}, {}

    def state(self, made_from: Callable[[], Any]) -> dict[str, Any]:
        """For a checkpoint, as JSON: of all ranks together. A collective."""
        own = {str(index): entries for index, entries in (self._expected | self._played).items()}
        everyone = self.strategy.all_gather_object(own)
        return {'journal': {i: entries for one in everyone for i, entries in one.items()}, 'journal_from': made_from()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Of a checkpoint. Entries of other ranks' samples do no harm."""
        if 'journal' in state:
            self._loaded = state

    def _entries(self, sample: Sample) -> list[Entry]:
        assert sample.episode is not None
        turns, ids = sample.episode.turns, sample.response_ids
        entries = [['', _digest(sample.prompt_ids), self._beginning(sample.prompt_ids)]]
        for at, turn in enumerate(turns):
            stop = turns[at + 1].start if at + 1 < len(turns) else sample.num_actions
            answer = ids[turn.stop : stop]
            last = sample.episode.end if at + 1 == len(turns) else ''
            entries.append(
                [
                    _digest(ids[turn.start : turn.stop]),
                    _digest(answer, sorted(turn.rewards.items()), last),
                    self._beginning(answer) or f'{last} {dict(turn.rewards)}',
                ]
            )
        return entries

    def _beginning(self, ids: Tensor) -> str:
        return self.decode(ids[:BEGINNING].tolist())[:BEGINNING]


def _digest(ids: Tensor, *more: Any) -> str:
    return hashlib.blake2b(repr((ids.tolist(), *more)).encode(), digest_size=8).hexdigest()


def _difference(before: list[Entry], now: list[Entry]) -> tuple[int, str, str] | None:
    """The first turn whose answer differs although all responses up to it are the same, and both beginnings."""
    for turn, (old, new) in enumerate(zip(before, now, strict=False)):
        if old[0] != new[0]:
            return None  # the policy said something else, which is not the environment's doing
        if old[1] != new[1]:
            return turn, old[2], new[2]
    return None
