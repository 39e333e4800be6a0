"""PPO on a real pretrained model: words of joy in the stories of stories260K, under Naive and DDP, three seeds each.

    python benchmarks/stories.py --model FOLDER --prompts FILE.jsonl [--out docs/results/stories] \\
        [--strategies naive ddp] [--seeds 1 2 3]

40 learning phases of 32 samples, at least 64 new tokens, through examples/train_prompts.py. Writes OUT.json, OUT.png
and OUT.md: score and KL per phase, the ratio of the last five phases to the first three, and samples of the first and
last phase.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PHASES, SAMPLES = 40, 32
SETTINGS = {
    'num_episodes': 1,
    'max_timesteps': PHASES,
    'update_timesteps': 1,
    'experience_batch_size': SAMPLES,
    'train_batch_size': 16,
    'max_epochs': 4,
    'lr': 2e-4,
    'critic_lr': 2e-3,
    'kl_coef': 0.27,
    'warmup_steps': 40,
    'max_new_tokens': 64,
    'min_new_tokens': 64,
    'sample_interval': PHASES - 1,
}


def run(model: str, prompts: str, strategy: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run; its metrics per phase and its samples."""
    launcher = (
        [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2']
        if strategy == 'ddp'
        else [sys.executable]
    )
    flags = [f'--{k}={v}' for k, v in SETTINGS.items()]
    command = [
        *launcher,
        str(ROOT / 'examples' / 'train_prompts.py'),
        prompts,
        '--pretrain',
        model,
        '--reward_fn',
        f'{ROOT / "examples" / "rewards.py"}:joy',
        '--strategy',
        strategy,
        '--seed',
        str(seed),
        '--save_path',
        str(folder),
        *flags,
    ]
    env = os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}'}
    start = time.perf_counter()
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    samples = [json.loads(line) for line in (folder / 'samples.jsonl').read_text().splitlines()]
    scores, kls = [row['rollout/score_mean'] for row in rows], [row['rollout/kl_mean'] for row in rows]
    first, last = mean(scores[:3]), mean(scores[-5:])
    return {
        'strategy': strategy,
        'seed': seed,
        'score': scores,
        'kl': kls,
        'first3': first,
        'last5': last,
        'ratio': last / first,
        'kl_max': max(kls),
        'wall_s': time.perf_counter() - start,
        'samples': samples,
    }


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for result in results:
        style = {
            'color': 'tab:blue' if result['strategy'] == 'naive' else 'tab:orange',
            'linestyle': ('-', '--', ':')[result['seed'] % 3],
        }
        label = f'{result["strategy"]}, seed {result["seed"]}'
        left.plot(range(1, PHASES + 1), result['score'], label=label, **style)
        right.plot(range(1, PHASES + 1), result['kl'], **style)
    left.set(title='words of joy per response', xlabel='learning phase')
    right.set(title='KL to the initial model, nats per response', xlabel='learning phase')
    right.axhline(15, color='grey', linewidth=0.8)
    left.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def write_page(results: list[dict[str, Any]], path: Path) -> None:
    lines = [
        '# Words of joy: PPO on stories260K',
        '',
        '`python benchmarks/stories.py --model stories260K --prompts prompts.jsonl`: '
        f'{PHASES} learning phases of {SAMPLES} samples of at least 64 new tokens, '
        'reward `examples/rewards.py:joy`. Settings: ' + ', '.join(f'{k} {v}' for k, v in SETTINGS.items()) + '.',
        '',
        f'![score and KL]({path.with_suffix(".png").name})',
        '',
        '| strategy | seed | first 3 phases | last 5 phases | ratio | highest KL (nats per response) | wall s |',
        '|---|---|---|---|---|---|---|',
        *(
            f'| {r["strategy"]} | {r["seed"]} | {r["first3"]:.2f} | {r["last5"]:.2f} | {r["ratio"]:.1f} | '
            f'{r["kl_max"]:.1f} | {r["wall_s"]:.0f} |'
            for r in results
        ),
        '',
        '## Samples of one run',
        '',
    ]
    rows = results[0]['samples']
    steps = sorted({row['step'] for row in rows})
    for step in (steps[0], steps[-1]):
        lines += [f'Phase {step}:', '']
        lines += [
            f'- ({row["score"]:g}) **{row["prompt"]}** {" ".join(row["response"].split())}'
            for row in rows
            if row['step'] == step
        ]
        lines += ['']
    path.write_text('\n'.join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', required=True, help='folder of stories260K')
    parser.add_argument('--prompts', required=True, help='file of story prompts')
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'stories')
    parser.add_argument('--strategies', nargs='+', choices=('naive', 'ddp'), default=['naive', 'ddp'])
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3])
    args = parser.parse_args()
    results = []
    for seed in args.seeds:
        for strategy in args.strategies:
            with tempfile.TemporaryDirectory() as folder:
                results.append(run(args.model, args.prompts, strategy, seed, Path(folder) / 'run'))
            r = results[-1]
            summary = f'{r["first3"]:.2f} -> {r["last5"]:.2f} ({r["ratio"]:.1f}x), highest KL {r["kl_max"]:.1f}, {r["wall_s"]:.0f} s'
            print(f'{strategy} seed {seed}: {summary}', flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix('.json').write_text(
        json.dumps([{k: v for k, v in r.items() if k != 'samples'} for r in results]) + '\n'
    )
    plot(results, args.out.with_suffix('.png'))
    write_page(results, args.out.with_suffix('.md'))


if __name__ == '__main__':
    main()
