"""The curves of a page: a figure for each chart, with a table of its numbers, and the numbers for the script that
draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from chatgpt.report.charts import DERIVED, PLANNED, Chart, Drawn, choose, one_metric_each, words
from chatgpt.report.runs import Run
from chatgpt.report.series import Column, number, thinned
from chatgpt.report.text import safe

TABLE_ROWS = 24
PAPER_ROWS = 9
LABELS = DERIVED | {'rollout/ended_share': 'ended'}
COLORS = 8
"""of page.css: --series-1 to --series-8"""


class Line(NamedTuple):
    label: str
    role: str
    """'line', 'low' and 'high' (the band of the first line), 'plan', or 'dashed' (a line whose colour is taken)"""
    color: int
    column: Column


class Curves(NamedTuple):
    html: str
    data: dict[str, Any]
    """for report.js: the phases that lines share, by number, and the charts"""
    groups: list[str]
    names: list[str]
    """metrics that are drawn"""


def curves(runs: Sequence[Run], limit: int, most: int, known: frozenset[str] = frozenset()) -> Curves:
    """Figures of the metrics of the runs, at most the first `most`, with about `limit` points each; metrics in `known`
    are linked to their meaning."""
    metrics = dict.fromkeys(name for run in runs for name in run.columns)
    groups = choose(metrics)
    if len(runs) > 1:
        groups = {group: one_metric_each(drawn) for group, drawn in groups.items()}
    phases: dict[tuple[int, ...], int] = {}
    parts: list[str] = []
    charts: list[dict[str, Any]] = []
    used: set[str] = set()
    for group, drawn in groups.items():
        if not drawn:
            continue
        parts.append(f'<section id="{place_of(group)}"><h2>{safe(group)}</h2><div class="charts">')
        for one in drawn[: most - len(used)]:
            key, number_of = one.chart.key, 2
            while key in used:
                key, number_of = f'{one.chart.key}-{number_of}', number_of + 1
            used.add(key)
            lines = _lines(one, runs, limit)
            charts.append(
                {
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
            )
            parts.append(_figure(one, key, lines, min(limit, TABLE_ROWS), known))
        parts.append('</div></section>')
    if (count := sum(map(len, groups.values()))) > most:
        parts.append(f'<p>{most} of {count} charts; the numbers of all are in metrics.jsonl.</p>')
    data = {'phases': [_short(at) for at in phases], 'charts': charts}
    return Curves(''.join(parts), data, [g for g in groups if groups[g]], list(metrics))


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


def _figure(drawn: Drawn, key: str, lines: Sequence[Line], rows: int, known: frozenset[str]) -> str:
    chart = drawn.chart
    names = [name for name in [*drawn.lines, *drawn.band] if name not in DERIVED]
    links = ' '.join(
        f'<a href="#{metric_id(n)}"><code>{safe(n)}</code></a>' if n in known else f'<code>{safe(n)}</code>'
        for n in names
    )
    own = chart.title in names
    title, below = (links, '') if own else (safe(chart.title), f'<p class="names">{links}</p>')
    good = (
        f'<p class="good-looks"><b>Good:</b> {safe(chart.good[0].lower() + chart.good[1:])}</p>' if chart.good else ''
    )
    return (
        f'<figure class="card chart" id="chart-{safe(key)}" data-chart="{safe(key)}">'
        f'<figcaption><h3>{title}</h3>{good}{below}</figcaption>'
        f'<div class="legend"></div><div class="plot"></div>{_table(chart, lines, rows)}</figure>'
    )


def _table(chart: Chart, lines: Sequence[Line], rows: int) -> str:
    lines = sorted(lines, key=lambda line: line.role in ('low', 'high'))
    values = [dict(zip(*line.column, strict=True)) for line in lines]
    phases = sorted({phase for line in lines for phase in line.column[0]})
    count = len(phases)
    if count > rows:
        phases = [phases[round(i * (count - 1) / (rows - 1))] for i in range(rows)]
    shown = f'{len(phases)} of {count} points' if count > len(phases) else f'{count} points' if count > 1 else '1 point'

    def fine(i: int) -> str:  # left out on paper
        return ' class="fine"' if i % 3 and i < len(phases) - 1 and len(phases) > PAPER_ROWS else ''

    head = ''.join(f'<th scope="col" class="number">{safe(line.label)}</th>' for line in lines)
    body = ''.join(
        f'<tr{fine(i)}><th scope="row" class="number">{phase}</th>'
        + ''.join(f'<td class="number">{number(column[phase]) if phase in column else ""}</td>' for column in values)
        + '</tr>'
        for i, phase in enumerate(phases)
    )
    return (
        f'<details class="data"><summary>Numbers <span class="visually-hidden">of {safe(chart.title)}</span> '
        f'<span class="muted small">({shown})</span></summary><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Numbers of {safe(chart.title)}"><table><thead><tr>'
        f'<th scope="col" class="number">phase</th>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )


def metric_id(name: str) -> str:
    return f'metric-{place_of(name)}'


def place_of(text: str) -> str:
    return ''.join(c if c.isalnum() and c.isascii() else '-' for c in text.lower())


def _short(phases: tuple[int, ...]) -> Any:
    """The phases, or their first and number where none is left out."""
    if len(phases) > 2 and phases[-1] - phases[0] == len(phases) - 1:
        return {'first': phases[0], 'count': len(phases)}
    return list(phases)
