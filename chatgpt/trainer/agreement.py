"""Do all ranks run the same run? Compared at every phase boundary: settings, data, counters. A difference is named, and
ends all.

Ranks that disagree do not fail by themselves: they wait for each other in different collectives, or learn from
different batches. A rank that does not come at all is the failure guard's (`chatgpt.strategies.guard`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatgpt.strategies.base import Strategy

LEFT_OUT = ('callbacks', 'reward')
"""of a trainer's state: some callbacks write files, and count on rank 0 alone; a reward function is called there alone,
and may hold a device or a rank"""
MOST_SHOWN = 4


class RankMismatchError(RuntimeError):
    """Ranks have different settings, data or positions; names ranks and values."""


def check_ranks(strategy: Strategy, facts: Mapping[str, Any], where: str) -> None:
    """Compare nested `facts` over ranks. A collective; nothing on one process.

    Raises:
        RankMismatchError: on every rank, with the same message.
    """
    if strategy.processes.world_size == 1:
        return
    everyone = strategy.processes.all_gather_object({key: repr(value) for key, value in _flat(facts)})
    first = everyone[0]
    found = []
    for rank, theirs in enumerate(everyone):
        keys = [k for k in {**first, **theirs} if first.get(k) != theirs.get(k)]
        if keys:
            shown = ', '.join(
                f'{k} is {theirs.get(k, "not there")} instead of {first.get(k, "not there")}' for k in keys[:MOST_SHOWN]
            )
            found.append(
                f'on rank {rank} {shown}' + (f' and {len(keys) - MOST_SHOWN} more' if len(keys) > MOST_SHOWN else '')
            )
    if found:
        raise RankMismatchError(f'the ranks do not run the same run, seen {where}: {"; ".join(found)} (as on rank 0)')


def _flat(values: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f'{prefix}{key}.')
        else:
            yield f'{prefix}{key}', value
