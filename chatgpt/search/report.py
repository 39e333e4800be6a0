"""What a sweep found: trials.csv, the same as text, and plot.png."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from chatgpt.search.settings import Sweep
from chatgpt.search.space import Choice, Range, Value
from chatgpt.search.study import Row, best_first, best_of
from chatgpt.trainer.callbacks import format_table

COLUMNS = ('number', 'state', 'value', 'step')


def shown(parameters: Mapping[str, Value]) -> str:
    """lr=0.001 train_batch_size=8"""
    return ' '.join(f'{name}={_short(value)}' for name, value in parameters.items())


def _short(value: Any) -> str:
    return f'{value:.4g}' if isinstance(value, float) else str(value)


def write_table(sweep: Sweep, rows: Sequence[Row]) -> str:
    """trials.csv in the order of the trials; the same as text, the best first."""
    names = [*COLUMNS, *sweep.parameters, 'seconds', 'error']
    flat = [
        {'number': r.number, 'state': r.state, 'value': r.value, 'step': r.step}
        | r.parameters
        | {'seconds': round(r.seconds, 1), 'error': r.error}
        for r in rows
    ]
    with open(sweep.save_path / 'trials.csv', 'w', newline='') as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)
    by_number = {row['number']: row for row in flat}
    order = [by_number[row.number] for row in best_first(sweep, rows)]
    text = [{name: '' if row[name] is None else _short(row[name]) for name in names} for row in order]
    used = [name for name in names if name != 'error' or any(row['error'] for row in text)]
    renamed = [{sweep.metric if name == 'value' else name: row[name] for name in used} for row in text]
    return format_table(renamed, [sweep.metric if name == 'value' else name for name in used], width=100)


def write_plot(sweep: Sweep, rows: Sequence[Row]) -> None:
    """plot.png: the metric by step of every trial, and against each parameter. Without matplotlib a line says so."""
    if not any(row.curve for row in rows):
        return
    if find_spec('matplotlib') is None:
        print('no plot: it needs the package matplotlib: pip install matplotlib', flush=True)
        return
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    panels = 1 + len(sweep.parameters)
    columns = min(3, panels)
    lines = -(-panels // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.4 * columns, 3.4 * lines), squeeze=False, layout='constrained'
    )
    places = list(axes.flat)
    _curves(places[0], sweep, rows)
    for place, (name, space) in zip(places[1:], sweep.parameters.items(), strict=False):
        _against(place, sweep, rows, name, space)
    for place in places[panels:]:
        place.set_visible(False)
    figure.savefig(sweep.save_path / 'plot.png', dpi=110)
    plt.close(figure)


def _curves(place: Any, sweep: Sweep, rows: Sequence[Row]) -> None:
    best = best_of(sweep, rows)
    for row in rows:
        if not row.curve:
            continue
        steps = sorted(row.curve)
        is_best = best is not None and row.number == best.number
        look = {'color': 'C1', 'zorder': 3, 'linewidth': 2.0} if is_best else {'color': 'C0', 'alpha': 0.45}
        label = f'trial {row.number}, the best' if is_best else None
        place.plot(steps, [row.curve[s] for s in steps], marker='.', markersize=4, label=label, **look)
        if row.state == 'pruned':
            place.plot(steps[-1], row.curve[steps[-1]], 'x', color='0.3', zorder=4)
    place.xaxis.get_major_locator().set_params(integer=True)
    place.set_xlabel('learning phase')
    place.set_ylabel(sweep.metric)
    if best is not None:
        place.legend(fontsize=8)


def _against(place: Any, sweep: Sweep, rows: Sequence[Row], name: str, space: Choice | Range) -> None:
    best = best_of(sweep, rows)
    values = [str(value) for value in space.values] if isinstance(space, Choice) else []
    for state, marker, color in (('complete', 'o', 'C0'), ('pruned', 'x', '0.3')):
        some = [row for row in rows if row.state == state and row.value is not None]
        at: list[Any] = [row.parameters[name] for row in some]
        if values:
            at = [values.index(str(value)) for value in at]
        if some:
            place.scatter(at, [row.value for row in some], marker=marker, color=color, label=state, s=28)
    if best is not None:
        x: Any = values.index(str(best.parameters[name])) if values else best.parameters[name]
        place.scatter([x], [best.value], marker='o', color='C1', s=60, zorder=3, label='best')
    if values:
        place.set_xticks(range(len(values)), values)
        place.set_xlim(-0.5, len(values) - 0.5)
    elif isinstance(space, Range) and space.log:
        place.set_xscale('log')
    place.set_xlabel(name)
    place.set_ylabel(sweep.metric)
    if place.get_legend_handles_labels()[0]:
        place.legend(fontsize=8)
