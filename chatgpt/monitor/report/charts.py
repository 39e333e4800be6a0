"""The charts of a report: the metrics of each and a sentence on how a good curve looks.

A metric belongs to the first chart with a matching name, where `*` stands for a part of a name. Metrics without a chart
are under 'Other'. See docs/metrics.md for their meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml


class Chart(NamedTuple):
    """A chart over the learning phases.

    Args:
        key: end of its address in the page, `#chart-<key>`.
        lines: names or patterns of metrics.
        band: minimum and maximum of `lines[0]`, drawn as an area behind it.
        stacked: True if the lines are parts of a whole.
    """

    key: str
    title: str
    good: str
    lines: Sequence[str]
    band: Sequence[str] = ()
    stacked: bool = False


class Drawn(NamedTuple):
    """A chart with the metrics of a run."""

    chart: Chart
    lines: list[str]
    band: list[str]


def _groups() -> dict[str, tuple[Chart, ...]]:
    found = yaml.safe_load((Path(__file__).parent / 'assets' / 'charts.yaml').read_text(encoding='utf-8'))
    return {group: tuple(Chart(**chart) for chart in charts) for group, charts in found.items()}


GROUPS = _groups()
PLANNED = 'plan/peak_gib'
"""planned memory, a constant of run.json"""
CUT = 'rollout/cut_share'
"""1 − rollout/ended_share"""
RECORDED_ENDS = {'recorded/eos': 'eos', 'recorded/stop': 'stop', 'recorded/length': 'length'}
"""shares of the recorded sequences by finish_reason"""
DERIVED = {PLANNED: 'plan', CUT: 'length limit', 'recorded/eos': 'end token', 'recorded/stop': 'stop string'} | {
    'recorded/length': 'length limit'
}
"""lines that are no metrics, with their labels"""


def choose(names: Iterable[str]) -> dict[str, list[Drawn]]:
    """Returns the charts of a run with these metrics, by group; each metric is in exactly one chart."""
    left = dict.fromkeys(names)
    found: dict[str, list[Drawn]] = {}
    for group, charts in GROUPS.items():
        drawn = []
        for chart in charts:
            lines = _taken(chart.lines, left)
            band = _taken(chart.band, left) if lines else []
            if len(band) == 1:  # a minimum without a maximum is an ordinary line
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
    """Returns a chart per metric, so that colours can distinguish several runs."""
    return [
        Drawn(Chart(_key(name), f'{d.chart.title} ({name})' if i else d.chart.title, d.chart.good, ()), [name], [])
        for d in drawn
        for names in [[*d.lines, *d.band]]
        for i, name in enumerate(names)
        if name not in DERIVED
    ]


def words(name: str) -> str:
    """Returns the name of a metric as words, without its prefix: 'score mean'."""
    return name.split('/', 1)[-1].replace('_', ' ')


def _taken(patterns: Sequence[str], left: dict[str, None]) -> list[str]:
    """Removes the matching names from `left` and returns them, in the order of the patterns."""
    found = []
    for pattern in patterns:
        expression = re.compile(pattern.replace('*', '[^/]+'))
        found += [name for name in left if expression.fullmatch(name)]
        for name in found:
            left.pop(name, None)
    return found


def _one_each(names: list[str], left: dict[str, None]) -> list[Drawn]:
    """Returns a chart per metric, with its best value so far and its value on eval data, if logged."""
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
