"""Credit over several turns: PPO with token credit and with turn credit beside GRPO, RLOO and REINFORCE++.

    python benchmarks/environments.py --tune       # the runs of the tuning that are missing
    python benchmarks/environments.py --run        # with the settings that it found, those of the comparison
    python benchmarks/environments.py --report     # docs/results/environments.md and its picture, from the runs
    python benchmarks/environments.py --quick      # all three, much shortened, in outputs/environments_quick

Every run is appended to a file (--results) as soon as it is over, so the parts may be done on different days, and runs
that the file holds are not done again. One process, one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.environments.games import TicTacToe
from chatgpt.environments.games.scores import best, random_player, score
from chatgpt.trainer.callbacks import Callback
from chatgpt.types import Prompt, Sequence

ROOT = Path(__file__).resolve().parent.parent
PAD, BOS, EOS = '~', '<', '>'
CHARACTERS = '\n ?=.' + '0123456789' + 'abcdefghijklmnopqrstuvwxyz'
EVALUATION_SEED = 1_000_000
WINDOW = 5
"""phases over which the success of training episodes is averaged"""
MEASURED = (
    'environment/success_share',
    'environment/return_mean',
    'rollout/entropy',
    'environment/observation_share',
)
"""of each phase, behind its episodes and CPU seconds so far"""
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


# ------------------------------------------------------------------ the start


def tokenizer() -> Any:
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate([PAD, BOS, EOS, *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def config(task: Task) -> Any:
    """GPT-2 of 2 layers x 64. Its width asks for larger new weights than GPT-2's 0.02."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=len(CHARACTERS) + 3,
        n_positions=task.max_new_tokens + 32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        initializer_range=0.1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def taught_episode(task: Task, seed: int, words: Any) -> Sequence:
    """An episode of the teacher: his turns are trained on, observations are not."""
    environment, draws = task.make(), random.Random(f'teacher {seed}')
    prompt = words.encode(environment.reset(seed))
    ids, mask = list[int](), list[bool]()
    for _ in range(task.settings.max_turns):
        response = task.teacher(environment, draws)
        turn = [*words.encode(response), words.eos_token_id]
        observation, _, terminated, truncated, _ = environment.step(response)
        ids, mask = ids + turn, mask + [True] * len(turn)
        if terminated or truncated:
            break
        seen = words.encode(observation)
        ids, mask = ids + seen, mask + [False] * len(seen)
    return Sequence(prompt_ids=torch.tensor(prompt), response_ids=torch.tensor(ids), response_mask=torch.tensor(mask))


def warmed_up(name: str, seed: int, budget: Budget, cache: Path) -> tuple[Any, dict[str, float]]:
    """The model that all methods of a seed start from, its CPU seconds, and how good it is; kept in `cache` for the
    other methods."""
    from chatgpt.nn import GPTActor
    from chatgpt.trainer import SFTTrainer
    from chatgpt.trainer.callbacks import ProgressBar
    from chatgpt.trainer.strategies import NaiveStrategy

    task = TASKS[name]
    file = cache / f'{task.longer or name}-{seed}.pt'
    if file.exists():
        kept = torch.load(file, weights_only=True)
        actor = GPTActor(config=config(task))
        actor.load_state_dict(kept['weights'])
        return actor, kept['facts']
    cpu, words = time.process_time(), tokenizer()
    steps = math.ceil(task.warm_up * budget.share)
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor = GPTActor(config=config(task))
        actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=3e-3)))
        records = [taught_episode(task, (1 << 32) * seed + i, words) for i in range(32 * steps)]
        SFTTrainer(
            strategy,
            actor,
            optim,
            records,
            train_batch_size=32,
            max_epochs=1,
            callbacks=[ProgressBar(enabled=False)],
        ).fit()
        bare = strategy.unwrap(actor)
    cpu = time.process_time() - cpu
    facts = {'warm_up_cpu_s': round(cpu, 2), 'start': success_of(task, bare, budget.evaluated)}
    cache.mkdir(parents=True, exist_ok=True)
    torch.save({'weights': bare.state_dict(), 'facts': facts}, file)
    return bare, facts


def success_of(task: Task, actor: Any, count: int) -> float:
    """On so many new tasks, the same for all policies, sampled at temperature 1 as in training."""
    from chatgpt.rollout import LocalEngine, SamplingParams
    from chatgpt.rollout.episodes import EpisodeEngine

    words, numbers = tokenizer(), range(count)
    engine = EpisodeEngine(LocalEngine(), task.make, words, task.settings)
    sampling = SamplingParams(
        max_new_tokens=task.max_new_tokens, eos_token_ids=(words.eos_token_id,), pad_token_id=words.pad_token_id
    )
    engine.begin(actor)
    try:
        prompts = [Prompt(ids=torch.zeros(0, dtype=torch.int64))] * count
        samples = engine.generate(prompts, sampling, seed=EVALUATION_SEED, indices=numbers, groups=numbers)
    finally:
        engine.end()
        engine.close()
    return sum(bool(s.episode.success) for s in samples if s.episode) / count


# ------------------------------------------------------------------ a run


class Course(Callback):
    """What a run has come to after each phase, until it has had both its CPU seconds and its episodes; with
    `evaluated`, how good the policy is at either point. The seconds of that are not counted."""

    def __init__(self, task: Task, cpu_s: float, episodes: int, evaluated: int) -> None:
        self.task, self.evaluated = task, evaluated
        self.ends = {'episodes': episodes, 'cpu_s': cpu_s}
        self.rows: list[list[float]] = []
        self.success: dict[str, float] = {}
        self.uncounted = 0.0
        self.over = False

    def on_fit_start(self, trainer: Any) -> None:
        self.begin = time.process_time()

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        now = {
            'episodes': len(trainer.last_experiences) + (self.rows[-1][0] if self.rows else 0),
            'cpu_s': time.process_time() - self.begin - self.uncounted,
        }
        self.rows.append([*now.values(), *(metrics[name] for name in MEASURED)])
        begin = time.process_time()
        passed = [name for name, end in self.ends.items() if now[name] >= end]
        new = [name for name in passed if name not in self.success]
        if new and self.evaluated:
            actor = trainer.strategy.unwrap(trainer.actor)
            self.success |= dict.fromkeys(new, success_of(self.task, actor, self.evaluated))
        self.uncounted += time.process_time() - begin
        self.over = len(passed) == len(self.ends)
        if self.over:
            trainer.request_stop()


def train(name: str, method: str, setting: Record, seed: int, budget: Budget, cache: Path, *, compared: bool) -> Record:
    """One run: of the tuning, or `compared`."""
    from chatgpt.nn import Critic
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.algorithms import ESTIMATORS
    from chatgpt.trainer.callbacks import Doctor, ProgressBar
    from chatgpt.trainer.step import NonFiniteError
    from chatgpt.trainer.strategies import NaiveStrategy

    task, keywords = TASKS[name], METHODS[method] | setting
    start, facts = warmed_up(name, seed, budget, cache)
    course = (
        Course(task, budget.cpu_s * task.times, math.ceil(task.episodes * budget.share), budget.evaluated)
        if compared
        else Course(task, budget.tune_cpu_s, 0, 0)
    )
    wall, non_finite = time.perf_counter(), ''
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        critic = critic_optim = None
        if ESTIMATORS[keywords['advantage_estimator']].needs_values:
            critic = Critic(deepcopy(start.model))
            critic, critic_optim = strategy.prepare((critic, adam(critic, 1e-3)))
        actor, optim = strategy.prepare((start, adam(start, keywords.pop('lr'))))
        trainer = PPOTrainer(
            strategy,
            actor,
            critic,
            None,
            None,
            optim,
            critic_optim,
            tokenizer=tokenizer(),
            environment=task.make,
            environment_settings=task.settings,
            experience_batch_size=budget.phase // keywords.get('num_samples_per_prompt', 1),
            train_batch_size=budget.phase // 2,
            kl_coef=0.0,
            max_new_tokens=task.max_new_tokens,
            callbacks=[course, ProgressBar(enabled=False), Doctor(enabled=False)],
            **keywords,
        )
        try:
            trainer.fit(max_timesteps=1_000_000, update_timesteps=1)
        except NonFiniteError as error:
            non_finite = str(error)
    if not course.over and not non_finite:
        raise SystemExit('stopped; the run is not kept')
    return {
        'task': name,
        'method': method,
        'setting': setting,
        'seed': seed,
        'compared': compared,
        'success': course.success,
        'rows': [[round(x, 4) for x in row] for row in course.rows],
        'non_finite': non_finite,
        **facts,
        'wall_s': round(time.perf_counter() - wall, 2),
    }


def adam(model: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-5, weight_decay=0.0)


# ------------------------------------------------------------------ all runs


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


def do(
    runs: Iterator[tuple[str, str, Record, int]], results: Path, budget: Budget, cache: Path, compared: bool
) -> None:
    """The runs that the file does not hold, each appended as it ends."""
    torch.set_num_threads(1)
    done = {key_of(r) for r in read(results)}
    results.parent.mkdir(parents=True, exist_ok=True)
    for name, method, setting, seed in runs:
        if key(name, method, setting, seed, compared) in done:
            continue
        r = train(name, method, setting, seed, budget, cache, compared=compared)
        with results.open('a') as file:
            file.write(json.dumps(r) + '\n')
        late = sum(row[2] for row in r['rows'][-WINDOW:]) / max(len(r['rows'][-WINDOW:]), 1)
        print(
            f'{name} {method} {setting} seed {seed}: success {late:.2f} in the last phases, {r["success"]}, '
            f'{r["rows"][-1][0] if r["rows"] else 0:.0f} episodes, wall {r["wall_s"]:.0f} s {r["non_finite"]}',
            flush=True,
        )


# ------------------------------------------------------------------ the page


T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantile of Student's t, by the number of values"""


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its 95 % interval by Student's t over seeds."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    variance = sum((x - mean) ** 2 for x in values) / (len(values) - 1)
    half = T_95[len(values)] * math.sqrt(variance / len(values))
    return mean, mean - half, mean + half


def shares(values: list[float]) -> str:
    """Of successes: the interval is cut at 0 and 1."""
    mean, low, high = interval(values)
    return f'{mean:.2f} ({max(low, 0):.2f}, {min(high, 1):.2f})'


def averaged(r: Record) -> list[float]:
    """Success of training episodes up to each phase, over the last `WINDOW` phases of them."""
    success = [row[2] for row in r['rows']]
    return [sum(part) / len(part) for i in range(len(success)) if (part := success[max(0, i + 1 - WINDOW) : i + 1])]


def collapse(r: Record) -> str:
    """How a run collapsed; empty where it did not."""
    if r['non_finite']:
        return 'not finite'
    success, entropy = averaged(r), [row[4] for row in r['rows'][-WINDOW:]]
    if success[-1] < 0.5 * max(success):
        return 'fell'
    if sum(entropy) / len(entropy) < 0.01 and success[-1] < 0.5:
        return 'stuck'
    fell = any(now < 0.5 * max(success[: i + 1]) for i, now in enumerate(success))
    return 'fell and came back' if fell else ''


def named(setting: Record) -> str:
    words = {'lam': 'λ', 'num_samples_per_prompt': 'groups of'}
    parts = [f'{words.get(name, name)} {value:g}' for name, value in setting.items() if name != 'advantage_estimator']
    return ', '.join([*parts, *(['baseline of the group'] if 'advantage_estimator' in setting else [])])


def number(count: float) -> str:
    return f'{count:,.0f}'


def on_the_way(r: Record, column: int, end: float) -> float:
    """Mean success of the training episodes up to so many episodes (column 0) or CPU seconds (column 1)."""
    total = before = 0.0
    for row in r['rows']:
        total += row[2] * (min(row[column], end) - before)
        before = min(row[column], end)
    return total / end if end else r['rows'][0][2]


def measures(r: Record, episodes: int, cpu_s: float) -> list[float]:
    """Of a run: success at both points, and on the way to both."""
    ends = [r['success'].get(point, 0.0) for point in ('episodes', 'cpu_s')]
    return [*ends, on_the_way(r, 0, episodes), on_the_way(r, 1, cpu_s)]


def task_lines(name: str, runs: dict[str, list[Record]], budget: Budget) -> list[str]:
    task, episodes = TASKS[name], math.ceil(TASKS[name].episodes * budget.share)
    cpu_s = budget.cpu_s * task.times
    of_episodes, of_cpu_s = f'{number(episodes)} episodes', f'{cpu_s:g} CPU s'
    titles = [f'after {of_episodes}', f'after {of_cpu_s}', f'on the way, {of_episodes}', f'on the way, {of_cpu_s}']
    every = [r for found in runs.values() for r in found]
    starts = {r['seed']: r['start'] for r in every}
    observed = sum(r['rows'][0][5] for r in every) / len(every)
    lines = [
        f'## {task.title}',
        '',
        f'{task.text}. {task.known()} Observations are {observed:.0%} of a response at the start, where the models of the '
        f'{len(starts)} seeds have a success of {shares(list(starts.values()))}.',
        '',
        f'| method | tuned | {" | ".join(titles)} | CPU s of {of_episodes} | episodes in {of_cpu_s} | collapses |',
        '|' + '---|' * 9,
    ]
    measured = {method: [measures(r, episodes, cpu_s) for r in found] for method, found in runs.items()}
    for method, found in runs.items():
        took = [next((row[1] for row in r['rows'] if row[0] >= episodes), math.nan) for r in found]
        had = [next((row[0] for row in r['rows'] if row[1] >= cpu_s), math.nan) for r in found]
        collapsed = [kind for r in found if (kind := collapse(r))]
        kinds = ', '.join(f'{kind} {collapsed.count(kind)}' for kind in sorted(set(collapsed)))
        kinds = f' ({kinds})' if kinds else ''
        cells = [
            method,
            named(found[0]['setting']),
            *(shares(list(values)) for values in zip(*measured[method], strict=True)),
        ]
        cells += [
            f'{sum(took) / len(took):.1f}',
            number(sum(had) / len(had)),
            f'{len(collapsed)} of {len(found)}{kinds}',
        ]
        lines.append('| ' + ' | '.join(cells) + ' |')
    lines += ['', f'Difference from {FIRST}, seed by seed:', '']
    lines += [f'| method | {" | ".join(titles)} |', '|' + '---|' * 5]
    sides: list[dict[str, list[str]]] = [{'better': [], 'worse': [], 'the interval holds 0': []} for _ in titles]
    for method in list(runs)[1:]:
        cells = [method]
        for i, side in enumerate(sides):
            mean, low, high = interval([a[i] - b[i] for a, b in zip(measured[method], measured[FIRST], strict=True)])
            side['better' if low > 0 else 'worse' if high < 0 else 'the interval holds 0'].append(method)
            cells.append(f'{mean:+.2f} ({low:+.2f}, {high:+.2f})')
        lines.append('| ' + ' | '.join(cells) + ' |')
    lines += ['', f'Beside {FIRST}:', '']
    for title, side in zip(titles, sides, strict=True):
        lines.append(f'- {title}: ' + '; '.join(f'{text}: {", ".join(side[text]) or "none"}' for text in side) + '.')
    return [*lines, '']


def bootstrapping_lines(records: list[Record], budget: Budget) -> list[str]:
    other, episodes = bootstrapping(records, budget), math.ceil(TASKS['archive'].episodes * budget.share)
    keys = {key('archive', FIRST, other, seed, True) for seed in budget.seeds} if other is not None else set()
    runs = [r for r in records if key_of(r) in keys]
    if other is None or not runs:
        return []
    after, _, on_way, _ = (shares(list(v)) for v in zip(*(measures(r, episodes, 0) for r in runs), strict=True))
    return [
        f'The tuning took λ = 1 for {FIRST}, with which a value is a baseline and nothing is bootstrapped. Out of '
        f'competition, with its best setting below that ({named(other)}; {len(runs)} seeds), which bootstraps across the '
        f'file: {after} after {number(episodes)} episodes, and {on_way} on the way. (These runs were made later, when CPU '
        'seconds were worth more, so they are not compared by those.)',
        '',
    ]


def tuning_lines(records: list[Record], budget: Budget) -> list[str]:
    names = [name for name in TASKS if not TASKS[name].longer]
    lines = [f'| method | {" | ".join(names)} |', '|' + '---|' * (len(names) + 1)]
    for method in METHODS:
        cells = [method]
        for name in names:
            scored = tuned(records, name, method, budget)
            cells.append('; '.join(f'{named(setting)}: {value:.2f}' for value, setting in scored))
        lines.append('| ' + ' | '.join(cells) + ' |')
    return lines


def report(results: Path, out: Path, budget: Budget) -> None:
    """The page and its picture, of the seeds that all methods have."""
    records = read(results)
    found = {key_of(r): r for r in records}
    compared: dict[str, dict[str, list[Record]]] = {}
    for name in TASKS:
        chosen = {method: tuned(records, name, method, budget)[0][1] for method in METHODS}
        keys = {seed: [key(name, m, chosen[m], seed, True) for m in METHODS] for seed in budget.seeds}
        seeds = [seed for seed in budget.seeds if all(k in found for k in keys[seed])]
        if seeds:
            compared[name] = {m: [found[keys[seed][i]] for seed in seeds] for i, m in enumerate(METHODS)}
    picture(compared, out, budget)
    warm_ups = {(TASKS[r['task']].longer or r['task'], r['seed']): r['warm_up_cpu_s'] for r in records}
    spent = {flag: sum(r['rows'][-1][1] for r in records if r['compared'] is flag) for flag in (False, True)}
    wall = sum(r['wall_s'] for r in records)
    values = {
        'phase': budget.phase,
        'batch': budget.phase // 2,
        'evaluated': budget.evaluated,
        'tune_s': f'{budget.tune_cpu_s:g}',
        'tune_seeds': f'the same {len(budget.tune_seeds)} seeds'
        if len(budget.tune_seeds) > 1
        else 'one seed, the same for all,',
        'settings': budget.settings,
        'tune_all': number(spent[False]),
        'runs_all': number(spent[True]),
        'warm_up': f'{min(warm_ups.values()):.0f} to {max(warm_ups.values()):.0f}',
        'wall': number(wall / 60),
        'window': WINDOW * budget.phase,
    }
    lines = [INTRODUCTION.format(**values), f'![Success over training]({out.stem}.png)', '']
    lines += [CONCLUSIONS] if budget == Budget() else []
    for name, runs in compared.items():
        lines += task_lines(name, runs, budget)
        if name == 'archive':
            lines += bootstrapping_lines(records, budget)
    lines += [PROTOCOL.format(**values), *tuning_lines(records, budget), '', LIMITS.format(**values)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text('\n'.join(lines))


def picture(compared: dict[str, dict[str, list[Record]]], out: Path, budget: Budget) -> None:
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(
        len(compared), 2, figsize=(11, 3.8 * len(compared)), squeeze=False, sharey='row', constrained_layout=True
    )
    for (name, runs), row in zip(compared.items(), axes, strict=True):
        task = TASKS[name]
        ends = (math.ceil(task.episodes * budget.share), budget.cpu_s * task.times)
        for column, (axis, end) in enumerate(zip(row, ends, strict=True)):
            for i, (method, found) in enumerate(runs.items()):
                grid = np.linspace(0, max(end, 1e-9), 100)
                curves = [
                    np.interp(grid, [0, *(point[column] for point in r['rows'])], [r['start'], *averaged(r)])
                    for r in found
                ]
                axis.fill_between(grid, np.min(curves, 0), np.max(curves, 0), color=f'C{i}', alpha=0.1, linewidth=0)
                axis.plot(grid, np.mean(curves, 0), color=f'C{i}', label=method)
            axis.set(xlabel=('episodes', 'CPU seconds')[column], title=task.title, ylim=(0, 1.02))
            axis.grid(alpha=0.3)
        row[0].set_ylabel('success, mean of seeds; least to greatest')
        row[0].legend(loc='lower right', fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out.with_suffix('.png'), dpi=80)
    plt.close(figure)


INTRODUCTION = """# Credit over several turns

`python benchmarks/environments.py --tune`, then `--run` and `--report`. A critic can say which turn of an episode was good; methods
that compare whole episodes cannot. Is that worth what a critic costs? PPO with token credit (GAE over tokens) and with turn credit
(`gae_over='turn'`) beside GRPO, RLOO and REINFORCE++, on a game of several turns whose reward comes at the end, and on a tool whose
answer is most of the response. Success *after* so many episodes or CPU seconds is that of {evaluated} new tasks, the same for all, sampled at
temperature 1; *on the way* there it is the mean over the training episodes (over their CPU seconds), which says who learns sooner.
Intervals are of 95 %, by Student's t over the seeds. The curves are of the last {window} training episodes, so they lag behind,
and those of methods that draw groups are of fewer tasks, so they are rougher.
"""
CONCLUSIONS = """## What came out

- **Token or turn credit: no difference that these runs could show.** On the game token credit is ahead by 0.01 to 0.08, on the tool turn credit
  by 0.02 after 1,600 episodes; of the twelve intervals only that last one leaves out 0, and barely. Nor did it matter on the tool whether
  token credit bootstraps across the long observation (λ 0.95) or not (λ 1).
- **With a critic an episode took 1.3 to 1.4 times the CPU seconds on the game, and 1.7 times on the tool**, so in equal seconds methods that
  compare episodes learn from that many more.
- **At equal episodes** nothing was better than PPO with token credit but turn credit by its 0.02. RLOO was behind it on the game, RLOO and
  GRPO on the way of the longer runs, REINFORCE++ on the way of the tool.
- **At equal CPU seconds** the critic did not pay on the tool: GRPO and REINFORCE++ learned sooner, by 0.05 and 0.04 on the way, and REINFORCE++
  was 0.03 better at the end. On the game nothing can be told apart.
- **Collapses**, of 75 runs: RLOO fell once for good, on the tool. The steps of its first phase unlearned the call, every reward was 0 from then
  on, and a group whose rewards are equal teaches nothing. REINFORCE++ fell twice in the longer runs and came back; PPO with turn credit and
  GRPO in one seed each, which shows in the short and in the long runs. PPO with token credit did not fall.
- **The game was not learned to the end.** A random player of allowed moves wins 0.59; the short runs end at 0.50 to 0.68, so most of what
  they learned is which moves are allowed. After 32 CPU seconds it is 0.66 to 0.73, and the best player wins nearly all.
"""
"""of the runs in benchmarks/results: new runs need a new text"""
PROTOCOL = """## How it was done

- **Start.** GPT-2 of 2 layers x 64 (0.11 M parameters) with new weights, one token a character, which first imitates the task's teacher
  for {warm_up} CPU seconds. All methods of a seed start from the same weights; the critic of PPO is a copy of them with a new value head.
- **Runs.** Phases of {phase} episodes in train batches of {batch}, one pass, AdamW; the critic's rate 0.001, which was not tuned, no KL, the
  rest as `PPOConfig` has it. Group methods draw fewer tasks, each several times, so that their phases have {phase} episodes too.
- **CPU seconds** are the process's own (`time.process_time`), of one thread: playing, environments, scoring and learning; without
  imports, warm-up and judging.
- **Equal effort.** Each method has {settings} settings: 2 learning rates x 2 values of what matters most to it (λ of GAE; the size of the
  groups; for REINFORCE++ whether the group's mean is its baseline). Each setting ran on {tune_seeds} for {tune_s} CPU
  seconds, and the one with the most success in the training episodes of the last quarter was taken. The grid and this
  rule were fixed before, and the seeds of the comparison were not used. Number and length of the runs were cut to the time there was
  (one seed of the tuning for two), by the clock and before any run of the comparison. Success *on the way* was added after the tuning, the
  longer runs and those out of competition when the others were known.
- **The tasks** are two that PPO with turn credit, on another seed, learned in 15 CPU seconds. Guess-the-word, and the archive after a
  teacher who never looks into the file, it did not learn, and they were dropped before the tuning.
- **Collapse**, of training episodes: a loss or gradient that is not finite; *fell*, success over the last {window} episodes is below half of the
  run's best; *stuck*, entropy below 0.01 nats a token there with success below 0.5; *fell and came back*, below half of the best so far on
  the way but not at the end (counted since it was seen; the others were fixed before). A run that broke off has 0 in the tables.
- **Spent**: {tune_all} CPU seconds on the tuning, {runs_all} on the comparison, in {wall} minutes of wall time of all runs: the two cores were shared
  with other work, which makes CPU seconds longer too. Methods took turns seed by seed, so that it met all of them.

Settings, with the success that the choice was made by, the chosen first:
"""
LIMITS = """## What this does not show

- Anything about large models: where generating takes most of the time, a critic costs a smaller share of it.
- Which method is best in the end: runs are short, and none was trained until it stopped improving.
- What a critic is worth where it is tuned as well: its learning rate, the clip ranges and the passes over a phase were not.
- Small differences: of these 48 intervals of 95 %, two or three leave out the truth by chance, and of two settings that are close
  the tuning may have taken the worse, for any method.
- Tasks of many turns: these have up to 8.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tune', action='store_true')
    parser.add_argument('--run', action='store_true')
    parser.add_argument('--report', action='store_true')
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--results', type=Path, default=ROOT / 'benchmarks' / 'results' / 'environments.jsonl')
    parser.add_argument('--cache', type=Path, default=ROOT / 'outputs' / 'environments', help='models of the warm-up')
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'environments.md')
    args = parser.parse_args()
    if not (args.tune or args.run or args.report or args.quick):
        parser.error('say what to do: --tune, --run, --report or --quick')
    budget, results, cache, out = Budget(), args.results, args.cache, args.out
    if args.quick:
        budget, folder = QUICK, ROOT / 'outputs' / 'environments_quick'
        results, cache, out = folder / 'runs.jsonl', folder, folder / 'environments.md'
    if args.tune or args.quick:
        do(tuning(budget), results, budget, cache, False)
    if args.run or args.quick:
        do(comparison(read(results), budget), results, budget, cache, True)
    if args.report or args.quick:
        report(results, out, budget)


if __name__ == '__main__':
    main()
