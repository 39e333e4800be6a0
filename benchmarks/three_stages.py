"""The three stages on a real small model, with the scripts that users run: SFT, a reward model from review labels, PPO
against it.

    python benchmarks/three_stages.py --model stories260K --stories stories.txt \\
        --reviews movie_reviews.jsonl --prompts prompts.jsonl

1. train_sft.py: the model (Llama architecture, 260 thousand parameters) on about 1,000 stories, 2 epochs.
2. train_reward_model.py: the same trunk on the labels of the reviews, one epoch, a tenth for evaluation.
3. train_prompts.py: PPO on story openings against that reward model, 40 phases of 64 responses of 48 tokens.

The reward model is small and scores texts unlike those it has seen; the table says what its score and an independent
count of joyful words do. Writes docs/results/three_stages.md and .png.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONCLUSION = """What a weak reward model rewards is not what its labels meant: compare the score with the count of joyful words and with the texts
below. Where the reward measures what is wanted, the same PPO does what it should: [stories](stories.md)."""
JOY = re.compile(
    r'\b(happy|happily|joy|smile|smiled|smiling|laugh|laughed|laughing|fun|love|loved|glad|great|wonderful|best)\b'
)


def run(script: str, *flags: str) -> float:
    """A script of examples/ with these flags; wall seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, str(ROOT / 'examples' / f'{script}.py'), *flags], check=True)
    return time.perf_counter() - start


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tell(model: Path, prompts: Path, out: Path) -> list[dict[str, Any]]:
    """Sampled continuations of the first 100 openings."""
    chosen = out.with_suffix('.prompts.jsonl')
    chosen.write_text('\n'.join(prompts.read_text().splitlines()[:100]) + '\n')
    run(
        'inference',
        '--pretrain',
        str(model),
        '--input',
        str(chosen),
        '--output',
        str(out),
        '--max_new_tokens',
        '48',
        '--seed',
        '7',
    )
    return rows(out)


def joy(found: list[dict[str, Any]]) -> float:
    return sum(len(JOY.findall(r['response'].lower())) for r in found) / len(found)


def plot(folder: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), constrained_layout=True)
    for axis, (stage, metric, title) in zip(
        axes,
        (
            ('sft', 'sft/loss', 'SFT: nats per token'),
            ('rm', 'rm/accuracy', 'reward model: accuracy'),
            ('ppo', 'rollout/score_mean', "PPO: the reward model's score"),
            ('ppo', 'rollout/kl_mean', 'PPO: KL to the SFT model, nats'),
        ),
        strict=True,
    ):
        found = [(r['step'], r[metric]) for r in rows(folder / stage / 'metrics.jsonl') if metric in r]
        axis.plot([s for s, _ in found], [v for _, v in found])
        axis.set(title=title, xlabel='logged phase')
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ('model', 'stories', 'reviews', 'prompts'):
        parser.add_argument(f'--{name}', type=Path, required=True)
    parser.add_argument('--folder', type=Path, default=Path('outputs/three_stages'))
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'three_stages.md')
    args = parser.parse_args()
    f = args.folder
    seconds = [
        run(
            'train_sft',
            str(args.stories),
            '--pretrain',
            str(args.model),
            '--save_path',
            str(f / 'sft'),
            '--max_epochs=2',
            '--lr=1e-3',
            '--lr_schedule=cosine',
            '--train_batch_size=16',
            '--max_len=256',
            '--validation_percentage=5',
            '--seed=1',
        ),
        run(
            'train_reward_model',
            str(args.reviews),
            '--pretrain',
            str(f / 'sft/actor'),
            '--save_path',
            str(f / 'rm'),
            '--max_epochs=1',
            '--lr=1e-3',
            '--train_batch_size=32',
            '--max_len=128',
            '--validation_percentage=10',
            '--seed=1',
        ),
        run(
            'train_prompts',
            str(args.prompts),
            '--pretrain',
            str(f / 'sft/actor'),
            '--reward_model',
            str(f / 'rm/reward_model'),
            '--save_path',
            str(f / 'ppo'),
            '--experience_batch_size=64',
            '--train_batch_size=32',
            '--max_epochs=4',
            '--lr=3e-4',
            '--critic_lr=1e-3',
            '--kl_coef=0.05',
            '--max_new_tokens=48',
            '--max_prompt_tokens=64',
            'training_iteration=40',
            '--seed=1',
        ),
    ]
    before, after = (
        tell(f / 'sft/actor', args.prompts, f / 'before.jsonl'),
        tell(f / 'ppo/actor', args.prompts, f / 'after.jsonl'),
    )
    sft, rm, ppo = (rows(f / stage / 'metrics.jsonl') for stage in ('sft', 'rm', 'ppo'))
    legend = ' '.join(' '.join((__doc__ or '').split('\n\n')[2:]).split())
    command = (
        'python benchmarks/three_stages.py --model stories260K --stories stories.txt --reviews movie_reviews.jsonl '
        '--prompts prompts.jsonl'
    )
    lines = ['# Three stages on a real model', '', f'`{command}`. {legend}', '']
    lines += ['| stage | measure | before | after | wall s |', '|---|---|---|---|---|']
    losses = [r['sft/val_perplexity'] for r in sft if 'sft/val_perplexity' in r]
    lines.append(
        f'| SFT | perplexity on eval stories, after epoch 1 and 2 | {losses[0]:.2f} | {losses[-1]:.2f} | '
        f'{seconds[0]:.0f} |'
    )
    accuracy = [r['rm/val_accuracy'] for r in rm if 'rm/val_accuracy' in r][-1]
    lines.append(f'| reward model | accuracy on eval reviews (0.5 is chance) | | {accuracy:.3f} | {seconds[1]:.0f} |')
    means = [sum(r['rollout/score_mean'] for r in part) / len(part) for part in (ppo[:3], ppo[-3:])]
    lines.append(
        f"| PPO | the reward model's score, first and last three phases | {means[0]:+.2f} | {means[1]:+.2f} | {seconds[2]:.0f} |"
    )
    lines.append(
        '| PPO | KL to the SFT model, last three phases, nats | 0 | '
        f'{sum(r["rollout/kl_mean"] for r in ppo[-3:]) / 3:.1f} | |'
    )
    lines.append(
        f'| PPO | joyful words in a story of 48 tokens, 100 openings | {joy(before):.2f} | {joy(after):.2f} | |'
    )
    lines += ['', CONCLUSION, '', '![Curves](three_stages.png)', '', '## The same openings under both', '']
    for old, new in list(zip(before, after, strict=True))[:5]:
        lines += [f'> {" ".join(old["prompt"].split())}', '', f'- SFT: {" ".join(old["response"].split())}']
        lines += [f'- PPO: {" ".join(new["response"].split())}', '']
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text('\n'.join(lines))
    plot(f, args.out.with_suffix('.png'))


if __name__ == '__main__':
    main()
