"""Preference optimisation where the truth is known: win rate over the SFT model before and after, for each loss on the
same budget.

    python benchmarks/preference.py [--seeds 1 2 3] [--results FOLDER] [--out docs/results/preference.md]

The world is `chatgpt.dataset.embedded`. One SFT model per seed; each loss then makes 2 passes over the same 1,500 pairs
of stories of the world, ordered by their true value, in batches of 32 (KTO: 64 answers), with lr 1e-4. Win rate: on 200
new prompts, responses sampled with the same draws, by the true value, ties counted half. Before is the SFT model
against itself with other draws. Seconds are of one thread, on a shared machine: wall seconds contain waiting.
"""

from __future__ import annotations

import argparse
import json
import time
from copy import deepcopy
from pathlib import Path
from statistics import mean
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    'dpo sigmoid': ('DPOTrainer', {'beta': 0.5}),
    'dpo ipo': ('DPOTrainer', {'loss_type': 'ipo', 'beta': 0.5}),
    'dpo cdpo': ('DPOTrainer', {'loss_type': 'cdpo', 'beta': 0.5}),
    'dpo robust': ('DPOTrainer', {'loss_type': 'robust', 'beta': 0.5}),
    'dpo hinge': ('DPOTrainer', {'loss_type': 'hinge', 'beta': 0.5}),
    'kto': ('KTOTrainer', {'beta': 0.5, 'train_batch_size': 64}),
    'orpo': ('ORPOTrainer', {'weight': 0.5}),
    'simpo': ('SimPOTrainer', {}),
}
NUM_PAIRS, NUM_PROMPTS = 1500, 200


def stories_in_pairs(seed: int) -> list[dict[str, str]]:
    """Two stories under one prompt, the better one chosen; pairs of equal value are left out."""
    from chatgpt.dataset import embedded

    rows = embedded.demo_corpus(4 * NUM_PAIRS, seed=1000 + seed)
    pairs = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        answers = sorted((first['response'], second['response']), key=lambda r: embedded.true_score(first['prompt'], r))
        if len({embedded.true_score(first['prompt'], r) for r in answers}) == 2:
            pairs.append({'prompt': first['prompt'], 'chosen': answers[1], 'rejected': answers[0]})
    return pairs[:NUM_PAIRS]


def quiet() -> list[Any]:
    from chatgpt.trainer.callbacks import ProgressBar

    return [ProgressBar(enabled=False)]


def sft(seed: int, tokenizer: Any, run_dir: Path | None = None) -> Any:
    from chatgpt.dataset import embedded, load_demonstrations
    from chatgpt.nn import GPTActor
    from chatgpt.trainer import SFTTrainer
    from chatgpt.trainer.strategies import NaiveStrategy

    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor = GPTActor(config=embedded.demo_config())
        actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=2e-3)))
        data, _ = load_demonstrations(embedded.demo_corpus(2000, seed=seed), tokenizer)
        SFTTrainer(
            strategy, actor, optim, data, train_batch_size=32, max_epochs=3, callbacks=quiet(), run_dir=run_dir
        ).fit()
        return strategy.unwrap(actor)


def values(actor: Any, tokenizer: Any, seed: int) -> list[float]:
    """True value of a sampled response to each of the new prompts."""
    from chatgpt.dataset import embedded, load_prompts
    from chatgpt.rollout import LocalEngine, SamplingParams

    prompts = load_prompts(embedded.demo_prompts(NUM_PROMPTS, seed=99), tokenizer)
    engine = LocalEngine()
    engine.begin(actor)
    sampling = SamplingParams(
        max_new_tokens=32, eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=tokenizer.pad_token_id
    )
    samples = engine.generate(list(prompts), sampling, seed=seed, indices=range(NUM_PROMPTS))
    engine.end()
    texts = [tokenizer.decode(s.response_ids, skip_special_tokens=True) for s in samples]
    return [embedded.true_score(p.text, t) for p, t in zip(prompts, texts, strict=True)]


def win_rate(new: list[float], old: list[float]) -> float:
    return sum((a > b) + 0.5 * (a == b) for a, b in zip(new, old, strict=True)) / len(new)


def optimise(name: str, start: Any, seed: int, tokenizer: Any, run_dir: Path | None = None) -> Any:
    from chatgpt import trainer as trainers
    from chatgpt.dataset import load_preferences
    from chatgpt.trainer.strategies import NaiveStrategy

    kind, settings = LOSSES[name]
    settings = dict(settings)
    lr = settings.pop('lr', 1e-4)
    pairs, _ = load_preferences(stories_in_pairs(seed), tokenizer)
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor, initial = deepcopy(start), deepcopy(start)
        actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=lr)))
        reference = {'initial_model': strategy.prepare(initial)} if kind in ('DPOTrainer', 'KTOTrainer') else {}
        options = {'train_batch_size': 32, 'max_epochs': 2, 'run_dir': run_dir, **settings}
        getattr(trainers, kind)(strategy, actor, optim, pairs, callbacks=quiet(), **reference, **options).fit()
        return strategy.unwrap(actor)


def measure(seed: int, path: Path, tokenizer: Any) -> None:
    """Every loss from one SFT model; written after each, and what is there already is not done again."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {'losses': {}}
    if LOSSES.keys() <= found['losses'].keys():
        return
    start = sft(seed, tokenizer)
    old = values(start, tokenizer, seed)
    found['before'] = win_rate(values(start, tokenizer, seed + 1000), old)
    for name in [n for n in LOSSES if n not in found['losses']]:
        wall, cpu = time.perf_counter(), time.process_time()
        actor = optimise(name, start, seed, tokenizer)
        seconds = {'wall': time.perf_counter() - wall, 'cpu': time.process_time() - cpu}
        found['losses'][name] = {'after': win_rate(values(actor, tokenizer, seed), old), **seconds}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + '\n')
        print(f'seed {seed} {name}: {found["before"]:.3f} -> {found["losses"][name]["after"]:.3f}', flush=True)


def table(runs: list[dict[str, Any]]) -> list[str]:
    """One row per loss over all seeds."""
    rows = ['| loss | win rate before | after: mean (least, greatest) | wall s | CPU s |', '|---|---|---|---|---|']
    before = mean(r['before'] for r in runs)
    for name in LOSSES:
        of = [r['losses'][name] for r in runs]
        after = [r['after'] for r in of]
        spread = f'{mean(after):.3f} ({min(after):.3f}, {max(after):.3f})'
        rows.append(
            f'| {name} | {before:.3f} | {spread} | {mean(r["wall"] for r in of):.0f} | '
            f'{mean(r["cpu"] for r in of):.0f} |'
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3])
    parser.add_argument('--results', type=Path, default=ROOT / 'benchmarks' / 'results' / 'preference')
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'preference.md')
    args = parser.parse_args()
    torch.set_num_threads(1)
    from chatgpt.dataset import embedded

    tokenizer = embedded.demo_tokenizer()
    paths = [args.results / f'seed-{seed}.json' for seed in args.seeds]
    for seed, path in zip(args.seeds, paths, strict=True):
        measure(seed, path, tokenizer)
    legend = ' '.join(' '.join((__doc__ or '').split('\n\n')[2:]).split())
    lines = [
        '# Preference optimisation',
        '',
        f'`python benchmarks/preference.py`. {legend}',
        f'{len(paths)} seeds.',
        '',
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text('\n'.join([*lines, *table([json.loads(path.read_text()) for path in paths])]) + '\n')


if __name__ == '__main__':
    main()
