"""report.html: one file that opens anywhere, at most 3 MB, and asks no network for anything.

    write_report('outputs/ppo')
    write_report(['outputs/ppo', 'outputs/grpo'], out='both.html')

The page's own Content-Security-Policy lets nothing run but the scripts that it was written with, whatever texts a model
has produced. Left out: which charts there are (`charts`), and what the doctor finds (`chatgpt.doctor`).
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
from chatgpt.report import parts
from chatgpt.report.figures import Curves, curves, place_of
from chatgpt.report.rollouts import rows_for_page
from chatgpt.report.runs import Run, names_of, read_run
from chatgpt.report.text import safe, script_json
from chatgpt.run_folder.record import write_text_atomically

ASSETS = Path(__file__).parent / 'assets'
FILENAME = 'report.html'
LIMIT = 3_000_000
"""bytes of a page"""
FOR_CURVES = 1_500_000
MOST_CHARTS = 1000
BYTES_OF_A_POINT = 9
FOR_ALL_BUT_ROLLOUTS = 2_600_000
POINTS = (1000, 500, 250, 120, 60, 30, 12, 6)
"""of a chart, at most: the first with which the curves fit"""
TEXTS = (2000, 800, 300, 100, 0)
"""characters of a sample's text, at most: the same; 0 leaves samples out"""

Folder = str | os.PathLike[str]


def write_report(folders: Folder | Sequence[Folder], out: Folder | None = None, title: str | None = None) -> Path:
    """Write the page of a run, or of several with their curves in the same charts.

    Args:
        folders: of the runs, with or without run.json.
        out: file to write; None means report.html in the run's folder, for several runs in the current one.
        title: None means the name of the run.

    Returns:
        The file.

    Raises:
        ValueError: a folder is not that of a run, or its run.json is damaged.
        OSError: the file could not be written; one that was there is untouched.
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
    """The whole page, shortened until it is within the limit. What room is left goes to recorded sequences."""
    drawn = fitting_curves(runs)
    for limit in TEXTS:
        text = _assembled(runs, title, drawn, limit)
        if len(text.encode()) <= FOR_ALL_BUT_ROLLOUTS:
            break
    room = (LIMIT - len(text.encode()) - 20_000 * len(runs)) / max(1, sum(bool(run.recorded) for run in runs))
    for share in (0.95, 0.7, 0.4, 0.2):  # `<` takes more room in a page than in JSON
        rows = [rows_for_page(run.recorded, int(share * room)) for run in runs]
        if not any(rows):
            break
        with_rows = _assembled(runs, title, drawn, limit, rows)
        if len(with_rows.encode()) <= LIMIT:
            return with_rows
    if len(text.encode()) > LIMIT:
        raise ValueError(f'a page of these {len(runs)} runs would be larger than {LIMIT // 10**6} MB; give fewer')
    return text


def fitting_curves(runs: Sequence[Run]) -> Curves:
    """With as many points as fit; of very many metrics only the first have a chart."""
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
    """Unit and meaning of the metrics of docs/metrics.md, those it gives in a sentence too."""
    found: dict[str, list[str]] = json.loads(asset('metrics.json'))
    for method in ('dpo', 'orpo', 'simpo', 'kto', 'ilql'):
        of_method = {name: told for name, told in found.items() if name.startswith(f'{method}/')}
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
    sections = [
        parts.failures(runs),
        parts.findings(runs),
        parts.tiles(runs[0]) if len(runs) == 1 else '',
        controls() if drawn.html else '',
        drawn.html,
        parts.samples(runs, texts) if texts else '',
        parts.rollouts(runs, rows),
        parts.settings(runs),
        parts.origin(runs),
        parts.names(drawn.names, meanings()),
    ]
    styles = (
        asset('uPlot.min.css') + asset('page.css') + asset('report.css') + (asset('rollouts.css') if any(rows) else '')
    )
    scripts = [f'/*\n{asset("uPlot.LICENSE")}*/\n{asset("uPlot.iife.min.js")}', asset('report.js')]
    reader = f'{asset("rollouts.js")}\n{asset("embedded_rollouts.js")}' if any(rows) else ''
    places = [('Findings', 'findings'), *((group, place_of(group)) for group in drawn.groups)]
    places += [
        (word, place)
        for word, place in (
            ('Samples', 'samples'),
            ('Rollouts', 'rollouts'),
            ('Settings', 'settings'),
            ('Origin', 'origin'),
            ('Names', 'names'),
        )
        if any(f'<section id="{place}"' in section for section in sections)
    ]
    links = ''.join(f'<li><a href="#{place}">{safe(word)}</a></li>' for word, place in places)
    written = datetime.now(UTC).strftime('%Y-%m-%d %H:%M UTC')
    return ''.join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(styles, [*scripts, reader])}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<title>{safe(title)}</title><link rel="icon" href="data:,">',
            f'<style>{styles}</style></head><body>',
            '<a class="skip" href="#main">To the findings and curves</a>',
            f'<header class="width top">{parts.head(runs, title)}</header>',
            f'<nav class="width places" aria-label="Parts of this page"><ul>{links}</ul></nav>',
            f'<main id="main">{"".join(sections)}</main>',
            f'<footer class="width muted small"><p>Written {written} by chatgpt-rlhf {safe(__version__)}; '
            f'<code>python -m chatgpt report</code> writes it anew.</p></footer>',
            '<div id="said" class="visually-hidden" aria-live="polite"></div>',
            f'<script type="application/json" id="curves">{script_json(drawn.data)}</script>',
            *(f'<script>{script}</script>' for script in scripts),
            f'<script type="module">{reader}</script>' if reader else '',
            '</body></html>\n',
        ]
    )


def policy(styles: str, scripts: Sequence[str]) -> str:
    """What the page may load and run: what is in it as it was written, nothing else."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    run = ' '.join(digest(script) for script in scripts)
    load = f"default-src 'none'; style-src {digest(styles)}; script-src {run}; img-src data:"
    return f"{load}; base-uri 'none'; form-action 'none'"


def controls() -> str:
    """What acts on all charts."""
    return (
        '<div class="controls" role="group" aria-label="All charts">'
        '<label class="smoothing">Smoothing '
        '<input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="0">'
        '<output id="smoothing-value" for="smoothing">0</output></label>'
        '<span class="zoom"><button type="button" id="zoom-in" aria-label="Zoom in">+</button>'
        '<button type="button" id="zoom-out" aria-label="Zoom out" disabled>−</button>'
        '<button type="button" id="zoom-all" disabled>All phases</button>'
        '<span id="zoom-range" class="muted small"></span></span>'
        '<details class="help"><summary>Help</summary><p>Point at a chart, or tap it, for the values of that phase in '
        'all charts. Drag to zoom in, double click to see all again. With the keyboard: Tab to a chart, ← and → by one '
        'point, with Shift by ten, Home and End; + and − zoom, 0 shows all. A name above a chart hides or shows its '
        'line. Smoothing is a moving average; the faint line is what was measured.</p></details></div>'
        '<noscript><p class="card">The curves need JavaScript; the numbers below each do not.</p></noscript>'
    )
