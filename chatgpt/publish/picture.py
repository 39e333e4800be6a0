"""The training curves of a run as one small picture, for a page that shows pictures only. Needs matplotlib.

Left out: everything that one would look up (`report.html` has all curves, with their numbers).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

MOST_BYTES = 150_000
MOST_PANELS = 6
SMOOTHED_FROM = 40
"""points, from which on a curve is drawn faintly below its running mean"""
COLOURS = ('#2563eb', '#d97706')
Curve = list[tuple[float, float]]
_PREFIXES = ('sft', 'rm', 'dpo', 'orpo', 'simpo', 'kto', 'ilql')


class Panel(NamedTuple):
    """One frame: its title, and up to two curves by metric, with what they are of."""

    title: str
    curves: tuple[tuple[str, str], ...]


def _trained_and_evaluated(title: str, quantity: str) -> tuple[Panel, ...]:
    return tuple(
        Panel(title, ((f'{p}/{quantity}', 'training data'), (f'{p}/val_{quantity}', 'eval data'))) for p in _PREFIXES
    )


PANELS: tuple[Panel, ...] = (
    Panel('score', (('rollout/score_mean', 'training prompts'), ('eval/score_mean', 'eval prompts'))),
    Panel('score', (('rft/score_mean', 'all samples'), ('rft/kept_score_mean', 'those learned from'))),
    Panel('KL from the initial model, nats per response', (('rollout/kl_mean', ''),)),
    *_trained_and_evaluated('accuracy', 'accuracy'),
    *_trained_and_evaluated('margin', 'margin'),
    *_trained_and_evaluated('loss', 'loss'),
    Panel('response length, tokens', (('rollout/response_len_mean', ''),)),
    Panel('entropy, nats per token', (('ppo/entropy', ''),)),
    Panel('entropy, nats per token', (('rollout/entropy', ''),)),
    Panel('clip fraction', (('ppo/clip_fraction', ''),)),
    Panel('explained variance', (('ppo/explained_variance', ''),)),
    Panel('perplexity', (('sft/perplexity', 'training data'), ('sft/val_perplexity', 'eval data'))),
)
"""in the order of what one looks at first; those that a run has"""


def curve(metrics: SequenceOf[Mapping[str, Any]], evals: SequenceOf[Mapping[str, Any]], name: str) -> Curve:
    """(phase, value) of a metric wherever it is a number; an evaluation before the first phase has phase 0."""
    rows = [*evals, *metrics] if name.startswith('eval/') else metrics
    found = {row['step']: row[name] for row in rows if isinstance(row.get(name), (int, float))}
    return sorted(found.items())


def panels_of(
    metrics: SequenceOf[Mapping[str, Any]], evals: SequenceOf[Mapping[str, Any]]
) -> list[tuple[str, list[tuple[str, Curve]]]]:
    """(title, [(label, curve)]) of the frames that the run has numbers for, each title once. What is 0 throughout, such
    as the explained variance of a method without a critic, says nothing."""
    found: dict[str, list[tuple[str, Curve]]] = {}
    for panel in PANELS:
        curves = [
            (label, points)
            for name, label in panel.curves
            if len(points := curve(metrics, evals, name)) > 1 and any(value for _, value in points)
        ]
        if curves and panel.title not in found:
            found[panel.title] = curves
    return list(found.items())[:MOST_PANELS]


def can_draw() -> bool:
    return find_spec('matplotlib') is not None


def draw(path: Path, panels: SequenceOf[tuple[str, list[tuple[str, Curve]]]], title: str) -> bool:
    """Write the frames as a PNG of at most `MOST_BYTES`; False when there is nothing to draw."""
    if not panels:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(len(panels), 3 if len(panels) != 4 else 2)
    rows = -(-len(panels) // columns)
    width, height = 4.1 * columns, 2.6 * rows + 0.7
    figure = Figure(figsize=(width, height), facecolor='white')
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=0.5 / width, right=1 - 0.2 / width, bottom=0.5 / height, top=1 - 0.75 / height, wspace=0.2, hspace=0.32
    )
    figure.suptitle(title, fontsize=12, fontweight='bold', color='#111827', y=1 - 0.18 / height, va='top')
    for index, (name, curves) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        for colour, (label, points) in zip(COLOURS, curves, strict=False):
            _line(axes, points, colour, label)
        axes.set_title(name, fontsize=10, color='#111827', loc='left')
        axes.grid(True, color='#e5e7eb', linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, colors='#4b5563', length=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        for side, spine in axes.spines.items():
            spine.set_visible(side in ('left', 'bottom'))
            spine.set_color('#9ca3af')
        if index >= len(panels) - columns:
            axes.set_xlabel('learning phase', fontsize=8, color='#4b5563')
        if len(curves) > 1:
            axes.legend(fontsize=8, frameon=False)
    for dpi in (110, 80, 60):
        figure.savefig(path, dpi=dpi, metadata={'Software': None})
        if path.stat().st_size <= MOST_BYTES:
            break
    return True


def _line(axes: Any, points: Curve, colour: str, label: str) -> None:
    steps, values = zip(*points, strict=True)
    if len(points) < SMOOTHED_FROM:
        axes.plot(steps, values, color=colour, linewidth=1.6, label=label, marker='o' if len(points) < 8 else '', ms=3)
        return
    axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
    axes.plot(steps, running_mean([float(v) for v in values]), color=colour, linewidth=1.8, label=label)


def running_mean(values: SequenceOf[float]) -> list[float]:
    """Of up to a tenth of the points around each, fewer at the ends."""
    half = max(len(values) // 20, 1)
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
