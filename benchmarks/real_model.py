"""A chat model of 135 million parameters learns to add: the page of what `make real` leaves.

make real REAL_ARGS='--out outputs/real-1 --seed 1'
python benchmarks/real_model.py outputs/real-*         # takes in their results, by seed, and writes the page
python benchmarks/real_model.py --page                 # the page from what was taken in before
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import harness

RECORDS, PAGE, PLOT = 'real_model.json', 'real_model.md', 'real_model.png'
COLOURS = {'ppo': 'C0', 'grpo': 'C1'}


def table(runs: list[dict[str, Any]]) -> str:
    rows = []
    for place, name in enumerate(row['model'] for row in runs[0]['rows']):
        own = [run['rows'][place] for run in runs]
        cells = [name, len(own), right_of(own)]
        after_sft = [run['rows'][1]['right'] for run in runs]
        cells.append(harness.interval([row['right'] for row in own], after_sft) if place > 1 else '')
        for key, form in (('kl', '.2f'), ('length', '.1f'), ('cpu_minutes', '.1f'), ('peak_gib', '.1f')):
            cells.append(f'{statistics.mean(row[key] for row in own):{form}}' if key in own[0] else '')
        rows.append(cells)
    head = [
        'model',
        'seeds',
        'right, held out',
        'more than after SFT',
        'KL, nats per response',
        'tokens',
        'CPU minutes',
        'peak GiB',
    ]
    return harness.markdown(head, rows)


def right_of(rows: list[dict[str, Any]]) -> str:
    scores = [row['right'] for row in rows]
    return harness.mean_and_spread(scores) if len(scores) > 1 else f'{scores[0]:.3f}'


def samples(run: dict[str, Any]) -> str:
    return harness.markdown(
        ['question', 'as it is', 'after SFT and PPO'], [[*map(cell, row)] for row in run['samples']]
    )


def cell(text: str) -> str:
    return ' '.join(text.split()).replace('|', '\\|')


def draw(runs: list[dict[str, Any]]) -> None:
    with harness.figure(PLOT, 2) as axes:
        for axis, kind, title in zip(
            axes, ('score', 'kl'), ('share of held-out sums right', 'KL, nats per response'), strict=True
        ):
            for method, colour in COLOURS.items():
                for number, run in enumerate(runs):
                    label = method.upper() if number == 0 else None
                    axis.plot(*zip(*run['curves'][method][kind], strict=True), color=colour, marker='.', label=label)
            axis.set(title=title, xlabel='phases of 64 responses')
        starts = [statistics.mean(run['rows'][place]['right'] for run in runs) for place in (0, 1)]
        for height, name in zip(starts, ('as it is', 'after SFT'), strict=True):
            axes[0].axhline(height, color='grey', linestyle='--', linewidth=1)
            axes[0].annotate(name, (0, height), xytext=(0, 4), textcoords='offset points', fontsize=8, color='grey')
        axes[0].set_ylim(0, 1)


def main() -> None:
    parser = harness.script_parser(__doc__, PAGE)
    parser.add_argument('folders', nargs='*', type=Path, help='what examples/real_model/additions.py left')
    args = parser.parse_args()
    kept = harness.Results(RECORDS)
    for folder in args.folders:
        found = json.loads((folder / 'results.json').read_text())
        kept[str(found['seed'])] = found
        harness.write_json(harness.RESULTS / RECORDS, kept)
    if not kept:
        parser.error('there are no results; give a folder')
    runs = [kept[seed] for seed in sorted(kept)]
    draw(runs)
    harness.write_page(PAGE, scores=table(runs), samples=samples(runs[0]))


if __name__ == '__main__':
    main()
