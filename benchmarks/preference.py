"""Preference optimisation with a known true value: win rate over the SFT model, for each loss on the same budget.

    python benchmarks/preference.py [--seeds 1 2 3] [--page]

docs/results/preference.md describes the data of each loss and defines a win.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from harness import Results, markdown, mean_and_spread, offline_trainer, script_parser, timed, write_page

from chatgpt import trainer as trainers
from chatgpt.data import load_demonstrations, load_preferences, load_prompts
from chatgpt.launch import demo_world
from chatgpt.nn import GPTActor
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer import SFTTrainer

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
    """Returns pairs of stories for a prompt, the better one chosen; pairs of equal value are dropped."""
    rows = demo_world.demo_corpus(4 * NUM_PAIRS, seed=1000 + seed)
    pairs = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        answers = sorted(
            (first['response'], second['response']), key=lambda r: demo_world.true_score(first['prompt'], r)
        )
        if len({demo_world.true_score(first['prompt'], r) for r in answers}) == 2:
            pairs.append({'prompt': first['prompt'], 'chosen': answers[1], 'rejected': answers[0]})
    return pairs[:NUM_PAIRS]


def sft(seed: int, tokenizer: Any, run_dir: Path | None = None) -> Any:
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor = GPTActor(config=demo_world.demo_config())
        data, _ = load_demonstrations(demo_world.demo_corpus(2000, seed=seed), tokenizer)
        adam, settings = partial(torch.optim.AdamW, lr=2e-3), {'train_batch_size': 32, 'max_epochs': 3}
        offline_trainer(SFTTrainer, strategy, actor, data, optimizer=adam, run_dir=run_dir, **settings).fit()
        return actor


def values(actor: Any, tokenizer: Any, seed: int) -> list[float]:
    """Returns the true value of a sampled response to each of the new prompts."""
    prompts = load_prompts(demo_world.demo_prompts(NUM_PROMPTS, seed=99), tokenizer)
    engine = LocalEngine()
    engine.begin(actor)
    sampling = SamplingParams(
        max_new_tokens=32, eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=tokenizer.pad_token_id
    )
    samples = engine.generate(Call.of(list(prompts), sampling, seed=seed, indices=range(NUM_PROMPTS)))
    engine.end()
    texts = [tokenizer.decode(s.response_ids, skip_special_tokens=True) for s in samples]
    return [demo_world.true_score(p.text, t) for p, t in zip(prompts, texts, strict=True)]


def win_rate(new: list[float], old: list[float]) -> float:
    return sum((a > b) + 0.5 * (a == b) for a, b in zip(new, old, strict=True)) / len(new)


def optimise(name: str, start: Any, seed: int, tokenizer: Any, run_dir: Path | None = None) -> Any:
    kind, settings = LOSSES[name]
    pairs, _ = load_preferences(stories_in_pairs(seed), tokenizer)
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor, adam = deepcopy(start), partial(torch.optim.AdamW, lr=1e-4)
        options: dict[str, Any] = {'train_batch_size': 32, 'max_epochs': 2, 'run_dir': run_dir, **settings}
        if kind in ('DPOTrainer', 'KTOTrainer'):
            options['initial_model'] = strategy.prepare(deepcopy(start))
        offline_trainer(getattr(trainers, kind), strategy, actor, pairs, optimizer=adam, **options).fit()
        return actor


def measure(seed: int, results: Results, tokenizer: Any) -> None:
    """Trains every loss that has no result from one SFT model."""
    if all(f'{name} {seed}' in results for name in ('before', *LOSSES)):
        return
    start = sft(seed, tokenizer)
    old = values(start, tokenizer, seed)
    results.measure(f'before {seed}', lambda: win_rate(values(start, tokenizer, seed + 1000), old))

    def one(name: str) -> dict[str, float]:
        actor, spent = timed(lambda: optimise(name, start, seed, tokenizer))
        seconds = {'wall': spent['wall_s'], 'cpu': spent['cpu_s']}
        return {'after': win_rate(values(actor, tokenizer, seed), old), **seconds}

    for name in LOSSES:
        results.measure(f'{name} {seed}', lambda n=name: one(n))


def table(results: Results, seeds: list[int]) -> str:
    """Returns a row per loss, over all seeds."""
    before, rows = mean(results[f'before {seed}'] for seed in seeds), []
    for name in LOSSES:
        runs = [results[f'{name} {seed}'] for seed in seeds]
        seconds = [f'{mean(r[kind] for r in runs):.0f}' for kind in ('wall', 'cpu')]
        rows.append([name, f'{before:.3f}', mean_and_spread([r['after'] for r in runs]), *seconds])
    return markdown('loss | win rate before | after: mean (least, greatest) | wall s | CPU s', rows)


def main() -> None:
    parser = script_parser(__doc__, 'preference.md')
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results('preference.json')
    for seed in args.seeds:
        measure(seed, results, demo_world.demo_tokenizer())
    print(table(results, args.seeds))
    if args.page:
        write_page('preference.md', runs=table(results, args.seeds))


if __name__ == '__main__':
    main()
