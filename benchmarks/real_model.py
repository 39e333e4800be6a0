"""Writes the page of the results of examples/real_model: additions (`make real`), sentiment, preferences.

make real REAL_ARGS='--out outputs/real-1 --seed 1'
python benchmarks/real_model.py outputs/real-* ...     # adds their results and writes the page
python benchmarks/real_model.py --page                 # the page from earlier results
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import harness

RECORDS, PAGE = 'real_model.json', 'real_model.md'
TASKS = {'additions': 'real_model.png', 'sentiment': 'real_sentiment.png'}
"""tasks with a plot of scores and KL"""
METHODS = ('sft', 'reward_model', 'dpo', 'ppo', 'ppo_lora', 'ppo_all', 'grpo')
SCORES = {'additions': 'share of held-out sums right', 'sentiment': 'held-out reward'}


def table(records: list[dict[str, Any]]) -> str:
    """Returns each run's mean over seeds; a gain is relative to the same seed's score before the run."""
    names = list(dict.fromkeys(row['run'] for record in records for row in record['rows']))
    rows = []
    for name in names:
        own = [row for record in records for row in record['rows'] if row['run'] == name]
        started = [row for row in own if 'before' in row]
        cells = [name.replace('_', ' '), len(own)]
        cells.append(f'{statistics.mean(row["before"] for row in started):.3f}' if started else '')
        cells.append(score_of(own, 'score'))
        pairs = [row['score'] for row in started], [row['before'] for row in started]
        cells.append(harness.interval(*pairs) if started else '')
        cells.append(score_of(own, 'sampled'))
        both = [pair for record in records if (pair := sampled_pair(record, name))]
        cells.append(harness.interval(*zip(*both, strict=True)) if both else '')
        for key, form in (('kl', '.2f'), ('length', '.1f'), ('cpu_minutes', '.1f'), ('peak_gib', '.1f')):
            values = [row[key] for row in own if key in row]
            cells.append(f'{statistics.mean(values):{form}}' if values else '')
        rows.append(cells)
    head = (
        'run | seeds | before | after | gain | after, sampled | gain, sampled | KL, nats per response | tokens | '
        'CPU minutes | peak GiB'
    )
    return harness.markdown(head, rows)


def sampled_pair(record: dict[str, Any], run: str) -> tuple[float, float] | None:
    """Returns the scores of responses at temperature 1 after a run, and of the model that it began with."""
    rows = {row['run']: row for row in record['rows']}
    began = 'as it is' if run == 'sft' or record['task'].split()[0] == 'preferences' else 'sft'
    if 'sampled' not in rows.get(began, {}) or 'before' not in rows.get(run, {}):
        return None
    return rows[run]['sampled'], rows[began]['sampled']


def methods(tasks: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the table method x task: held-out score before -> after, means over seeds."""
    rows = []
    for name in METHODS:
        cells = [name.replace('_', ' ')]
        for records in tasks.values():
            own = [row for record in records for row in record['rows'] if row['run'] == name]
            before = [row['before'] for row in own if 'before' in row]
            parts = [statistics.mean(values) for values in (before, [row['score'] for row in own]) if values]
            cells.append(' → '.join(f'{part:.3f}' for part in parts))
        if any(cells[1:]):
            rows.append(cells)
    return harness.markdown(['method', *tasks], rows)


def score_of(rows: list[dict[str, Any]], name: str) -> str:
    scores = [row[name] for row in rows if name in row]
    return harness.mean_and_spread(scores) if len(scores) > 1 else ''.join(f'{score:.3f}' for score in scores)


def samples(record: dict[str, Any]) -> str:
    names = list(record['samples'][0])
    head = [name.replace('_', ' ') for name in names]
    return harness.markdown(head, [[cell(sample[name]) for name in names] for sample in record['samples']])


def cell(text: str) -> str:
    return ' '.join(text.split()).replace('|', '\\|').replace('<', '&lt;')


def draw(task: str, records: list[dict[str, Any]]) -> None:
    """Plots the runs that were made with every seed."""
    runs = [run for run, own in records[0]['curves'].items() if own['kl'] and all(run in r['curves'] for r in records)]
    with harness.figure(TASKS[task], 2) as axes:
        for axis, kind, title in zip(axes, ('score', 'kl'), (SCORES[task], 'KL, nats per response'), strict=True):
            for number, run in enumerate(runs):
                seeds = [record['curves'][run] for record in records]
                for curves in seeds:
                    label = run.replace('_', ' ') if curves is seeds[0] else None
                    axis.plot(*zip(*curves[kind], strict=True), color=f'C{number}', marker='.', label=label)
                    if kind == 'score' and curves.get('sampled'):
                        axis.plot(*zip(*curves['sampled'], strict=True), color=f'C{number}', alpha=0.4, linewidth=1)
            axis.set(title=title, xlabel='phases')
        for name in ('as it is', 'sft'):
            rows = [row for record in records for row in record['rows'] if row['run'] == name]
            if not rows:
                continue
            height = statistics.mean(row['score'] for row in rows)
            axes[0].axhline(height, color='grey', linestyle='--', linewidth=1)
            above = 4 if name == 'as it is' else -10
            place = {'xytext': (0, above), 'textcoords': 'offset points', 'fontsize': 8, 'color': 'grey'}
            axes[0].annotate('after SFT' if name == 'sft' else name, (0, height), **place)
        if task == 'additions':
            axes[0].set_ylim(0, 1)


def main() -> None:
    parser = harness.script_parser(__doc__, PAGE)
    parser.add_argument('folders', nargs='*', type=Path, help='output folders of the tasks')
    parser.add_argument('--data', default='', help='name of the data, if a task ran on several')
    args = parser.parse_args()
    kept = harness.Results(RECORDS)
    for folder in args.folders:
        found = json.loads((folder / 'results.json').read_text())
        task = ' '.join(filter(None, (found['task'], args.data)))
        shown = found['samples'] if task in TASKS else []  # not the dialogues of preference data, some unpleasant
        kept[f'{task} {found["seed"]}'] = found | {'task': task, 'samples': shown}
        harness.write_json(harness.RESULTS / RECORDS, kept)
    if not kept:
        parser.error('there are no results; give a folder')
    order = list(dict.fromkeys(record['task'].split()[0] for record in kept.values()))
    names = sorted(dict.fromkeys(r['task'] for r in kept.values()), key=lambda name: order.index(name.split()[0]))
    tasks = {name: [kept[key] for key in sorted(kept) if kept[key]['task'] == name] for name in names}
    tables = {'methods': methods(tasks)}
    for task, records in tasks.items():
        if ' ' in task:
            continue  # other data of a task are in the table of methods alone
        tables[task] = table(records)
        if task in TASKS:
            draw(task, records)
            tables[f'samples of {task}'] = samples(records[0])
    harness.write_page(PAGE, **tables)


if __name__ == '__main__':
    main()
