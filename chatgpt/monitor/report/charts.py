"""Which charts a report has: the metrics of each and one sentence on what good looks like.

A metric is matched by the first chart that names it, with `*` for a part of a name. Whatever no chart names is drawn
under 'Other', so nothing that a run has logged is left out. What the metrics mean is in docs/metrics.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml


class Chart(NamedTuple):
    """One set of axes over the learning phases.

    Args:
        key: the end of its address in the page, `#chart-<key>`.
        lines: names of metrics, or patterns of them.
        band: a least and a greatest value of `lines[0]`, drawn as an area behind it.
        stacked: the lines are parts of a whole.
    """

    key: str
    title: str
    good: str
    lines: Sequence[str]
    band: Sequence[str] = ()
    stacked: bool = False


class Drawn(NamedTuple):
    """A chart with the metrics that a run has for it."""

    chart: Chart
    lines: list[str]
    band: list[str]


def _groups() -> dict[str, tuple[Chart, ...]]:
    found = yaml.safe_load((Path(__file__).parent / 'assets' / 'charts.yaml').read_text(encoding='utf-8'))
    return {group: tuple(Chart(**chart) for chart in charts) for group, charts in found.items()}


GROUPS = _groups()
PLANNED = 'plan/peak_gib'
"""memory by plan, a constant: no metric, but what run.json says"""
CUT = 'rollout/cut_share'
"""1 − rollout/ended_share: no metric either"""
RECORDED_ENDS = {'recorded/eos': 'eos', 'recorded/stop': 'stop', 'recorded/length': 'length'}
"""shares of the recorded sequences by finish_reason: the same"""
DERIVED = {PLANNED: 'plan', CUT: 'ran out of room', 'recorded/eos': 'end token', 'recorded/stop': 'stop string'} | {
    'recorded/length': 'ran out of room'
}
"""what is drawn and no metric, with its label"""


def choose(names: Iterable[str]) -> dict[str, list[Drawn]]:
    """The charts of a run that has these metrics, by group; each metric is in exactly one of them."""
    left = dict.fromkeys(names)
    found: dict[str, list[Drawn]] = {}
    for group, charts in GROUPS.items():
        drawn = []
        for chart in charts:
            lines = _taken(chart.lines, left)
            band = _taken(chart.band, left) if lines else []
            if len(band) == 1:  # a least without a greatest is a line like others
                lines, band = lines + band, []
            if lines:
                drawn.append(Drawn(chart, lines, band))
        if group == 'Evaluation':
            drawn += _one_each([name for name in left if name.startswith('eval/')], left)
        if drawn:
            found[group] = drawn
    if left:
        found['Other'] = _one_each(list(left), left)
    return found


def one_metric_each(drawn: Sequence[Drawn]) -> list[Drawn]:
    """The same metrics with a chart for each, for the curves of several runs to be told apart by colour."""
    return [
        Drawn(Chart(_key(name), f'{d.chart.title} ({name})' if i else d.chart.title, d.chart.good, ()), [name], [])
        for d in drawn
        for names in [[*d.lines, *d.band]]
        for i, name in enumerate(names)
        if name not in DERIVED
    ]


def words(name: str) -> str:
    """The metric's own words, without its phase: 'score mean'."""
    return name.split('/', 1)[-1].replace('_', ' ')


def _taken(patterns: Sequence[str], left: dict[str, None]) -> list[str]:
    """The names that match, in the order of the patterns; they are taken out of `left`."""
    found = []
    for pattern in patterns:
        expression = re.compile(pattern.replace('*', '[^/]+'))
        found += [name for name in left if expression.fullmatch(name)]
        for name in found:
            left.pop(name, None)
    return found


def _one_each(names: list[str], left: dict[str, None]) -> list[Drawn]:
    """A chart for each, together with the best value so far and the same on eval data where there are any."""
    drawn = []
    for name in names:
        if name not in left:
            continue
        phase, _, quantity = name.rpartition('/')
        lines = [n for n in (name, f'{name}_best', f'{phase}/val_{quantity}') if n in left]
        for taken in lines:
            del left[taken]
        drawn.append(Drawn(Chart(_key(name), name, '', ()), lines, []))
    return drawn


def _key(name: str) -> str:
    return re.sub(r'[^a-zA-Z0-9]+', '-', name).strip('-')
