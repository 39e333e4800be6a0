"""Compares the demo's settings with its earlier ones: true win rate, and repetition in its stories.

    python benchmarks/demo.py [--seeds 0 1 2] [--runs FOLDER]

Runs examples/demo.py for each row of `SETTINGS` and each seed, in a folder under --runs; runs in that folder are not
repeated. Writes the table, the doctor's findings and stories of both settings between the page's two marks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from harness import ROOT, markdown, script_parser, timed, write_json, write_page

sys.path.insert(0, str(ROOT / 'examples'))

import demo

from chatgpt.launch import demo_world
from chatgpt.launch.inputs import quiet_transformers
from chatgpt.monitor.doctor import diagnose
from chatgpt.monitor.run_folder import RunFolder

FAR_PAIRS = demo.PREFERENCES | {'pairs': demo_world.demo_preferences}
CHEAP_KL = {
    'repetition_cost': 0.0,
    'lr': 3e-4,
    'num_phases': 40,
    'experience_batch_size': 64,
    'train_batch_size': 32,
    'max_epochs': 4,
    'kl_coef': 0.05,
}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    'far pairs, cheap KL': (FAR_PAIRS, CHEAP_KL),
    'the demo': (demo.PREFERENCES, demo.PPO),
}
"""name: the reward model's pairs, and PPO's settings"""
COLUMNS = {
    'win rate': ('win_rate', '{:.1%}'),
    'truth SFT': ('SFT truth', '{:+z.2f}'),
    'truth PPO': ('PPO truth', '{:+z.2f}'),
    'repeated within SFT': ('SFT within', '{:.1%}'),
    'within PPO': ('PPO within', '{:.1%}'),
    'across SFT': ('SFT across', '{:.1%}'),
    'across PPO': ('PPO across', '{:.1%}'),
    'words SFT': ('SFT words', '{:.1f}'),
    'words PPO': ('PPO words', '{:.1f}'),
    'reward model': ('accuracy', '{:.1%}'),
    'KL': ('kl', '{:.1f}'),
    'CPU s': ('cpu', '{:.0f}'),
}


def measure(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """Returns the numbers of one run of the demo, which runs if they are not in `folder`."""
    path = folder / 'measured.json'
    if not path.exists():
        preferences, settings = SETTINGS[name]

        def train() -> Any:
            return demo.train(folder, seed, preferences, settings), demo.compare(folder)

        (accuracy, (numbers, stories)), spent = timed(train)
        numbers |= {'accuracy': accuracy, 'cpu': spent['cpu_s']}
        kls = [row['rollout/kl_mean'] for row in RunFolder(folder / 'ppo_run').metrics]
        responses = [row['text'] for row in stories if row[''] == 'PPO']
        write_json(path, numbers | {'kl': mean(kls[-5:]), 'stories': responses})
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def findings(folder: Path) -> str:
    """Returns the doctor's findings for the three stages of a run."""
    found = [
        f'{stage}: `{one.key}` at phase {one.step}, {one.evidence}'
        for stage in ('sft', 'reward_model', 'ppo')
        for one in diagnose(RunFolder(folder / f'{stage}_run'))
    ]
    return '; '.join(found) or 'nothing'


def table(runs: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Returns a row for each run and, below those of a setting, the mean and spread over its seeds."""
    rows = []
    for name, by_seed in runs.items():
        for seed, numbers in by_seed.items():
            rows.append([name, seed, *(form.format(numbers[key]) for key, form in COLUMNS.values())])
        columns = [([numbers[key] for numbers in by_seed.values()], form) for key, form in COLUMNS.values()]
        cells = [
            f'**{form.format(mean(of))}** ({form.format(min(of))}, {form.format(max(of))})' for of, form in columns
        ]
        rows.append([name, 'mean (least, greatest)', *cells])
    return markdown(['settings', 'seed', *COLUMNS], rows)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--runs', type=Path, default=Path('outputs/demo_benchmark'))
    args = parser.parse_args()
    quiet_transformers()
    torch.set_num_threads(1)
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    lines = []
    for name in SETTINGS:
        folder = args.runs / name.replace(',', '').replace(' ', '_')
        runs[name] = {seed: measure(folder / f'seed-{seed}', name, seed) for seed in args.seeds}
        lines += ['', f'**{name}**: stories of PPO to the same prompts, seed {args.seeds[0]}.', '']
        lines += [f'- {story}' for story in runs[name][args.seeds[0]]['stories']]
        lines += ['', 'The doctor says:', '']
        lines += [f'- seed {seed}: {findings(folder / f"seed-{seed}")}' for seed in args.seeds]
    write_page('demo.md', measured='\n'.join([table(runs), *lines]))


if __name__ == '__main__':
    main()
