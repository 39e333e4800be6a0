"""Preference optimisation where the truth is known: win rate over the SFT model before and after, for each loss on the same budget.

    python benchmarks/preference.py [--seeds 1 2 3] [--out docs/results/preference.md]

The world is `chatgpt.dataset.embedded`. One SFT model per seed; each loss then makes 2 passes over the same 1,500 pairs of stories of the
world, ordered by their true value, in batches of 32 (KTO: 64 answers), with lr 1e-4. Win rate: on 200 new prompts, responses sampled with
the same draws, by the true value, ties counted half. Before is the SFT model against itself with other draws. Seconds are of one thread.
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy
from pathlib import Path
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


def sft(seed: int, tokenizer: Any) -> Any:
    from chatgpt.dataset import embedded, load_demonstrations
    from chatgpt.nn import GPTActor
    from chatgpt.trainer import SFTTrainer
    from chatgpt.trainer.strategies import NaiveStrategy

    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor = GPTActor(config=embedded.demo_config())
        actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=2e-3)))
        data, _ = load_demonstrations(embedded.demo_corpus(2000, seed=seed), tokenizer)
        SFTTrainer(strategy, actor, optim, data, train_batch_size=32, max_epochs=3, callbacks=quiet()).fit()
        return strategy.unwrap(actor)


def values(actor: Any, tokenizer: Any, seed: int) -> list[float]:
    """True value of a sampled response to each of the new prompts."""
    from chatgpt.dataset import embedded, load_prompts
    from chatgpt.rollout import LocalEngine, SamplingParams

    prompts = load_prompts(embedded.demo_prompts(NUM_PROMPTS, seed=99), tokenizer)
    engine = LocalEngine()
    engine.begin(actor)
    sampling = SamplingParams(max_new_tokens=32, eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=tokenizer.pad_token_id)
    samples = engine.generate(list(prompts), sampling, seed=seed, indices=range(NUM_PROMPTS))
    engine.end()
    texts = [tokenizer.decode(s.response_ids, skip_special_tokens=True) for s in samples]
    return [embedded.true_score(p.text, t) for p, t in zip(prompts, texts, strict=True)]


def win_rate(new: list[float], old: list[float]) -> float:
    return sum((a > b) + 0.5 * (a == b) for a, b in zip(new, old, strict=True)) / len(new)


def optimise(name: str, start: Any, seed: int, tokenizer: Any) -> Any:
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
        options = {'train_batch_size': 32, 'max_epochs': 2, **settings}
        getattr(trainers, kind)(strategy, actor, optim, pairs, callbacks=quiet(), **reference, **options).fit()
        return strategy.unwrap(actor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3])
    parser.add_argument('--losses', nargs='+', choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'preference.md')
    args = parser.parse_args()
    torch.set_num_threads(1)
    from chatgpt.dataset import embedded

    tokenizer = embedded.demo_tokenizer()
    rates: dict[str, list[float]] = {name: [] for name in args.losses}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in args.losses}
    before = []
    for seed in args.seeds:
        start = sft(seed, tokenizer)
        old = values(start, tokenizer, seed)
        before.append(win_rate(values(start, tokenizer, seed + 1000), old))
        for name in args.losses:
            wall, cpu = time.perf_counter(), time.process_time()
            actor = optimise(name, start, seed, tokenizer)
            seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            rates[name].append(win_rate(values(actor, tokenizer, seed), old))
            print(f'seed {seed} {name}: {rates[name][-1]:.3f}', flush=True)
    legend = ' '.join(' '.join((__doc__ or '').split('\n\n')[2:]).split())
    lines = ['# Preference optimisation', '', f'`python benchmarks/preference.py`. {legend}', '']
    lines += ['| loss | win rate before | after: mean (least, greatest) | wall s | CPU s |', '|---|---|---|---|---|']
    for name in args.losses:
        found = rates[name]
        wall, cpu = (sum(s[i] for s in seconds[name]) / len(found) for i in (0, 1))
        after = f'{sum(found) / len(found):.3f} ({min(found):.3f}, {max(found):.3f})'
        lines.append(f'| {name} | {sum(before) / len(before):.3f} | {after} | {wall:.0f} | {cpu:.0f} |')
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text('\n'.join(lines) + '\n')


if __name__ == '__main__':
    main()
