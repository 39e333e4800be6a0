"""The metrics of a run as columns, a summary of its improvement, and thinning to about a thousand points per chart.

Thinning keeps, of each interval of phases, those with the minimum and maximum of every line, and gaps; so no spike is
lost and no value is interpolated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import isfinite
from typing import Any

from chatgpt.monitor.run_folder import RunFolder

Column = tuple[Sequence[int], Sequence[float | None]]
"""phases, and the value at each; None if it was not finite"""


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, Column]:
    """Returns the column of every metric, over the phases that have it; of several rows of a phase the last counts."""
    phases: dict[str, list[int]] = {}
    values: dict[str, list[float | None]] = {}
    for row in sorted((r for r in rows if type(r.get('step')) is int), key=lambda r: r['step']):
        step = row['step']
        for name, value in row.items():
            kind = type(value)  # exact types of JSON, so that True is no number
            if kind is float:
                value = value if isfinite(value) else None
            elif not (kind is int or value is None) or name == 'step':
                continue
            if name not in phases:
                phases[name], values[name] = [], []
            at, ys = phases[name], values[name]
            if at and at[-1] == step:
                ys[-1] = value
            else:
                at.append(step)
                ys.append(value)
    return {name: (at, values[name]) for name, at in phases.items()}


def kept(lines: Sequence[Sequence[float | None]], limit: int) -> list[int]:
    """Returns the indices to keep of lines of equal length, about `limit` at most, always the first and the last."""
    count = len(lines[0])
    if count <= limit:
        return list(range(count))
    stretches = max(1, limit // (3 * len(lines)))
    places = {0, count - 1}
    for i in range(stretches):
        first, last = i * count // stretches, (i + 1) * count // stretches
        for line in lines:
            part = line[first:last]
            finite = [value for value in part if value is not None]
            if finite:
                places.add(first + part.index(min(finite)))
                places.add(first + part.index(max(finite)))
            if len(finite) < len(part):
                places.add(first + part.index(None))
    return sorted(places)


def thinned(lines: Mapping[str, Column], limit: int) -> dict[str, Column]:
    """Returns the lines of a chart with at most about `limit` points each, at the same phases if these are equal."""
    together: dict[tuple[int, ...], list[str]] = {}
    for name, (at, _) in lines.items():
        together.setdefault(tuple(at), []).append(name)
    result: dict[str, Column] = {}
    for at, names in together.items():
        places = kept([lines[name][1] for name in names], limit)
        short = [at[p] for p in places]
        for name in names:
            result[name] = short, [lines[name][1][p] for p in places]
    return {name: result[name] for name in lines}


def average(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the values that are not None; None if there is none."""
    finite = [value for value in values if value is not None]
    return math.fsum(finite) / len(finite) if finite else None


def number(value: float | None) -> str:
    """Formats a number with three significant digits."""
    if value is None or not isfinite(value):
        return 'none' if value is None else str(value)
    size = abs(value)
    if size >= 1e6 or (0 < size < 1e-3):
        digits, _, power = f'{value:.2e}'.partition('e')
        return f'{float(digits):g}e{int(power)}'
    if size >= 1000:
        return f'{value:,.0f}'.replace(',', ' ')
    text = f'{value:.3g}' if size < 100 else f'{value:.0f}'
    return '0' if float(text) == 0 else text


def nats(value: float | None) -> str:
    """Formats a KL of responses with four decimals: less than that is rounding of sums in fp32."""
    return number(None if value is None else round(value, 4))


# ---------------------------------------------------------------------- the improvement of a run

IMPROVED: tuple[tuple[tuple[str, str], ...], ...] = (
    ((r'rollout/score_mean|rft/score_mean', 'score'), (r'eval/score_mean', 'eval score')),
    ((r'[^/]+/accuracy', 'accuracy'), (r'[^/]+/val_accuracy', 'eval accuracy')),
    ((r'critic/explained_variance', 'explained variance'), (r'eval/explained_variance', 'eval explained variance')),
    ((r'[^/]+/loss', 'loss'), (r'[^/]+/val_loss', 'eval loss')),
)
"""metrics that summarise a run, by pattern: scores, else accuracies, else explained variance, else losses"""

KL = 'rollout/kl_mean'


def what_improved(run: RunFolder) -> str:
    """Returns a summary: `score -1.44 → 2.31, eval score -1.2 → 2.2 in 40 phases, KL 3.2 nats per response`.

    Numbers of training are means over the first and the last tenth of the phases, since single phases are noisy; those
    of evaluations, which have the same prompts each time, are the first and the last.
    """
    rows = [*run.metrics, *run.eval]
    found = columns({name: value for name, value in row.items() if _tells(name)} for row in rows)
    last = max((int(row['step']) for row in rows), default=0)
    if not last:
        return 'no learning phase was finished'
    kind = next((kind for kind in IMPROVED if any(_one(found, pattern) for pattern, _ in kind)), ())
    changes = [f'{word} {_from_to(column, word)}' for pattern, word in kind if (column := _one(found, pattern))]
    text = f'{", ".join(changes)} in ' if changes else ''
    text += f'{last} {"phase" if last == 1 else "phases"}'
    kl = _ends(found[KL], last)[1] if KL in found else None
    return text if kl is None else f'{text}, KL {nats(kl)} nats per response'


@cache
def _tells(name: str) -> bool:
    return name in ('step', KL) or any(re.fullmatch(pattern, name) for kind in IMPROVED for pattern, _ in kind)


def _one(found: Mapping[str, Column], pattern: str) -> Column | None:
    for name, column in found.items():
        if re.fullmatch(pattern, name) and any(value is not None for value in column[1]):
            return column
    return None


def _from_to(column: Column, word: str) -> str:
    first, last = _ends(column, 1 if word.startswith('eval') else len(column[1]))
    return number(last) if len(column[1]) == 1 else f'{number(first)} → {number(last)}'


def _ends(column: Column, phases: int) -> tuple[float | None, float | None]:
    """Returns the means of the first and of the last tenth of `phases`, at least of one value."""
    values = [value for value in column[1] if value is not None]
    share = max(1, min(phases, len(values)) // 10)
    return average(values[:share]), average(values[-share:])
