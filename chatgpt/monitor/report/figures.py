"""The curves of a page: a figure per chart, with a table of its numbers, and the data for the script that draws it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from chatgpt.monitor.report.charts import DERIVED, PLANNED, Drawn, choose, one_metric_each, words
from chatgpt.monitor.report.parts import COLORS, part, place_of, spread
from chatgpt.monitor.report.runs import Run
from chatgpt.monitor.report.series import Column, number, thinned
from chatgpt.monitor.report.turns import by_turn

TABLE_ROWS = 24
PAPER_ROWS = 9
LABELS = DERIVED | {'rollout/ended_share': 'ended'}


class Line(NamedTuple):
    label: str
    role: str
    """'line', 'low' and 'high' (the band of the first line), 'plan', or 'dashed' (a line with a colour used before)"""
    color: int
    column: Column


class Curves(NamedTuple):
    html: str
    data: dict[str, Any]
    """data of report.js: lists of phases, to which lines refer by number, and the charts"""
    places: list[tuple[str, str]]
    """titles and anchors of groups"""
    names: list[str]
    """metrics of the charts"""


def curves(runs: Sequence[Run], limit: int, most: int, known: frozenset[str] = frozenset()) -> Curves:
    """Returns at most `most` figures, with about `limit` points each; metrics in `known` link to their meaning."""
    metrics = dict.fromkeys(name for run in runs for name in run.columns)
    groups = choose(metrics)
    if len(runs) > 1:
        groups = {group: one_metric_each(drawn) for group, drawn in groups.items()}
    phases: dict[tuple[int, ...], int] = {}
    shown: list[tuple[str, str, list[dict[str, Any]]]] = []
    charts: dict[str, dict[str, Any]] = {}
    for group, drawn in groups.items():
        figures = []
        for one in drawn[: most - len(charts)]:
            key = next(k for n in count(1) if (k := one.chart.key + (f'-{n}' if n > 1 else '')) not in charts)
            lines = _lines(one, runs, limit)
            charts[key] = {
                'key': key,
                'stacked': one.chart.stacked and len(runs) == 1,
                'lines': [
                    {
                        'label': line.label,
                        'role': line.role,
                        'color': line.color,
                        'x': phases.setdefault(tuple(line.column[0]), len(phases)),
                        'y': [None if y is None else float(f'{y:.6g}') for y in line.column[1]],
                    }
                    for line in lines
                ],
            }
            figures.append(_figure(one, key, lines, min(limit, TABLE_ROWS)) | {'known': known})
        if drawn:
            shown.append((group, place_of(group), figures))
    whole = sum(map(len, groups.values()))
    note = f'{most} of {whole} charts; the numbers of all are in metrics.jsonl.' if whole > most else ''
    data = {'phases': [_short(at) for at in phases], 'charts': list(charts.values())}
    turns = by_turn(runs[0].recorded) if len(runs) == 1 else None
    return Curves(
        part('curves', shown, note, turns), data, [(group, place) for group, place, _ in shown], list(metrics)
    )


def _lines(drawn: Drawn, runs: Sequence[Run], limit: int) -> list[Line]:
    if len(runs) > 1:
        (name,) = drawn.lines
        return [
            Line(
                run.name,
                'line' if i < COLORS else 'dashed',
                i % COLORS + 1,
                thinned({name: run.columns[name]}, limit)[name],
            )
            for i, run in enumerate(runs)
            if name in run.columns
        ]
    short = thinned({name: runs[0].columns[name] for name in [*drawn.band, *drawn.lines]}, limit)
    labels = [LABELS.get(name) or words(name) for name in drawn.lines]
    if len({name.rpartition('/')[2] for name in drawn.lines}) < len(drawn.lines):  # ppo/entropy and rollout/entropy
        labels = [LABELS.get(name) or name for name in drawn.lines]
    band = [Line(words(n), role, 1, short[n]) for n, role in zip(drawn.band, ('low', 'high'), strict=False)]
    return band + [
        Line(label, 'plan' if name == PLANNED else 'line', 8 if name == PLANNED else i % COLORS + 1, short[name])
        for i, (name, label) in enumerate(zip(drawn.lines, labels, strict=True))
    ]


def _figure(drawn: Drawn, key: str, lines: Sequence[Line], num_rows: int) -> dict[str, Any]:
    """Returns the texts of a chart, and its table of at most `num_rows` rows; print shows every third row."""
    lines = sorted(lines, key=lambda line: line.role in ('low', 'high'))
    values = [dict(zip(*line.column, strict=True)) for line in lines]
    phases = sorted({phase for line in lines for phase in line.column[0]})
    kept = spread(phases, num_rows)
    shown = f'{len(kept)} of {len(phases)} points' if len(phases) > len(kept) else f'{len(phases)} points'
    rows = [
        (
            phase,
            bool(i % 3) and i < len(kept) - 1 and len(kept) > PAPER_ROWS,
            [number(column[phase]) if phase in column else '' for column in values],
        )
        for i, phase in enumerate(kept)
    ]
    return {
        'key': key,
        'title': drawn.chart.title,
        'good': drawn.chart.good if drawn.band else drawn.chart.good.replace(' (the area)', ''),
        'names': [name for name in [*drawn.lines, *drawn.band] if name not in DERIVED],
        'labels': [line.label for line in lines],
        'rows': rows,
        'shown': '1 point' if len(phases) == 1 else shown,
    }


def _short(phases: tuple[int, ...]) -> Any:
    """Returns the phases, as first and count if they are consecutive."""
    if len(phases) > 2 and phases[-1] - phases[0] == len(phases) - 1:
        return {'first': phases[0], 'count': len(phases)}
    return list(phases)
