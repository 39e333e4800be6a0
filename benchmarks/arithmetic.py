"""Two-digit addition with checkable answers: a model that has seen a few sums, then GRPO and PPO on the reward of being right.

    python benchmarks/arithmetic.py [--seeds 1 2 3] [--methods ppo grpo] [--out docs/results/arithmetic.md]

Problems are 'ab+cd=' with 10 <= ab, cd <= 99; 10 % of the 8,100 are held back. A GPT-2 of 3 layers x 96 first learns 400 of the others by
SFT (the sum is written from its last digit on), then 120 phases of 256 responses by the reward `chatgpt.rewards.ExactAnswer`. Exact match is
of greedy responses to the 810 held-back problems. Seconds are of one thread, of the reinforcement learning alone.
"""

from __future__ import annotations

import argparse
import random
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
CHARACTERS = '0123456789+='
NUM_SFT, SFT_EPOCHS, PHASES, BATCH = 400, 60, 120, 256
METHODS: dict[str, dict[str, Any]] = {
    'ppo': {'experience_batch_size': BATCH, 'lam': 0.95, 'max_epochs': 2},
    'grpo': {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 8, 'experience_batch_size': BATCH // 8, 'max_epochs': 2},
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


def problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-back rows of prompt and answer; the answer's digits from the last on."""
    rows = [{'prompt': f'{a}+{b}=', 'answer': str(a + b)[::-1]} for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(rows)
    return rows[810:], rows[:810]


def exact_match(actor: Any, rows: list[dict[str, str]], words: Any) -> float:
    from chatgpt.dataset import load_prompts
    from chatgpt.rollout import LocalEngine, SamplingParams

    engine = LocalEngine(max_batch_size=512)
    engine.begin(actor)
    sampling = SamplingParams(max_new_tokens=4, do_sample=False, eos_token_ids=(words.eos_token_id,))
    samples = engine.generate(list(load_prompts(rows, words)), sampling, seed=0, indices=range(len(rows)))
    engine.end()
    right = [words.decode(s.response_ids, skip_special_tokens=True) == r['answer'] for s, r in zip(samples, rows, strict=True)]
    return sum(right) / len(right)


def pretrained(seed: int, rows: list[dict[str, str]], words: Any) -> Any:
    from transformers import GPT2Config

    from chatgpt.dataset import load_demonstrations
    from chatgpt.nn import GPTActor
    from chatgpt.trainer import SFTTrainer
    from chatgpt.trainer.callbacks import ProgressBar
    from chatgpt.trainer.strategies import NaiveStrategy

    config = GPT2Config(vocab_size=len(words), n_positions=16, n_embd=96, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
    data, _ = load_demonstrations([{'prompt': r['prompt'], 'completion': r['answer']} for r in rows[:NUM_SFT]], words)
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor = GPTActor(config=config)
        actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)))
        SFTTrainer(strategy, actor, optim, data, train_batch_size=128, max_epochs=SFT_EPOCHS, lr_schedule='cosine',
                   callbacks=[ProgressBar(enabled=False)]).fit()  # fmt: skip
        return strategy.unwrap(actor)


def reinforce(method: str, start: Any, seed: int, rows: list[dict[str, str]], words: Any) -> Any:
    from chatgpt.nn import Critic
    from chatgpt.rewards import ExactAnswer
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.callbacks import ProgressBar
    from chatgpt.trainer.strategies import NaiveStrategy

    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor = deepcopy(start)
        critic = critic_optim = None
        if method == 'ppo':
            critic = Critic(deepcopy(start.model))
            critic, critic_optim = strategy.prepare((critic, torch.optim.AdamW(critic.parameters(), lr=1e-3, eps=1e-5)))
        actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=3e-4, eps=1e-5, weight_decay=0.0)))
        trainer = PPOTrainer(
            strategy, actor, critic, ExactAnswer(), None, optim, critic_optim, tokenizer=words, kl_coef=0.0, train_batch_size=BATCH,
            max_new_tokens=4, callbacks=[ProgressBar(enabled=False)], **METHODS[method],
        )  # fmt: skip
        trainer.fit(rows, 1, PHASES, 1)
        return strategy.unwrap(actor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3])
    parser.add_argument('--methods', nargs='+', choices=list(METHODS), default=list(METHODS))
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'arithmetic.md')
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = tokenizer()
    lines = ['| method | seed | exact match before | after | wall s | CPU s |', '|---|---|---|---|---|---|']
    for seed in args.seeds:
        train, held_back = problems(seed)
        start = pretrained(seed, train, words)
        before = exact_match(start, held_back, words)
        for method in args.methods:
            wall, cpu = time.perf_counter(), time.process_time()
            actor = reinforce(method, start, seed, train, words)
            seconds = f'{time.perf_counter() - wall:.0f} | {time.process_time() - cpu:.0f}'
            lines.append(f'| {method} | {seed} | {before:.3f} | {exact_match(actor, held_back, words):.3f} | {seconds} |')
            print(lines[-1], flush=True)
    legend = ' '.join(' '.join((__doc__ or '').split('\n\n')[2:]).split())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text('\n'.join(['# Two-digit addition', '', f'`python benchmarks/arithmetic.py`. {legend}', '', *lines]) + '\n')


if __name__ == '__main__':
    main()
