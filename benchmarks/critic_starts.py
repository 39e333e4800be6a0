"""Compares PPO's critics by their start on a lake where the initial policy wins four games in ten, and measures how much of
a return's variance any critic could explain.

    python benchmarks/critic_starts.py
    python benchmarks/critic_starts.py --page

The lake is that of `critic.py`. The initial policy imitates a player that takes the best move with probability 0.6 and a
random one else. The critic is new, after a warm-up, or saved: learned from 8, 32 or 128 recorded phases of 64 games of the
initial policy. It learns returns with λ = 1 throughout (VC-PPO). Every start has the same six trials with one seed: two
learning rates of the actor and three λ of its advantages. The best trial, by the mean score of its first 1,024 games, is
repeated with five other seeds.

The value function of a policy follows from the rules of the game and the policy's moves by dynamic programming: its
explained variance is the highest that a critic can expect, for it is the mean of the return in each state.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from itertools import product
from typing import Any

import critic as lake
import harness
import torch
from critic import LAKE, MOVES, SEEDS, SLIP, TURNS, Lake, moved

from chatgpt.batching import collate
from chatgpt.functional.ppo import explained_variance, gae
from chatgpt.nn import Actor, Critic
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer import CriticTrainer, returned
from chatgpt.types import Sample

RECORDS = 'critic_starts.json'
SKILL = 0.6
"""probability of the best move"""
GOAL = 0.65
"""a mean score of three phases: six tenths of the way from the player to the best one, as that of `critic.GOALS` is from random moves"""
EPISODES, TRIAL_EPISODES, HELD_OUT = 2048, 1024, 2048
LAMS = (0.95, 0.8, 0.5)
STEPS = (1, 3, 6, 12)
"""phases of the actor whose explained variance the page shows"""
PHASES = {8: 8, 32: 4, 128: 2}
"""recorded phases -> passes over them"""
KINDS: dict[str, dict[str, Any]] = {
    'new': {'critic': 'own'},
    'warm-up of 2 phases': {'critic': 'own', **lake.WARM},
} | {f'saved, {n} phases': {'saved': lambda task, seed, n=n: deepcopy(learned(seed, n))} for n in PHASES}
RANDOM, SKILLED = 'random moves', 'better moves'
Policy = Callable[[int, int, list[float]], list[float]]
"""(cell, moves left, worth of each move) -> probabilities"""


# ---------------------------------------------------------------- the value function

CHOICES = [*MOVES, '']
"""moves, and what is no move"""


@cache
def after(cell: int, move: str) -> dict[int, float]:
    """Returns the probabilities of the cells after a move."""
    found: Counter[int] = Counter({moved(cell, move): 1 - SLIP})
    for each in MOVES:
        found[moved(cell, each)] += SLIP / len(MOVES)
    return found


def solved(policy: Policy) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int, str], float]]:
    """Returns the probability to win at (cell, moves left), and at (cell, moves left, chosen move)."""
    values, of_moves = {(cell, 0): 0.0 for cell in range(len(LAKE))}, {}

    def worth(cell: int, left: int) -> float:
        return {'G': 1.0, 'o': 0.0}.get(LAKE[cell], values[cell, left])

    for left, cell in product(range(1, TURNS + 1), range(len(LAKE))):
        own = [sum(p * worth(to, left - 1) for to, p in after(cell, move).items()) for move in CHOICES]
        of_moves |= {(cell, left, move): each for move, each in zip(CHOICES, own, strict=True)}
        values[cell, left] = sum(p * q for p, q in zip(policy(cell, left, own), own, strict=True))
    return values, of_moves


@cache
def best() -> dict[tuple[int, int], str]:
    """Returns the best move at (cell, moves left)."""
    _, worth = solved(lambda cell, left, own: [float(i == own.index(max(own))) for i in range(len(own))])
    keys = product(range(len(LAKE)), range(1, TURNS + 1))
    return {(cell, left): max(MOVES, key=lambda move: worth[cell, left, move]) for cell, left in keys}


def player(game: Lake, draws: random.Random) -> str:
    return best()[game.cell, game.left] if draws.random() < SKILL else lake.at_random(game, draws)


@cache
def task_of(name: str) -> lake.Task:
    return lake.lake_task(player if name == SKILLED else lake.at_random)


def turns(game: Sample, words: Any) -> list[tuple[int, int, int, list[str]]]:
    """Returns the position of each turn's first token, the cell and the moves left before it, and the words of its tokens."""
    found, cell = [], int(words.decode(game.prompt_ids[-1:])[1:])
    for number, turn in enumerate(game.episode.turns):
        if number:
            cell = int(words.decode(game.response_ids[turn.start - 1 : turn.start])[1:])
        said = words.convert_ids_to_tokens(game.response_ids[turn.start : turn.stop].tolist())
        found.append((turn.start, cell, TURNS - number, said))
    return found


def true_values(games: list[Sample], words: Any) -> list[torch.Tensor]:
    """Returns the probability to win before each token, for the policy of the games; (A,) each."""
    counts: dict[tuple[int, int], Counter[str]] = {}
    chosen = [
        [(at, cell, left, said[0] if said[0] in MOVES else '') for at, cell, left, said in turns(game, words)]
        for game in games
    ]
    for _, cell, left, move in (turn for game in chosen for turn in game):
        counts.setdefault((cell, left), Counter())[move] += 1

    def policy(cell: int, left: int, own: list[float]) -> list[float]:
        seen = counts.get((cell, left), Counter(CHOICES))
        return [seen[move] / seen.total() for move in CHOICES]

    values, of_moves = solved(policy)
    found = []
    for game, moves in zip(games, chosen, strict=True):
        own = torch.zeros(len(game.response_ids))
        for at, cell, left, move in moves:
            own[at], own[at + 1 : at + 2] = values[cell, left], of_moves[cell, left, move]
        found.append(own * game.response_mask)
    return found


# ---------------------------------------------------------------- critics from recorded games


@cache
def games(name: str, seed: int, count: int, draws: int) -> list[Sample]:
    """Returns games of a task's initial policy."""
    task = task_of(name)
    with NaiveStrategy(seed=seed, device='cpu'):
        return [
            s for at in range(0, count, 512) for s in task.play(Actor(task.start(seed)), min(512, count), draws + at)
        ]


def rewards(games: list[Sample]) -> list[torch.Tensor]:
    found = [torch.zeros(len(game.response_ids)) for game in games]
    for own, game in zip(found, games, strict=True):
        own[game.response_mask.nonzero()[-1]] = float(game.episode.success)
    return found


@cache
def learned(seed: int, phases: int, name: str = SKILLED) -> Critic:
    """Returns a critic that has learned from recorded phases of the initial policy, other games than those of a run."""
    task, own = task_of(name), games(name, seed, 64 * phases, 10_000_000)
    with NaiveStrategy(seed=seed + 100, device='cpu') as strategy:
        trainer = harness.offline_trainer(
            CriticTrainer, strategy, lake.critic_of(task.start(seed), {}, seed), returned(own, rewards(own)),
            optimizer=partial(torch.optim.AdamW, lr=task.critic_rate, weight_decay=0.0, eps=1e-5),
            train_batch_size=32, max_epochs=PHASES[phases], lr_schedule='linear',
        )  # fmt: skip
        trainer.fit()
        found: Critic = strategy.unwrap(trainer.model)
        return found


def explained(values: list[torch.Tensor], own: list[Sample]) -> dict[str, float]:
    """Returns the explained variance of values by the λ of the returns, as the trainer computes it."""
    masks, found = [game.response_mask for game in own], {}
    for lam in (1.0, lake.LAM):
        _, returns = gae(rewards(own), values, masks, lam=lam)
        found[f'{lam:g}'] = float(explained_variance(torch.cat(values), torch.cat(returns), torch.cat(masks)))
    return found


def values_of(critic: Critic, own: list[Sample]) -> list[torch.Tensor]:
    parts = [own[at : at + 64] for at in range(0, len(own), 64)]
    with torch.no_grad():
        flat = torch.cat([critic(collate(part)) for part in parts])
    return list(flat.split([len(game.response_ids) for game in own]))


def limits(name: str, seed: int) -> dict[str, Any]:
    """Returns the share of games won, and the explained variance of the true values and of saved critics on held-out games."""
    own, task = games(name, seed, HELD_OUT, 90_000_000), task_of(name)
    found = {'won': statistics.mean(rewards_of.sum().item() for rewards_of in rewards(own))}
    found['any critic'] = explained(true_values(own, task.tokenizer), own)
    for phases in PHASES if name == SKILLED else [8]:
        found[f'saved, {phases} phases'] = explained(values_of(learned(seed, phases, name), own), own)
    return found


# ---------------------------------------------------------------- runs


def measure(results: harness.Results, kind: str, lam: float, lr: float, seed: int) -> Any:
    """Returns the record of a run, which runs if there is none. Seed 0 is that of the trials."""
    episodes = EPISODES if seed in SEEDS else TRIAL_EPISODES
    more = {'lam': lam, 'value_lam': 1.0} | KINDS[kind]
    return results.measure(
        f'{kind}, lam {lam:g}, lr {lr:g}, seed {seed}',
        lambda: {'lam': lam} | lake.train(task_of(SKILLED), 'ppo', kind, lr, seed, 0.0, episodes, **more),
        lambda found: f'{on_the_way(found):.3f}',
    )


def on_the_way(record: dict[str, Any]) -> float:
    return lake.on_the_way(record, 'episodes', TRIAL_EPISODES)


def compare(results: harness.Results) -> None:
    torch.set_num_threads(1)
    for name, seed in product((RANDOM, SKILLED), SEEDS):
        results.measure(f'limits, {name}, seed {seed}', partial(limits, name, seed))
    for kind in KINDS:
        measured = [measure(results, kind, *trial, 0) for trial in product(LAMS, task_of(SKILLED).rates)]
        trial = max(measured, key=on_the_way)
        for seed in SEEDS:
            measure(results, kind, trial['lam'], trial['lr'], seed)


# ---------------------------------------------------------------- the page


def page(results: harness.Results) -> None:
    found = {key: [r for r in results.values() if r.get('kind') == key and r['seed'] in SEEDS] for key in KINDS}
    found = {kind: own for kind, own in found.items() if len(own) == len(SEEDS)}
    until = {kind: [lake.until(r, GOAL) for r in own] for kind, own in found.items()}
    scores = {kind: [on_the_way(r) for r in own] for kind, own in found.items()}
    rows = []
    for kind, own in found.items():
        waits = KINDS[kind].get('critic_warmup_phases', 0)
        row = [kind, f'λ {own[0]["lam"]:g}, lr {own[0]["lr"]:g}', harness.mean_and_spread(until[kind], '.0f')]
        shares = [1 - a / b for a, b in zip(until[kind], until['new'], strict=True)]
        row += [harness.interval(shares, [0.0] * len(own)) if kind != 'new' else '']
        row += [harness.mean_and_spread(scores[kind])]
        row += [harness.interval(scores[kind], scores['new']) if kind != 'new' else '']
        for step in STEPS:
            explained = [lake.phases(r)[waits + step - 1]['explained_variance'] for r in own]
            row.append(f'{statistics.mean(explained):.2f}')
        rows.append(row)
    head = ['critic', 'best trial', f'games to a mean score of {GOAL}', 'share saved', 'mean score of 1,024 games']
    head += ['ahead of a new one by', *(f'explained variance, actor phase {step}' for step in STEPS)]
    harness.write_page('critic.md', skilled=harness.markdown(head, rows), limits=limits_table(results))


def limits_table(results: harness.Results) -> str:
    rows = []
    for name in (RANDOM, SKILLED):
        own = [results[f'limits, {name}, seed {seed}'] for seed in SEEDS]
        for key in list(own[0])[1:]:
            row = [name, harness.mean_and_spread([each['won'] for each in own], '.2f'), key]
            rows.append(row + [harness.mean_and_spread([each[key][lam] for each in own], '.2f') for lam in own[0][key]])
    return harness.markdown(['imitated', 'games won', 'critic', 'λ = 1', f'λ = {lake.LAM:g}'], rows)


def main() -> None:
    args = harness.script_parser(__doc__, page='critic.md').parse_args()
    results = harness.Results(RECORDS)
    page(results) if args.page else compare(results)


if __name__ == '__main__':
    main()
