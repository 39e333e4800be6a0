"""report.html: one file of at most 3 MB that works without a network.

    write_report('outputs/ppo')
    write_report(['outputs/ppo', 'outputs/grpo'], out='both.html')

The page's Content-Security-Policy allows only its own scripts, so that no text of a model can run as code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from chatgpt import __version__
from chatgpt.monitor.report.figures import Curves, curves
from chatgpt.monitor.report.parts import names_of_page, part
from chatgpt.monitor.report.rollouts import rows_for_page
from chatgpt.monitor.report.runs import Run, names_of, read_run
from chatgpt.monitor.report.text import script_json
from chatgpt.monitor.run_folder.record import write_text_atomically

ASSETS = Path(__file__).parent / 'assets'
FILENAME = 'report.html'
LIMIT = 3_000_000
"""bytes of a page"""
FOR_CURVES = 1_500_000
MOST_CHARTS = 1000
BYTES_OF_A_POINT = 9
FOR_ALL_BUT_ROLLOUTS = 2_600_000
POINTS = (1000, 500, 250, 120, 60, 30, 12, 6)
"""maximum points of a chart; the first value is taken with which the curves fit"""
TEXTS = (2000, 800, 300, 100, 0)
"""maximum characters of a sample's text; the first value with which the page fits; 0: no samples"""

Folder = str | os.PathLike[str]


def write_report(folders: Folder | Sequence[Folder], out: Folder | None = None, title: str | None = None) -> Path:
    """Writes the report of a run, or of several with their curves in the same charts.

    Args:
        folders: folders of runs, with or without run.json.
        out: file to write; None: report.html in the run's folder, for several runs in the working directory.
        title: None: the name of the run.

    Returns:
        The file.

    Raises:
        ValueError: if a folder is not that of a run, or its run.json is damaged.
        OSError: if the file could not be written; an existing one is unchanged.
    """
    paths = [folders] if isinstance(folders, (str, os.PathLike)) else list(folders)
    if not paths:
        raise ValueError('no run was given; give the folder of at least one')
    runs = [read_run(path, name) for path, name in zip(paths, names_of(paths), strict=True)]
    target = Path(out) if out is not None else Path(paths[0] if len(paths) == 1 else '.', FILENAME)
    if target.is_dir():
        raise ValueError(f'{target} is a folder; give the name of a file, such as {target / FILENAME}')
    if not target.parent.is_dir():
        raise ValueError(f'{target}: there is no folder {target.parent}; make it, or give another file')
    text = page(runs, title or (runs[0].name if len(runs) == 1 else f'{len(runs)} runs'))
    write_text_atomically(target, text)
    return target


def page(runs: Sequence[Run], title: str) -> str:
    """Returns the page, shortened until it is within `LIMIT`, with as many recorded sequences as fit."""
    drawn = fitting_curves(runs)
    for limit in TEXTS:
        text = _assembled(runs, title, drawn, limit)
        if len(text.encode()) <= FOR_ALL_BUT_ROLLOUTS:
            break
    budget = (LIMIT - len(text.encode()) - 20_000 * len(runs)) / max(1, sum(bool(run.recorded) for run in runs))
    for share in (0.95, 0.7, 0.4, 0.2):  # `<` takes more bytes in a page than in JSON
        rows = [rows_for_page(run.recorded, int(share * budget)) for run in runs]
        if not any(rows):
            break
        with_rows = _assembled(runs, title, drawn, limit, rows)
        if len(with_rows.encode()) <= LIMIT:
            return with_rows
    if len(text.encode()) > LIMIT:
        raise ValueError(f'a page of these {len(runs)} runs would be larger than {LIMIT // 10**6} MB; give fewer')
    return text


def fitting_curves(runs: Sequence[Run]) -> Curves:
    """Returns the curves with as many points as fit; if there are too many metrics, only the first have a chart."""
    lengths = [len(at) for run in runs for at, _ in run.columns.values()]
    fewest = (points for points in POINTS if BYTES_OF_A_POINT * sum(min(n, points) for n in lengths) <= FOR_CURVES)
    first = next(fewest, POINTS[-1])
    tries = [(points, MOST_CHARTS) for points in POINTS if points <= first] + [(POINTS[-1], n) for n in (500, 250, 100)]
    for points, most in tries:
        drawn = curves(runs, points, most, frozenset(meanings()))
        if len(drawn.html.encode()) + len(script_json(drawn.data)) <= FOR_CURVES:
            break
    return drawn


@cache
def meanings() -> dict[str, list[str]]:
    """Returns unit and meaning of the metrics of docs/metrics.md, and of those that it derives from others."""
    found: dict[str, list[str]] = json.loads(asset('metrics.json'))
    for method in ('critic', 'dpo', 'orpo', 'simpo', 'kto', 'ilql'):
        of_method = {name: entry for name, entry in found.items() if name.startswith(f'{method}/')}
        found |= {f'{method}/{name}': found[f'sft/{name}'] for name in ('grad_norm', 'grad_norm_max', 'lr', 'epoch')}
        for name, (unit, _) in of_method.items():
            found[name.replace('/', '/val_')] = [
                unit,
                f'{name} on eval data; only in phases that end with an evaluation',
            ]
    return found


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding='utf-8')


def _assembled(runs: Sequence[Run], title: str, drawn: Curves, texts: int, rows: Sequence[Sequence[Any]] = ()) -> str:
    from markupsafe import Markup

    names = ['uPlot.min.css', 'page.css', 'report.css', *(['rollouts.css'] if any(rows) else [])]
    styles = ''.join(map(asset, names))
    scripts = [f'/*\n{asset("uPlot.LICENSE")}*/\n{asset("uPlot.iife.min.js")}', asset('report.js')]
    reader = f'{asset("rollouts.js")}\n{asset("embedded_rollouts.js")}' if any(rows) else ''
    return part(
        'page',
        runs,
        title,
        curves=drawn,
        limit=texts,
        rows={run.name: of_run for run, of_run in zip(runs, rows, strict=True)} if any(rows) else {},
        meanings=names_of_page(drawn.names, meanings()),
        styles=Markup(styles),
        scripts=list(map(Markup, scripts)),
        reader=Markup(reader),
        policy=Markup(policy(styles, [*scripts, reader])),
        written=datetime.now(UTC).strftime('%Y-%m-%d %H:%M UTC'),
        version=__version__,
    )


def policy(styles: str, scripts: Sequence[str]) -> str:
    """Returns the page's Content-Security-Policy, which allows only these styles and scripts."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    run = ' '.join(digest(script) for script in scripts)
    load = f"default-src 'none'; style-src {digest(styles)}; script-src {run}; img-src data:"
    return f"{load}; base-uri 'none'; form-action 'none'"
