"""What benchmarks/environments.py runs: two tasks, five methods and their settings, how long everything is; and which
runs a file of records still lacks. Left out: a run (`environments`), and the page (`environments_page`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.environments.games import TicTacToe
from chatgpt.environments.games.scores import best, random_player, score

Record = dict[str, Any]


# ------------------------------------------------------------------ tasks


class Archive(Environment):
    """A tool whose answer is long: read the file that is asked for, and say which digit stands in it.

        file c          the task
        read c          a call; the tool returns the file, `size` characters
        wpdk7qz...7z
        =7              the answer

    A file is letters, with one digit at `times` places of it; each file has a digit of its own. Reward 1 for the right
    answer; any answer ends the episode. What is neither a call nor an answer is met with a `?`.
    """

    def __init__(self, files: int = 4, size: int = 100, times: int = 8) -> None:
        self.files, self.size, self.times = 'abcdefghij'[:files], size, times

    def reset(self, seed: int, **columns: Any) -> str:
        draws = random.Random(seed)
        self.asked = draws.choice(self.files)
        self.digits = {name: draws.choice('0123456789') for name in self.files}
        self.texts = {}
        self.opened: str | None = None
        for name, digit in self.digits.items():
            text = draws.choices('klmnopqrstuvwxyz', k=self.size)
            for place in draws.sample(range(self.size), self.times):
                text[place] = digit
            self.texts[name] = ''.join(text)
        return f'file {self.asked}\n'

    def step(self, response: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if response.startswith('='):
            right = response == f'={self.digits[self.asked]}'
            return '', float(right), True, False, {'success': right}
        if response.startswith('read ') and response[5:] in self.texts:
            self.opened = response[5:]
            return f'\n{self.texts[self.opened]}\n', 0.0, False, False, {'success': False}
        return '\n?\n', 0.0, False, False, {'success': False}


def random_move(game: TicTacToe, draws: random.Random) -> str:
    return draws.choice(game.moves())


def half_attentive(archive: Archive, draws: random.Random) -> str:
    """Does what is right half of the time, and anything of the same form else."""
    attentive = draws.random() < 0.5
    if archive.opened is None:
        return f'read {archive.asked if attentive else draws.choice(archive.files)}'
    return f'={archive.digits[archive.opened] if attentive else draws.choice("0123456789")}'


def tictactoe_scores() -> str:
    by_chance, at_best = (score('tictactoe', player, first='policy') for player in (random_player(), best))
    return f'A random player wins {by_chance.success:.2f} of the games, the best one {at_best.success:.2f}.'


@dataclass(frozen=True)
class Task:
    title: str
    text: str
    make: Callable[[], Any]
    settings: EnvironmentSettings
    max_new_tokens: int
    teacher: Callable[[Any, random.Random], str]
    """whose turns the warm-up imitates"""
    warm_up: int
    """optimizer steps of it, of 32 episodes each"""
    episodes: int
    """after which methods are compared"""
    known: Callable[[], str]
    """a sentence on what others reach"""
    longer: str = ''
    """another task that this one is, with settings and warm-up of that one"""
    times: int = 1
    """CPU seconds of a run, in those of the budget"""


TASKS = {
    'tictactoe': Task(
        'A game: tic-tac-toe',
        "`games:tictactoe` against a player who moves at random, the policy first. The reward comes at the game's end: 1 "
        'won, 0 drawn, -1 lost; a move that is not allowed costs 0.1, the third loses. Success is a won game. The '
        'warm-up imitates a teacher who makes any allowed move',
        lambda: TicTacToe(first='policy'),
        EnvironmentSettings(max_turns=8, max_turn_tokens=2, num_workers=1),
        128,
        random_move,
        100,
        1600,
        tictactoe_scores,
    ),
    'archive': Task(
        'A tool whose answer is long',
        "`Archive` in the script: the task names one of 4 files, a call `read c` returns the file's 100 characters, and "
        'the answer is the one digit that stands among its letters (at 8 places). The reward is 1 for the right answer '
        'and else 0, a call has none: its credit has to come back over the file. The warm-up imitates a teacher who '
        'does what is right half of the time, in the call and in the answer, and anything of the same form else',
        Archive,
        EnvironmentSettings(max_turns=3, max_turn_tokens=8, num_workers=1),
        160,
        half_attentive,
        80,
        1600,
        lambda: 'Any call with any answer is right in 0.10, the best player in all.',
    ),
}
TASKS['tictactoe_longer'] = replace(
    TASKS['tictactoe'],
    title='The same game, twice as long',
    text='The settings are those above, found in runs of less than a quarter of this length. These runs were made after the others, '
    'when the machine had little else to do. They have the same seeds, so they begin as those do: what fell early there fell here too',
    episodes=3200,
    longer='tictactoe',
    times=2,
)


# ------------------------------------------------------------------ methods


METHODS: dict[str, Record] = {
    'PPO, token credit': {'advantage_estimator': 'gae'},
    'PPO, turn credit': {'advantage_estimator': 'gae', 'gae_over': 'turn'},
    'GRPO': {'advantage_estimator': 'grpo'},
    'RLOO': {'advantage_estimator': 'rloo'},
    'REINFORCE++': {'advantage_estimator': 'reinforce++'},
}
FIRST = next(iter(METHODS))
"""the method that others are compared with"""
RATES = (1e-3, 3e-3)
LAMBDAS = ({'lam': 0.95}, {'lam': 1.0})
GROUPS = ({'num_samples_per_prompt': 4}, {'num_samples_per_prompt': 8})
OWN: dict[str, tuple[Record, Record]] = {
    'PPO, token credit': LAMBDAS,
    'PPO, turn credit': LAMBDAS,
    'GRPO': GROUPS,
    'RLOO': GROUPS,
    'REINFORCE++': ({}, {'advantage_estimator': 'reinforce++_baseline', 'num_samples_per_prompt': 8}),
}
"""two values of what matters most to each method, beside the learning rate"""


@dataclass(frozen=True)
class Budget:
    """How long everything is."""

    tune_cpu_s: float = 7.0
    cpu_s: float = 16.0
    tune_seeds: tuple[int, ...] = (101,)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    phase: int = 64
    """episodes of a learning phase"""
    share: float = 1.0
    """of a task's warm-up and number of episodes"""
    settings: int = 4
    """of each method that are tried"""
    evaluated: int = 128
    """new tasks on which a policy is judged"""


QUICK = Budget(tune_cpu_s=0.0, cpu_s=0.0, seeds=(1, 2), phase=16, share=0.02, settings=1, evaluated=8)


def settings_of(method: str, budget: Budget) -> list[Record]:
    return [{'lr': lr} | own for lr, own in product(RATES, OWN[method])][: budget.settings]


# ------------------------------------------------------------------ which runs


def read(results: Path) -> list[Record]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def key(name: str, method: str, setting: Record, seed: int, compared: bool) -> str:
    return json.dumps([name, method, setting, seed, compared], sort_keys=True)


def key_of(r: Record) -> str:
    return key(r['task'], r['method'], r['setting'], r['seed'], r['compared'])


def tuning(budget: Budget) -> Iterator[tuple[str, str, Record, int]]:
    names = [name for name in TASKS if not TASKS[name].longer]
    for seed, name, number, method in product(budget.tune_seeds, names, range(budget.settings), METHODS):
        yield name, method, settings_of(method, budget)[number], seed


def tuned(records: list[Record], name: str, method: str, budget: Budget) -> list[tuple[float, Record]]:
    """Each setting with its mean success over the tuning seeds, the best first; of equal ones the first of the list.

    Raises:
        ValueError: a run of the tuning is missing.
    """
    found, name = {key_of(r): r for r in records}, TASKS[name].longer or name
    scored = []
    for setting in settings_of(method, budget):
        runs = [found.get(key(name, method, setting, seed, False)) for seed in budget.tune_seeds]
        if None in runs:
            raise ValueError(f'{method} on {name} is not tuned yet: run --tune first')
        scored.append((sum(late_success(r, budget.tune_cpu_s) for r in runs if r) / len(runs), setting))
    return sorted(scored, key=lambda pair: -pair[0])


def late_success(r: Record, cpu_s: float) -> float:
    """Of the training episodes in the last quarter of the CPU seconds; 0 for a run that broke off."""
    late = [row[2] for row in r['rows'] if row[1] >= 0.75 * cpu_s]
    return 0.0 if r['non_finite'] else sum(late) / len(late)


def comparison(records: list[Record], budget: Budget) -> Iterator[tuple[str, str, Record, int]]:
    chosen = {(name, method): tuned(records, name, method, budget)[0][1] for name, method in product(TASKS, METHODS)}
    for longer in (False, True):
        names = [name for name in TASKS if bool(TASKS[name].longer) is longer]
        for seed, name, method in product(budget.seeds, names, METHODS):
            yield name, method, chosen[name, method], seed
    if (other := bootstrapping(records, budget)) is not None:
        for seed in budget.seeds:
            yield 'archive', FIRST, other, seed


def bootstrapping(records: list[Record], budget: Budget) -> Record | None:
    """The best setting of token credit on the archive with a λ below 1, where the tuning took λ = 1, which bootstraps
    nothing; it runs out of competition."""
    scored = tuned(records, 'archive', FIRST, budget)
    if scored[0][1].get('lam', 0) < 1:
        return None
    return next((setting for _, setting in scored if setting['lam'] < 1), None)
