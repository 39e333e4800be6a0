"""Two-digit addition with checkable answers: a model that has seen a few sums, then GRPO and PPO on the reward of being
right.

    python benchmarks/arithmetic.py [--seeds 1 2 3] [--methods ppo grpo] [--results benchmarks/results/arithmetic]
    python benchmarks/arithmetic.py --report [--out docs/results/arithmetic.md]

Problems are 'ab+cd=' with 10 <= ab, cd <= 99; 10 % of the 8,100 are for evaluation. A GPT-2 of 3 layers x 96 first
learns 400 of the others by SFT (the sum is written from its last digit on), then 120 phases of 256 responses by the
reward `chatgpt.rewards.ExactAnswer`. Exact match is of greedy responses to the 810 eval problems; both methods of a
seed start from the same model. Of 256 responses PPO has one to each prompt, GRPO eight, so PPO sees eight times as many
problems; it also has values for each digit. Seconds are of one thread, of the reinforcement learning and its
evaluations.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, str]
CHARACTERS = '0123456789+='
NUM_SFT, SFT_EPOCHS, PHASES, BATCH, EVERY = 400, 60, 120, 256, 20
METHODS: dict[str, dict[str, Any]] = {
    'ppo': {'experience_batch_size': BATCH, 'lam': 0.95, 'max_epochs': 2},
    'grpo': {
        'advantage_estimator': 'grpo',
        'num_samples_per_prompt': 8,
        'experience_batch_size': BATCH // 8,
        'max_epochs': 2,
    },
}


def tokenizer() -> Any:
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(['_', '<', '.', *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token='_'))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex('.'), 'isolated')
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token='_', bos_token='<', eos_token='.')


def problems(seed: int) -> tuple[list[Row], list[Row]]:
    """Training and eval rows of prompt and answer; the answer's digits from the last on."""
    rows = [{'prompt': f'{a}+{b}=', 'answer': str(a + b)[::-1]} for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(rows)
    return rows[810:], rows[:810]


def exact_match(actor: Any, rows: list[Row], words: Any) -> float:
    from chatgpt.dataset import load_prompts
    from chatgpt.rollout import LocalEngine, SamplingParams

    engine = LocalEngine(max_batch_size=512)
    engine.begin(actor)
    sampling = SamplingParams(max_new_tokens=4, do_sample=False, eos_token_ids=(words.eos_token_id,))
    samples = engine.generate(list(load_prompts(rows, words)), sampling, seed=0, indices=range(len(rows)))
    engine.end()
    right = [
        words.decode(s.response_ids, skip_special_tokens=True) == r['answer']
        for s, r in zip(samples, rows, strict=True)
    ]
    return sum(right) / len(right)


def pretrained(seed: int, rows: list[Row], words: Any) -> Any:
    from transformers import GPT2Config

    from chatgpt.dataset import load_demonstrations
    from chatgpt.nn import GPTActor
    from chatgpt.trainer import SFTTrainer
    from chatgpt.trainer.callbacks import ProgressBar
    from chatgpt.trainer.strategies import NaiveStrategy

    config = GPT2Config(
        vocab_size=len(words),
        n_positions=16,
        n_embd=96,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    data, _ = load_demonstrations([{'prompt': r['prompt'], 'completion': r['answer']} for r in rows[:NUM_SFT]], words)
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor = GPTActor(config=config)
        actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)))
        SFTTrainer(
            strategy,
            actor,
            optim,
            data,
            train_batch_size=128,
            max_epochs=SFT_EPOCHS,
            lr_schedule='cosine',
            callbacks=[ProgressBar(enabled=False)],
        ).fit()
        return strategy.unwrap(actor)


def reinforce(method: str, start: Any, seed: int, train: list[Row], eval_rows: list[Row], words: Any) -> list[float]:
    """Learns from the reward alone; exact match on the eval problems before, every `EVERY` phases, and at the end."""
    from chatgpt.nn import Critic
    from chatgpt.rewards import ExactAnswer
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.callbacks import Evaluator, ProgressBar
    from chatgpt.trainer.strategies import NaiveStrategy

    curve: list[float] = []

    def evaluate(trainer: Any) -> dict[str, float]:
        curve.append(exact_match(trainer.strategy.unwrap(trainer.actor), eval_rows, words))
        return {'score_mean': curve[-1]}

    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor = deepcopy(start)
        critic = critic_optim = None
        if method == 'ppo':
            critic = Critic(deepcopy(start.model))
            critic, critic_optim = strategy.prepare((critic, torch.optim.AdamW(critic.parameters(), lr=1e-3, eps=1e-5)))
        actor, optim = strategy.prepare(
            (actor, torch.optim.AdamW(actor.parameters(), lr=3e-4, eps=1e-5, weight_decay=0.0))
        )
        trainer = PPOTrainer(
            strategy,
            actor,
            critic,
            ExactAnswer(),
            None,
            optim,
            critic_optim,
            tokenizer=words,
            kl_coef=0.0,
            train_batch_size=BATCH,
            max_new_tokens=4,
            callbacks=[Evaluator(evaluate, EVERY), ProgressBar(enabled=False)],
            **METHODS[method],
        )
        trainer.fit(train, 1, PHASES, 1)
    return curve


def run(methods: list[str], seed: int, folder: Path) -> None:
    """One file for each method of a seed."""
    torch.set_num_threads(1)
    words = tokenizer()
    train, eval_rows = problems(seed)
    start = pretrained(seed, train, words)
    folder.mkdir(parents=True, exist_ok=True)
    for method in methods:
        wall, cpu = time.perf_counter(), time.process_time()
        curve = reinforce(method, start, seed, train, eval_rows, words)
        result = {
            'method': method,
            'seed': seed,
            'exact_match': curve,
            'before': curve[0],
            'after': curve[-1],
            'settings': METHODS[method],
            'wall_s': time.perf_counter() - wall,
            'cpu_s': time.process_time() - cpu,
        }
        (folder / f'{method}-{seed}.json').write_text(json.dumps(result) + '\n')
        print(
            f'{method} seed {seed}: {curve[0]:.3f} before, {curve[-1]:.3f} after, {result["cpu_s"]:.0f} CPU s',
            flush=True,
        )


def report(folder: Path, out: Path) -> None:
    """A table and a plot of every result in a folder."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    legend = ' '.join(' '.join((__doc__ or '').split('\n\n')[2:]).split())
    lines = ['# Two-digit addition', '', f'`python benchmarks/arithmetic.py`. {legend}', '']
    lines += ['| method | seed | exact match before | after | wall s | CPU s |', '|---|---|---|---|---|---|']
    found = sorted(
        (json.loads(path.read_text()) for path in folder.glob('*.json')), key=lambda r: (r['method'], r['seed'])
    )
    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    seen: set[str] = set()
    for r in found:
        match = f'{r["before"]:.3f} | {r["after"]:.3f}'
        lines.append(f'| {r["method"]} | {r["seed"]} | {match} | {r["wall_s"]:.0f} | {r["cpu_s"]:.0f} |')
        phases = [min(i * EVERY, PHASES) for i in range(len(r['exact_match']))]
        label = None if r['method'] in seen else r['method']
        axis.plot(phases, r['exact_match'], color=f'C{list(METHODS).index(r["method"])}', alpha=0.8, label=label)
        seen.add(r['method'])
    axis.set(xlabel='phase', ylabel='exact match, eval', ylim=(0, 1), title='two-digit addition, each line one seed')
    axis.grid(alpha=0.3)
    axis.legend(loc='lower right')
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out.with_suffix('.png'), dpi=110)
    out.write_text('\n'.join([*lines, '', f'![Exact match over the training]({out.stem}.png)', '']))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3])
    parser.add_argument('--methods', nargs='+', choices=list(METHODS), default=list(METHODS))
    parser.add_argument('--results', type=Path, default=ROOT / 'benchmarks' / 'results' / 'arithmetic')
    parser.add_argument('--report', action='store_true', help='only write the page from the results')
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'arithmetic.md')
    args = parser.parse_args()
    if not args.report:
        for seed in args.seeds:
            run(args.methods, seed, args.results)
    report(args.results, args.out)


if __name__ == '__main__':
    main()
