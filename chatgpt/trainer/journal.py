"""Answers of environments in a dropped phase, with which a resume detects different ones.

A resume repeats the episodes of a dropped phase, with the same seeds and responses. The run is the same to the bit if
environments depend on these alone. For each turn of these episodes a checkpoint holds a digest of the response, a
digest of the answer (observation and rewards), and the beginning of the observation. A different answer is only a
warning: the new episode is consistent in itself, and an environment over live data cannot repeat its answers.
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
"""characters of an observation that are kept for messages"""

Entry = list[str]
"""digest of the response, digest of the answer to it, beginning of the answer; the first entry of an episode is for
`reset`, without a response"""


class Journal:
    """Episodes of the current phase, by sample index.

    Args:
        name: of the environment, for messages.
        decode: ids -> text.
    """

    def __init__(self, name: str, decode: Callable[[list[int]], str], strategy: Strategy) -> None:
        self.name, self.decode, self.strategy = name, decode, strategy
        self._played: dict[int, list[Entry]] = {}
        self._expected: dict[int, list[Entry]] = {}
        self._loaded: Mapping[str, Any] = {}
        """from a checkpoint, until the first episodes are recorded"""
        self._has_warned = False

    def record(self, samples: SequenceOf[Sample], made_from: Callable[[], Any]) -> None:
        """Records episodes and compares those of a checkpoint, unless settings or data (`made_from`) have changed."""
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
                self._has_warned = True  # an environment that reads the clock differs in every turn
                turn, was, is_ = found
                warnings.warn(
                    f'{self.name} answers differently when it is played again, so this run does not repeat the one it '
                    f'resumes: sample {sample.index}, turn {turn}: {was!r} before, {is_!r} now; let it follow from its '
                    'seed and the responses alone',
                    stacklevel=2,
                )

    def clear(self) -> None:
        """Forgets the episodes of a phase that was learned."""
        self._played, self._expected = {}, {}

    def state(self, made_from: Callable[[], Any]) -> dict[str, Any]:
        """Returns the state of all ranks as JSON. A collective."""
        own = {str(index): entries for index, entries in (self._expected | self._played).items()}
        everyone = self.strategy.all_gather_object(own)
        return {'journal': {i: entries for one in everyone for i, entries in one.items()}, 'journal_from': made_from()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads the state of a checkpoint. Entries of other ranks' samples have no effect."""
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
    """Returns the first turn with another answer to the same responses, and both beginnings; None if there is none."""
    for turn, (old, new) in enumerate(zip(before, now, strict=False)):
        if old[0] != new[0]:
            return None  # the responses differ, so the answers may
        if old[1] != new[1]:
            return turn, old[2], new[2]
    return None
