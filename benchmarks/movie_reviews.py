"""A reward model from labelled sentences: pairs of a positive and a negative one, on an eval tenth, beside a bag of
words.

    python benchmarks/movie_reviews.py movie_reviews.jsonl [--seeds 1 2 3] [--out docs/results/reward_model.md]

Rows are {"text", "label"}. Of both labels a tenth is for evaluation; each of its positives is paired with 5 random ones
of its negatives. The model is a GPT-2 of 2 layers x 128 with new weights over the 6,000 most frequent words of the
training part, trained by `RewardModelTrainer` on random pairs of training sentences. The bag of words is a logistic
regression on which of the same words are in a sentence. Seconds are of one thread. Every finished seed is kept in
`--results`, and the table is written again after each.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
NUM_WORDS, MAX_LENGTH, PAIRS_PER_SENTENCE = 6000, 48, 10


def read(path: Path) -> dict[bool, list[list[str]]]:
    """Words of each sentence, by label."""
    from chatgpt.dataset import load_examples
    from chatgpt.trainer.objectives.reward_model import is_success

    found: dict[bool, list[list[str]]] = {True: [], False: []}
    for example in load_examples(path, kind='labelled'):
        found[is_success(example.label)].append(str(example.response).lower().split())
    return found


def split(
    data: dict[bool, list[list[str]]], seed: int
) -> tuple[dict[bool, list[list[str]]], dict[bool, list[list[str]]]]:
    train, eval_texts = {}, {}
    for label, texts in data.items():
        mixed = random.Random(seed).sample(texts, len(texts))
        eval_texts[label], train[label] = mixed[: len(mixed) // 10], mixed[len(mixed) // 10 :]
    return train, eval_texts


def vocabulary(train: dict[bool, list[list[str]]]) -> dict[str, int]:
    """Word → id; 0 pads, 1 begins, 2 ends, 3 is unknown."""
    counts = Counter(word for texts in train.values() for text in texts for word in text)
    return {word: i + 4 for i, (word, _) in enumerate(counts.most_common(NUM_WORDS))}


def pairs(data: dict[bool, list[list[str]]], count: int, seed: int) -> list[tuple[list[str], list[str]]]:
    rng = random.Random(seed)
    positives = [data[True][i % len(data[True])] for i in range(count)]
    return [(good, rng.choice(data[False])) for good in positives]


def bag_of_words(train: Any, eval_texts: Any, words: dict[str, int], seed: int) -> float:
    """Pair accuracy of a logistic regression on word presence."""
    torch.manual_seed(seed)

    def features(texts: list[list[str]]) -> torch.Tensor:
        table = torch.zeros(len(texts), NUM_WORDS + 4)
        for row, text in enumerate(texts):
            table[row, [words.get(w, 3) for w in text]] = 1.0
        return table

    x = torch.cat([features(train[True]), features(train[False])])
    y = torch.cat([torch.ones(len(train[True])), torch.zeros(len(train[False]))])
    linear = torch.nn.Linear(NUM_WORDS + 4, 1)
    optim = torch.optim.Adam(linear.parameters(), lr=5e-3, weight_decay=1e-4)
    for _ in range(15):
        order = torch.randperm(len(y))
        for rows in order.split(256):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(linear(x[rows])[:, 0], y[rows])
            optim.zero_grad()
            loss.backward()
            optim.step()
    compared = pairs(eval_texts, 5 * len(eval_texts[True]), seed)
    with torch.no_grad():
        better, worse = (linear(features([p[i] for p in compared]))[:, 0] for i in (0, 1))
    return float((better > worse).float().mean())


def reward_model(train: Any, eval_texts: Any, words: dict[str, int], seed: int) -> float:
    """Pair accuracy of `RewardModelTrainer`'s model."""
    from transformers import GPT2Config, GPT2Model

    from chatgpt.dataset import TokenizedPreference
    from chatgpt.nn import RewardModel
    from chatgpt.trainer import RewardModelTrainer
    from chatgpt.trainer.callbacks import ProgressBar
    from chatgpt.trainer.strategies import NaiveStrategy

    def record(pair: tuple[list[str], list[str]]) -> TokenizedPreference:
        answers = [torch.tensor([*(words.get(w, 3) for w in text[: MAX_LENGTH - 2]), 2]) for text in pair]
        masks = [torch.ones_like(a, dtype=torch.bool) for a in answers]
        return TokenizedPreference(prompt_ids=torch.tensor([1]), responses=answers, response_masks=masks)

    count = PAIRS_PER_SENTENCE * len(train[True])
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        config = GPT2Config(
            vocab_size=NUM_WORDS + 4,
            n_positions=MAX_LENGTH,
            n_embd=128,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.3,
            embd_pdrop=0.5,
            attn_pdrop=0.1,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        model = RewardModel(GPT2Model(config))
        model, optim = strategy.prepare((model, torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)))
        trainer = RewardModelTrainer(
            strategy,
            model,
            optim,
            [record(p) for p in pairs(train, count, seed)],
            callbacks=[ProgressBar(enabled=False)],
            train_batch_size=64,
            max_epochs=1,
            warmup_steps=50,
            log_interval=100,
        )
        trainer.fit()
        compared = [record(p) for p in pairs(eval_texts, 5 * len(eval_texts[True]), seed)]
        return trainer.evaluate(compared)['accuracy']


def measure(data: dict[bool, list[list[str]]], seed: int) -> dict[str, float]:
    """Pair accuracies on the eval tenth of this seed, and what the reward model cost."""
    train, eval_texts = split(data, seed)
    words = vocabulary(train)
    bag = bag_of_words(train, eval_texts, words, seed)
    start, cpu = time.perf_counter(), time.process_time()
    model = reward_model(train, eval_texts, words, seed)
    spent = {'wall_s': time.perf_counter() - start, 'cpu_s': time.process_time() - cpu}
    return {'seed': seed, 'reward_model': model, 'bag_of_words': bag, **spent}


def table(results: list[dict[str, float]]) -> list[str]:
    lines = [
        '| seed (split and weights) | reward model, pair accuracy | bag of words | wall s | CPU s |',
        '|---|---|---|---|---|',
    ]
    for r in results:
        lines.append(
            f'| {r["seed"]} | {r["reward_model"]:.3f} | {r["bag_of_words"]:.3f} | {r["wall_s"]:.0f} | {r["cpu_s"]:.0f} '
            '|'
        )
    if len(results) > 1:
        model, bag = (sum(r[name] for r in results) / len(results) for name in ('reward_model', 'bag_of_words'))
        lines.append(f'| mean | {model:.3f} | {bag:.3f} | | |')
    return lines


def write_page(folder: Path, out: Path) -> None:
    """The page of all seeds in `folder`."""
    results = sorted((json.loads(path.read_text()) for path in folder.glob('seed-*.json')), key=lambda r: r['seed'])
    legend = ' '.join(' '.join((__doc__ or '').split('\n\n')[2:]).split())
    count = f'{len(results)} seed{"s" if len(results) != 1 else ""}.'
    notes = folder / 'notes.md'  # what a reader must know about these runs and the script cannot
    lines = [
        '# Reward model on movie reviews',
        '',
        f'`python benchmarks/movie_reviews.py movie_reviews.jsonl`. {legend} {count}',
        '',
    ]
    lines += [*table(results), *(['', notes.read_text().strip()] if notes.is_file() else [])]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text('\n'.join(lines) + '\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path)
    parser.add_argument('--seeds', type=int, nargs='*', default=[1, 2, 3], help='without a number: only write the page')
    parser.add_argument('--results', type=Path, default=ROOT / 'benchmarks' / 'results' / 'movie_reviews')
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'reward_model.md')
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = read(args.data)
    args.results.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        result = measure(data, seed)
        print(*table([result])[2:], flush=True)
        (args.results / f'seed-{seed}.json').write_text(json.dumps(result, indent=1) + '\n')
        write_page(args.results, args.out)
    write_page(args.results, args.out)


if __name__ == '__main__':
    main()
