"""PPO with a critic, a reward model and a reference on randomwalks: on one trunk in 4 bits, on one in fp32, and with
four separate models.

    python benchmarks/one_card.py --page

docs/results/one_card.md describes the measurement; the task is `randomwalks_task`.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from copy import deepcopy
from functools import partial
from typing import Any

import harness
import randomwalks as walks
import randomwalks_task as rw
import torch

from chatgpt.batching import collate
from chatgpt.data.tokenize import TokenizedPreference
from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.nn.lora import load_lora_state_dict, lora_state_dict
from chatgpt.nn.shared import SharedTrunk
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer import RewardModelTrainer
from chatgpt.trainer.callbacks import Evaluator
from chatgpt.types import Sequence

KINDS = {'nf4': 'one trunk, nf4', 'shared': 'one trunk, fp32', 'separate': 'four models, fp32'}
GRAPH, RANK, LR, KL = 1000, 16, 1e-3, 0.05
SFT_STEPS, REWARD_STEPS, PAIRS, STEPS, BATCH, EVERY = 200, 60, 64, 20, 100, 5


def spoiled(walk: str, rng: random.Random) -> str:
    """Returns the walk with a letter removed or replaced, or with its end cut off."""
    before, after = walk[: (place := rng.randrange(1, len(walk)))], walk[place + 1 :]
    return before + rng.choice((after, rng.choice(rw.LETTERS) + after, ''))


def preferences(task: rw.Task, number: int, seed: int) -> list[Any]:
    """Returns pairs of walks from the same start, the one of higher optimality first."""
    rng = random.Random(seed)
    from_start = defaultdict(list)
    for walk in task.walks:
        from_start[walk[0]].append(walk)
    found: list[Any] = []
    while len(found) < number:
        two = rng.choices(from_start[rng.choice(task.starts)], k=2)
        two = sorted((w if rng.random() < 0.5 else spoiled(w, rng) for w in two), key=task.optimality, reverse=True)
        if min(map(len, two)) > 1 and task.optimality(two[0]) > task.optimality(two[1]):
            answers = rw.sequences(two)
            found.append(
                TokenizedPreference(
                    prompt_ids=answers[0].prompt_ids,
                    responses=[a.response_ids for a in answers],
                    response_masks=[a.response_mask for a in answers],
                )
            )
    return found


def base_model(task: rw.Task, seed: int) -> Any:
    """Returns a small GPT-2 trained on the walks."""
    config = rw.config()
    config.n_layer, config.n_embd, config.n_head = 2, 128, 4
    return rw.learn_walks(task, config, seed, steps=SFT_STEPS, lr=1e-3).model


adam = partial(torch.optim.AdamW, lr=LR, eps=1e-5, weight_decay=0.0)


def trained_reward_model(model: Any, task: rw.Task, seed: int) -> Any:
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        pairs = preferences(task, REWARD_STEPS * PAIRS, seed)
        harness.offline_trainer(
            RewardModelTrainer, strategy, model, pairs, optimizer=adam, train_batch_size=PAIRS
        ).fit()
        return model.requires_grad_(False)


@torch.no_grad()
def accuracy(reward_model: Any, pairs: list[Any]) -> float:
    """Returns the share of pairs in the right order."""

    def scores(place: int) -> torch.Tensor:
        answers = [(p.prompt_ids, p.responses[place], p.response_masks[place]) for p in pairs]
        found: torch.Tensor = reward_model(
            collate([Sequence(prompt_ids=p, response_ids=r, response_mask=m) for p, r, m in answers])
        )
        return found

    return (scores(0) > scores(1)).float().mean().item()


def run(kind: str, seed: int, base: Any, task: rw.Task) -> dict[str, Any]:
    """Returns the reward model's accuracy on new pairs, and the policy's optimality at every evaluation. CPU seconds
    start after the SFT."""
    torch.set_num_threads(1)
    cpu = time.process_time()
    base, tokenizer = deepcopy(base), rw.tokenizer()
    trunk = None if kind == 'separate' else SharedTrunk(base, quantize='nf4' if kind == 'nf4' else None)
    torch.manual_seed(seed)
    reward_model = trunk.reward_model(RANK) if trunk else RewardModel(deepcopy(base), None, RANK)
    reward_model = trained_reward_model(reward_model, task, seed)
    head = deepcopy(reward_model.value_head).requires_grad_(True)
    actor = trunk.actor(RANK) if trunk else Actor(deepcopy(base), RANK)
    critic = trunk.critic(RANK, value_head=head) if trunk else Critic(deepcopy(base), head, RANK)
    load_lora_state_dict(critic.model, lora_state_dict(reward_model.model))
    initial = None if trunk else Actor(base)
    models = [m for m in (actor, critic, reward_model, initial) if m is not None]
    held = harness.stored_bytes(t for m in models for t in (*m.parameters(), *m.buffers()))
    curve = walks.Curve(walks.evaluation(task, tokenizer))
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        trainer = harness.ppo_trainer(
            strategy, actor, critic, reward_model, initial, optimizer=adam, callbacks=[Evaluator(curve, EVERY)],
            tokenizer=tokenizer, experience_batch_size=BATCH, train_batch_size=BATCH, max_new_tokens=rw.MAX_LENGTH - 1,
            max_epochs=1, kl_coef=KL,
        )  # fmt: skip
        trainer.fit(task.starts, 1, STEPS, 1)
    return {
        'accuracy': accuracy(strategy.unwrap(reward_model), preferences(task, 500, seed + 1000)),
        'optimality': [row['score_mean'] for row in curve.rows],
        'held': held,
        'cpu_s': time.process_time() - cpu,
    }


# ---------------------------------------------------------------------- page


def last_two(row: dict[str, Any]) -> float:
    return sum(row['optimality'][-2:]) / 2


def plot(rows: dict[str, dict[str, Any]]) -> None:
    with harness.figure('one_card.png') as (axis,):
        for number, kind in enumerate(KINDS):
            style = {'color': f'C{number}', 'linestyle': ('-', '-', ':')[number], 'linewidth': (1.5, 2.5, 2.5)[number]}
            for i, row in enumerate(rows[kind].values()):
                steps = [EVERY * j for j in range(len(row['optimality']))]
                axis.plot(steps, row['optimality'], label=None if i else KINDS[kind], **style)
        title = 'one line a seed; the two in fp32 lie on each other'
        axis.set(xlabel='optimizer steps of batch 100', ylabel='true optimality', title=title, ylim=(0, 1.02))


def table(rows: dict[str, dict[str, Any]]) -> str:
    found = []
    for kind, name in KINDS.items():
        runs = list(rows[kind].values())
        mean = {k: sum(r[k] for r in runs) / len(runs) for k in ('accuracy', 'held', 'cpu_s')}
        start = sum(r['optimality'][0] for r in runs) / len(runs)
        numbers = [f'{mean["accuracy"]:.3f}', f'{mean["held"] / 2**20:.2f}', f'{mean["cpu_s"]:.0f}']
        found.append([name, len(runs), f'{start:.3f}', harness.mean_and_spread([last_two(r) for r in runs]), *numbers])
    head = ['', 'seeds', 'before PPO', 'last two evaluations: mean (least, greatest)', 'reward model: pairs in order']
    return harness.markdown([*head, 'four models, MiB', 'CPU s'], found)


def main() -> None:
    parser = harness.script_parser(__doc__, 'one_card.md')
    parser.add_argument('--kinds', nargs='*', default=list(KINDS), choices=KINDS)
    parser.add_argument('--seeds', nargs='*', type=int, default=[1, 2, 3])
    args = parser.parse_args()
    results, task = harness.Results('one_card.json'), rw.make_task(GRAPH)
    for seed in args.seeds:
        base = None
        for kind in args.kinds:
            if f'{kind} {seed}' not in results:
                base = base or base_model(task, seed)
                results.measure(f'{kind} {seed}', lambda k=kind, s=seed, b=base: run(k, s, b, task), show=last_two)
    if args.page:
        rows = {kind: {key: run for key, run in results.items() if key.startswith(f'{kind} ')} for kind in KINDS}
        harness.write_page('one_card.md', runs=table(rows))
        plot(rows)


if __name__ == '__main__':
    main()
