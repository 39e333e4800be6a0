"""Values against returns by turn, from recorded episodes: a drawing that needs no script."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from chatgpt.monitor.report.series import number

PHASES = 3
"""latest of the phases on the page whose episodes are drawn: about fifty episodes"""
MOST_TURNS = 32
WIDTH, HEIGHT = 460, 200
LEFT, RIGHT, TOP, BOTTOM = 54, 18, 8, 26
"""size of the drawing and its margins, those of the other charts"""


class Turn(NamedTuple):
    """Means over the episodes that reached a turn, at its first token."""

    number: int
    episodes: int
    value: float
    returns: float


class Drawing(NamedTuple):
    turns: list[Turn]
    phases: list[int]
    lines: dict[str, list[tuple[float, float]]]
    """label → points of the drawing"""
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def by_turn(rows: Iterable[Mapping[str, Any]]) -> Drawing | None:
    """Returns the drawing of recorded sequences; None without values, or without an episode of two turns."""
    recorded = [row for row in rows if row.get('episode') is not None and any(row['values'])]
    phases = sorted({row['phase'] for row in recorded})[-PHASES:]
    found: dict[int, list[tuple[float, float]]] = {}
    for row in recorded:
        if row['phase'] not in phases:
            continue
        for k, turn in enumerate(json.loads(row['episode'])['turns'][:MOST_TURNS], 1):
            at = next((i for i in range(turn['start'], turn['stop']) if row['mask'][i]), None)
            if at is not None and math.isfinite(row['values'][at]) and math.isfinite(row['returns'][at]):
                found.setdefault(k, []).append((row['values'][at], row['returns'][at]))
    turns = [Turn(k, len(pairs), *map(fmean, zip(*pairs, strict=True))) for k, pairs in sorted(found.items())]
    return _drawn(turns, phases) if len(turns) > 1 else None


def _drawn(turns: list[Turn], phases: list[int]) -> Drawing:
    numbers = [x for turn in turns for x in (turn.value, turn.returns)]
    low, high = min(numbers), max(numbers)
    room = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = low - room, high + room
    first, last = turns[0].number, turns[-1].number

    def x(turn: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (turn - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low), 1)

    step = max(1, math.ceil((last - first) / 8))
    middle = (low + high) / 2
    return Drawing(
        turns,
        phases,
        {'value': [(x(t.number), y(t.value)) for t in turns], 'return': [(x(t.number), y(t.returns)) for t in turns]},
        [(x(k), str(k)) for k in range(first, last + 1, step)],
        [(y(value), number(value)) for value in (low + room, middle, high - room)],
    )
