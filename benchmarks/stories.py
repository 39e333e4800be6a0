"""PPO on a pretrained model, stories260K, with a reward for words of joy, under Naive and DDP, three seeds each.

    python benchmarks/stories.py --model FOLDER --prompts FILE.jsonl [--strategies naive ddp] [--seeds 1 2 3]
    python benchmarks/stories.py --page     # the table of runs from benchmarks/results/stories.json; samples stay

40 learning phases of 32 samples, at least 64 new tokens, through examples/train_prompts.py. Writes the tables of
docs/results/stories.md (score, KL, the ratio of the last five phases to the first three, samples) and its figure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from harness import RESULTS, ROOT, environment, figure, markdown, script_parser, timed, write_json, write_page

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
    """Runs PPO; returns the metrics per phase and the samples."""
    ranks = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2'] if strategy == 'ddp' else []
    script = [str(ROOT / 'examples' / 'train_prompts.py'), prompts, f'--pretrain={model}']
    flags = {
        'reward_fn': f'{ROOT / "examples" / "rewards.py"}:joy',
        'strategy': strategy,
        'seed': seed,
        'save_path': folder,
    }
    command = [sys.executable, *ranks, *script, *(f'--{k}={v}' for k, v in (flags | SETTINGS).items())]
    env = environment(OMP_NUM_THREADS='1')
    _, spent = timed(lambda: subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL))
    rows, samples = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ('metrics.jsonl', 'samples.jsonl')
    )
    scores, kls = ([row[f'rollout/{name}_mean'] for row in rows] for name in ('score', 'kl'))
    means = {'first3': mean(scores[:3]), 'last5': mean(scores[-5:])}
    about = {'strategy': strategy, 'seed': seed, 'score': scores, 'kl': kls, **means}
    about |= {'ratio': means['last5'] / means['first3'], 'kl_max': max(kls), 'wall_s': spent['wall_s']}
    return about | {'samples': samples}


def plot(results: list[dict[str, Any]]) -> None:
    with figure('stories.png', 2, size=(5, 3.6)) as (left, right):
        for result in results:
            color = 'tab:blue' if result['strategy'] == 'naive' else 'tab:orange'
            style = {'color': color, 'linestyle': ('-', '--', ':')[result['seed'] % 3]}
            label = f'{result["strategy"]}, seed {result["seed"]}'
            left.plot(range(1, PHASES + 1), result['score'], label=label, **style)
            right.plot(range(1, PHASES + 1), result['kl'], **style)
        left.set(title='words of joy per response', xlabel='learning phase')
        right.set(title='KL to the initial model, nats per response', xlabel='learning phase')
        right.axhline(15, color='grey', linewidth=0.8)


def table(results: list[dict[str, Any]]) -> str:
    numbers = {'first3': '.2f', 'last5': '.2f', 'ratio': '.1f', 'kl_max': '.1f', 'wall_s': '.0f'}
    rows = ([r['strategy'], r['seed'], *(f'{r[name]:{form}}' for name, form in numbers.items())] for r in results)
    head = 'strategy | seed | first 3 phases | last 5 phases | ratio | highest KL (nats per response) | wall s'
    return markdown(head, rows)


def samples_text(samples: list[dict[str, Any]]) -> str:
    """Formats samples of the first and the last phase."""
    steps, lines = sorted({row['step'] for row in samples}), list[str]()
    for step in (steps[0], steps[-1]):
        rows = (row for row in samples if row['step'] == step)
        items = [f'- ({r["score"]:g}) **{r["prompt"]}** {" ".join(r["response"].split())}' for r in rows]
        lines += [f'Phase {step}:', '', *items, '']
    return '\n'.join(lines)


def main() -> None:
    parser = script_parser(__doc__, 'stories.md')
    parser.add_argument('--model', help='folder of stories260K')
    parser.add_argument('--prompts', help='file of story prompts')
    parser.add_argument('--strategies', nargs='+', choices=('naive', 'ddp'), default=['naive', 'ddp'])
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3])
    args = parser.parse_args()
    if args.page:
        return write_page('stories.md', runs=table(json.loads((RESULTS / 'stories.json').read_text())))
    if not (args.model and args.prompts):
        parser.error('give --model and --prompts, or --page')
    results = []
    for seed, strategy in product(args.seeds, args.strategies):
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(args.model, args.prompts, strategy, seed, Path(folder) / 'run'))
        print(table(results).splitlines()[-1], flush=True)
    write_json(RESULTS / 'stories.json', [{k: v for k, v in r.items() if k != 'samples'} for r in results])
    plot(results)
    write_page('stories.md', runs=table(results), samples=samples_text(results[0]['samples']))


if __name__ == '__main__':
    main()
