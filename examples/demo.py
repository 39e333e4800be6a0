"""The demo: a language model learns to tell stories (SFT), then to tell cheerful ones (PPO), from nothing and offline.

    python examples/demo.py [--out outputs/demo] [--seed 0]

The world is `chatgpt.dataset.embedded`, which knows what a response is worth. Leaves in --out: sft/ and ppo/ (Hugging Face folders),
metrics.jsonl of both runs, curves.png, and before_after.txt, the table that it prints at the end.
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from chatgpt.dataset import embedded
from chatgpt.launch.arguments import run_main
from chatgpt.launch.build import embedded_reward
from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.trainer import PPOTrainer, SFTTrainer
from chatgpt.trainer.callbacks import format_table, read_jsonl
from chatgpt.trainer.saving import save_pretrained
from chatgpt.trainer.strategies import NaiveStrategy
from chatgpt.types import Sequence

NUM_SHOWN = 8


def to_sequence(row: dict[str, str], tokenizer: Any) -> Sequence:
    response = [*tokenizer(row['response'])['input_ids'], tokenizer.eos_token_id]
    return Sequence(
        prompt_ids=torch.tensor(tokenizer(row['prompt'])['input_ids']),
        response_ids=torch.tensor(response),
        response_mask=torch.ones(len(response), dtype=torch.bool),
    )


def run_sft(strategy: Any, actor: Any, tokenizer: Any, out: Path) -> None:
    stories = [to_sequence(row, tokenizer) for row in embedded.demo_corpus(2200, seed=0)]
    trainer = SFTTrainer(
        strategy,
        *actor,
        stories[200:],
        stories[:200],
        train_batch_size=32,
        max_epochs=3,
        log_interval=20,
        tokenizer=tokenizer,
        run_dir=out / 'sft_run',
    )
    trainer.fit()
    save_pretrained(strategy, actor[0], out / 'sft', tokenizer=tokenizer)


def run_ppo(strategy: Any, actor: Any, tokenizer: Any, out: Path) -> PPOTrainer:
    initial_model = deepcopy(actor)
    critic = GPTCritic(config=embedded.demo_config())
    (actor, actor_optim), (critic, critic_optim), initial_model = strategy.prepare(
        (actor, AdamW(actor.parameters(), lr=3e-4, eps=1e-5, weight_decay=0.0)),
        (critic, AdamW(critic.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0)),
        initial_model,
    )
    trainer = PPOTrainer(
        strategy, actor, critic, embedded_reward, initial_model, actor_optim, critic_optim, tokenizer=tokenizer, run_dir=out / 'ppo_run',
        experience_batch_size=64, train_batch_size=32, max_epochs=4, kl_coef=0.02, max_new_tokens=32,
    )  # fmt: skip
    trainer.fit(embedded.demo_prompts(200, seed=0), num_episodes=1, max_timesteps=40, update_timesteps=1)
    save_pretrained(strategy, actor, out / 'ppo', tokenizer=tokenizer)
    return trainer


def answers(folder: Path, prompts: list[str], seed: int) -> list[str]:
    """Sampled responses of a saved model, loaded back as any user of transformers would."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    responses = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors='pt')['input_ids']
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=32)
        responses.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return responses


def plot(out: Path) -> Path:
    """Score and KL of every learning phase."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    rows = read_jsonl(out / 'ppo_run' / 'metrics.jsonl')
    steps = [row['step'] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    left.plot(steps, [row['rollout/score_mean'] for row in rows], color='tab:green')
    left.set(title='score (true value of the stories)', xlabel='learning phase', ylabel='mean score')
    right.plot(steps, [row['rollout/kl_mean'] for row in rows], color='tab:red')
    right.set(title='KL to the initial model', xlabel='learning phase', ylabel='nats per response')
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(out / 'curves.png', dpi=120)
    return out / 'curves.png'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('outputs/demo'))
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    torch.set_num_threads(1)  # a model this small runs fastest on one
    tokenizer = embedded.demo_tokenizer()
    with NaiveStrategy(seed=args.seed) as strategy:
        actor = GPTActor(config=embedded.demo_config())
        num_parameters = sum(p.numel() for p in actor.parameters())
        print(f'1. SFT: a new GPT-2 of {num_parameters:,} parameters learns the language of the story world', flush=True)
        pair = strategy.prepare((actor, AdamW(actor.parameters(), lr=2e-3)))
        run_sft(strategy, pair, tokenizer, args.out)
        print('2. PPO: the same model learns to make its stories cheerful', flush=True)
        run_ppo(strategy, actor, tokenizer, args.out)
    prompts = [row['prompt'] for row in embedded.demo_prompts(100, seed=1)]
    rows, totals = [], [0.0, 0.0]
    before, after = answers(args.out / 'sft', prompts, 0), answers(args.out / 'ppo', prompts, 0)
    for i, (prompt, old, new) in enumerate(zip(prompts, before, after, strict=True)):
        scores = embedded.true_score(prompt, old), embedded.true_score(prompt, new)
        totals = [t + s for t, s in zip(totals, scores, strict=True)]
        if i < NUM_SHOWN:
            rows += [
                {'': 'prompt', 'score': '', 'text': prompt},
                {'': 'before', 'score': f'{scores[0]:+.2f}', 'text': old},
                {'': 'after', 'score': f'{scores[1]:+.2f}', 'text': new},
            ]
    table = format_table(rows, ['', 'score', 'text'], width=110)
    summary = f'mean score on {len(prompts)} new prompts: before PPO {totals[0] / len(prompts):+.2f}, after {totals[1] / len(prompts):+.2f}'
    (args.out / 'before_after.txt').write_text(f'{table}\n{summary}\n')
    print(f'\n3. The same prompts before and after\n{table}\n{summary}')
    print(f'curves: {plot(args.out)}; models: {args.out / "sft"}, {args.out / "ppo"}; {time.perf_counter() - start:.0f} s')


if __name__ == '__main__':
    run_main(main)
