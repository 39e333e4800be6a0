"""New tokens per CPU-second of PPO, split into collect, score and learn, against the bare costs of the same model.

    python benchmarks/ppo.py [--out FILE.json] [--repeats 5] [--epochs 1 4]

The work: GPT-2 of 4 layers x 256 (vocabulary 512), 32 prompts of 16 tokens, 48 new tokens each, fp32, one thread, in
two arrangements: four networks (actor, critic, reward model, initial model) and a shared trunk with a value head. The
bare costs are measured in the same run: a forward, a forward with backward, an AdamW step, and `model.generate`. Their
sum is the floor that PPO cannot go below with this arithmetic; `overhead` is the ratio to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, VOCAB = 32, 16, 48, 512


def model_config() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCAB,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def cpu_seconds(act: Callable[[], Any]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def prompt_ids() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCAB, (PROMPT_TOKENS,), generator=generator) for _ in range(PROMPTS)]


def make_trainer(arrangement: str, epochs: int, engine: Any = None) -> Any:
    from chatgpt.nn import GPTActor, GPTCritic, RewardModel
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.callbacks import ProgressBar
    from chatgpt.trainer.strategies import NaiveStrategy

    strategy = NaiveStrategy(seed=0)
    shared = arrangement == 'shared trunk'
    actor = GPTActor(config=model_config(), value_head=True) if shared else GPTActor(config=model_config())
    critic = None if shared else GPTCritic(config=model_config())
    reward = (lambda prompts, responses: [0.0] * len(prompts)) if shared else RewardModel(deepcopy(critic.model))
    initial = deepcopy(actor)
    optim = {
        name: torch.optim.AdamW(m.parameters(), lr=1e-5, eps=1e-5)
        for name, m in (('actor', actor), ('critic', critic))
        if m is not None
    }
    pairs = [(actor, optim['actor'])] + ([(critic, optim['critic'])] if critic is not None else [])
    prepared = strategy.prepare(*pairs, reward, initial)
    (actor, actor_optim), *rest = prepared
    critic, critic_optim = rest.pop(0) if critic is not None else (None, None)
    return PPOTrainer(
        strategy,
        actor,
        critic,
        rest[0],
        rest[1],
        actor_optim,
        critic_optim,
        experience_batch_size=PROMPTS,
        train_batch_size=PROMPTS,
        max_epochs=epochs,
        max_new_tokens=NEW_TOKENS,
        max_tokens_per_batch=PROMPTS * (PROMPT_TOKENS + NEW_TOKENS),
        callbacks=[ProgressBar(enabled=False)],
        engine=engine,
    )


def one_phase(trainer: Any) -> dict[str, float]:
    trainer.collect(1)
    return {k: v for k, v in trainer.learn_phase().items() if k.startswith('perf/')}


def bare_costs() -> dict[str, float]:
    """CPU seconds of the model alone, without a library: what the arithmetic itself takes."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(model_config()).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-5)
    ids = torch.randint(2, VOCAB, (PROMPTS, PROMPT_TOKENS + NEW_TOKENS))
    prompts = ids[:, :PROMPT_TOKENS]

    def forward() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    def backward() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()

    def generate() -> None:
        with torch.no_grad():
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    costs = {}
    for name, act in (
        ('forward', forward),
        ('forward_backward', backward),
        ('optimizer_step', step),
        ('generate', generate),
    ):
        if name == 'optimizer_step':
            backward()
        act()  # warm-up
        if name == 'optimizer_step':
            backward()
        costs[name] = cpu_seconds(act)
    return costs


def floor_of(bare: dict[str, float], arrangement: str, epochs: int) -> dict[str, float]:
    """What the same arithmetic costs bare. Scoring: reference and critic (and reward) forwards; the decode gives the
    old log-probs."""
    trained = 1 if arrangement == 'shared trunk' else 2
    scored = 2 if arrangement == 'shared trunk' else 3
    return {
        'collect': bare['generate'],
        'score': scored * bare['forward'],
        'learn': epochs * trained * (bare['forward_backward'] + bare['optimizer_step']),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--epochs', type=int, nargs='+', default=[1, 4])
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for arrangement in ('four networks', 'shared trunk'):
        for epochs in args.epochs:
            trainer = make_trainer(arrangement, epochs)
            trainer.set_prompts(prompt_ids())
            one_phase(trainer)  # warm-up
            phases, bares = [], []
            for _ in range(args.repeats):  # A B A B, so that a busy machine disturbs both alike
                bares.append(bare_costs())
                phases.append(one_phase(trainer))
            bare = {k: statistics.median(b[k] for b in bares) for k in bares[0]}
            floor = floor_of(bare, arrangement, epochs)
            parts = {p: statistics.median(x[f'perf/{p}_cpu_s'] for x in phases) for p in ('collect', 'score', 'learn')}
            totals = [sum(x[f'perf/{p}_cpu_s'] for p in parts) for x in phases]
            rows.append(
                {
                    'arrangement': arrangement,
                    'epochs': epochs,
                    'new_tokens_per_cpu_s': PROMPTS * NEW_TOKENS / statistics.median(totals),
                    'cpu_s': parts | {'total': statistics.median(totals), 'min': min(totals), 'max': max(totals)},
                    'wall_s': statistics.median(x['perf/total_s'] for x in phases),
                    'bare_cpu_s': bare,
                    'overhead': {p: parts[p] / floor[p] for p in parts}
                    | {'total': statistics.median(totals) / sum(floor.values())},
                }
            )
    print_table(rows)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1) + '\n')


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        '| arrangement | epochs | new tokens / CPU s | collect s (x bare) | score s (x bare) | learn s (x bare) | '
        'total s (x bare) |'
    )
    print('|---|---|---|---|---|---|---|')
    for row in rows:
        cells = [f'{row["cpu_s"][p]:.2f} ({row["overhead"][p]:.2f})' for p in ('collect', 'score', 'learn', 'total')]
        print(
            f'| {row["arrangement"]} | {row["epochs"]} | {row["new_tokens_per_cpu_s"]:.0f} | '
            + ' | '.join(cells)
            + ' |'
        )


if __name__ == '__main__':
    main()
