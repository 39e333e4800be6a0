"""New tokens per CPU second of PPO, split into collect, score and learn, against the bare costs of the same model.

    python benchmarks/ppo.py [--repeats 3] [--page]

The work: GPT-2 of 4 layers x 256 (vocabulary 512), 32 prompts of 16 tokens, 48 new tokens each, fp32, one thread, in
two arrangements: four networks (actor, critic, reward model, initial model) and a shared trunk with a value head. The
bare costs are measured in the same run: a forward, a forward with backward, an AdamW step, and `model.generate`. Their
sum is the floor that PPO cannot go below with this arithmetic; "x bare" is the ratio to it.
"""

from __future__ import annotations

import argparse
import statistics
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from harness import PAGES, RESULTS, alternate, cpu_seconds, gpt2, markdown, ppo_trainer, write_json, write_page
from transformers import GPT2LMHeadModel

from chatgpt.nn import GPTActor, GPTCritic, RewardModel
from chatgpt.strategies import NaiveStrategy

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, VOCAB = 32, 16, 48, 512
PARTS = ('collect', 'score', 'learn')


def make_trainer(arrangement: str, epochs: int) -> Any:
    strategy, shared = NaiveStrategy(seed=0), arrangement == 'shared trunk'
    actor = GPTActor(config=gpt2(), value_head=True if shared else None)
    critic = None if shared else GPTCritic(config=gpt2())
    reward = (lambda prompts, responses: [0.0] * len(prompts)) if shared else RewardModel(deepcopy(critic.model))
    trainer = ppo_trainer(
        strategy, actor, critic, reward, deepcopy(actor), optimizer=partial(torch.optim.AdamW, lr=1e-5, eps=1e-5),
        experience_batch_size=PROMPTS, train_batch_size=PROMPTS, max_epochs=epochs, max_new_tokens=NEW_TOKENS,
        max_tokens_per_batch=PROMPTS * (PROMPT_TOKENS + NEW_TOKENS),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    trainer.set_prompts([torch.randint(2, VOCAB, (PROMPT_TOKENS,), generator=generator) for _ in range(PROMPTS)])
    return trainer


def one_phase(trainer: Any) -> dict[str, float]:
    trainer.collect(1)
    metrics = trainer.learn()
    return {part: metrics[f'perf/{part}_cpu_s'] for part in PARTS}


def bare_costs() -> dict[str, float]:
    """CPU seconds of the model alone, without a library."""
    model = GPT2LMHeadModel(gpt2()).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-5)
    ids = torch.randint(2, VOCAB, (PROMPTS, PROMPT_TOKENS + NEW_TOKENS))
    prompts = ids[:, :PROMPT_TOKENS]
    sampling = {'do_sample': True, 'max_new_tokens': NEW_TOKENS, 'min_new_tokens': NEW_TOKENS, 'pad_token_id': 0}

    @torch.no_grad()
    def forward() -> None:
        model(ids, use_cache=False)

    def backward() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()

    @torch.no_grad()
    def generate() -> None:
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **sampling)

    costs = {}
    for act in (forward, backward, optimizer.step, generate):  # the step has the gradients of the one before
        act()  # warm-up
        costs[act.__name__] = cpu_seconds(act)
    return costs


def floor_of(bare: dict[str, float], arrangement: str, epochs: int) -> dict[str, float]:
    """The same arithmetic bare. Scoring: reference and critic (and reward) forwards; the decode gives the old log-probs."""
    trained, scored = (1, 2) if arrangement == 'shared trunk' else (2, 3)
    learn = epochs * trained * (bare['backward'] + bare['step'])
    return {'collect': bare['generate'], 'score': scored * bare['forward'], 'learn': learn}


def measure(arrangement: str, epochs: int, repeats: int) -> dict[str, Any]:
    trainer = make_trainer(arrangement, epochs)
    found = alternate({'bare': lambda _: bare_costs(), 'phase': lambda _: one_phase(trainer)}, repeats)
    bare = {name: statistics.median(row[name] for row in found['bare']) for name in found['bare'][0]}
    parts = {part: statistics.median(row[part] for row in found['phase']) for part in PARTS}
    parts['total'] = statistics.median(sum(row.values()) for row in found['phase'])
    floor = floor_of(bare, arrangement, epochs)
    floor['total'] = sum(floor.values())
    return {
        'arrangement': arrangement,
        'epochs': epochs,
        'new_tokens_per_cpu_s': PROMPTS * NEW_TOKENS / parts['total'],
        'cpu_s': parts,
        'bare_cpu_s': bare,
        'overhead': {part: parts[part] / floor[part] for part in parts},
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = 'arrangement | epochs | new tokens / CPU s | ' + ' | '.join(f'{p} s (x bare)' for p in (*PARTS, 'total'))
    cells = ([f'{row["cpu_s"][p]:.2f} ({row["overhead"][p]:.2f})' for p in (*PARTS, 'total')] for row in rows)
    return markdown(
        head,
        (
            [row['arrangement'], row['epochs'], f'{row["new_tokens_per_cpu_s"]:.0f}', *shown]
            for row, shown in zip(rows, cells, strict=True)
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--epochs', type=int, nargs='+', default=[1, 4])
    parser.add_argument('--page', action='store_true', help='write the table into docs/results/speed.md')
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(a, epochs, args.repeats) for a in ('four networks', 'shared trunk') for epochs in args.epochs]
    print(table(rows))
    if args.page:
        write_json(RESULTS / 'ppo_speed.json', rows)
        write_page(PAGES / 'speed.md', ppo=table(rows))


if __name__ == '__main__':
    main()
