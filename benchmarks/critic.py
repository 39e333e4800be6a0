"""Compares PPO and its critic with critic-free methods at equal episodes and equal CPU seconds, on three tasks.

    python benchmarks/critic.py lake                                 # tunes, then compares; what is on file is not repeated
    python benchmarks/critic.py sums --start FOLDER                  # of SmolLM2: examples/real_model/model.py
    python benchmarks/critic.py additions --start FOLDER --prompts FILE --held_out FILE
    python benchmarks/critic.py --page                               # the page of earlier measurements

lake: a slippery lake of 5 x 5 cells with holes, after FrozenLake of Gymnasium. The policy moves up to twelve times,
each move goes astray with probability 0.2, and it gets 1 at the end if it has reached the goal, else 0. A GPT-2 of
2 layers x 64 first imitates random moves. sums: the task of `sums.py`. additions: SmolLM2 after two epochs of SFT on the
files of `examples/real_model/additions.py --files FOLDER --digits 3`; 1 for a right sum. Of SmolLM2 the top eight
blocks learn.

Each method has six trials with one seed: two learning rates, and three kinds of critic or group. The trial with the
highest mean score over its run is repeated with five other seeds. CPU seconds are those of the process, the critic's
warm-up included, without evaluations. Every method takes 64 episodes a phase, two epochs and train batches of 32.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import harness
import sums
import torch

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.nn import Actor, AutoActor, Critic
from chatgpt.nn.heads import CategoricalHead
from chatgpt.nn.hydra import freeze_below
from chatgpt.nn.trunk import hidden_size
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer import PromptEvaluation, SFTTrainer
from chatgpt.trainer.callbacks import Callback, Doctor
from chatgpt.types import Prompt, Sample, Sequence

SEEDS, EPISODES, EPOCHS = (1, 2, 3, 4, 5), 64, 2
TURNS, NEW_TOKENS = 12, 16
RECORDS = 'critic.json'
COLUMNS = ('cpu_s', 'episodes', 'score', 'explained_variance')
SIDE, SLIP = 5, 0.2
LAKE = '.....' + '.o.o.' + '...o.' + 'o....' + '..o.G'
"""cells row by row: ice, holes and the goal"""
MOVES = {'n': (-1, 0), 's': (1, 0), 'w': (0, -1), 'e': (0, 1)}
WARM = {'critic_warmup_phases': 2, 'critic_epochs': 4, 'critic_train_batch_size': 16}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    'ppo': {
        'shared trunk': {'critic': 'shared'},
        'own, warm-up': {'critic': 'own', **WARM},
        'own, warm-up, categorical': {
            'critic': 'own',
            **WARM,
            'critic_loss': 'categorical',
            'critic_loss_settings': {'low': -0.5, 'high': 1.5, 'bins': 51},
        },
    },
    'grpo': {f'groups of {n}': {'num_samples_per_prompt': n} for n in (4, 8, 16)},
    'rloo': {f'groups of {n}': {'num_samples_per_prompt': n} for n in (4, 8, 16)},
    'reinforce++': {'no groups': {}}
    | {f'groups of {n}': {'num_samples_per_prompt': n, 'advantage_estimator': 'reinforce++_baseline'} for n in (4, 8)},
}
"""method -> kind of critic or group -> settings; with two learning rates each, the trials of a method"""
STARTS = {
    'own, new': {'critic': 'own'},
    'own, warm-up of 2 phases': {'critic': 'own', **WARM},
    'own, saved': {'saved': lambda task, seed: saved_critic(task, seed)},
}
"""critics whose start is compared: the saved one has learned from 8 phases of the initial policy"""
GOALS = {'lake': (0.5, 2048), 'sums': (0.3, 768)}
"""task -> a mean score of three phases, until which the episodes of each start are compared, and the episodes of a run"""
LAM = 0.95


def moved(cell: int, move: str) -> int:
    """Returns the cell after a move that does not go astray; the cell itself for what is no move."""
    down, right = MOVES.get(move, (0, 0))
    row, column = divmod(cell, SIDE)
    return min(max(row + down, 0), SIDE - 1) * SIDE + min(max(column + right, 0), SIDE - 1)


class Lake(Environment):
    """From a random cell to the goal, past the holes; the reward comes at the end."""

    def reset(self, seed: int, **columns: Any) -> str:
        self.random, self.left = random.Random(seed), TURNS
        self.cell = self.random.choice([i for i, kind in enumerate(LAKE) if kind == '.'])
        return f'c{self.cell}'

    def step(self, response: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        move = response.strip()
        if self.random.random() < SLIP:
            move = self.random.choice(list(MOVES))
        self.cell = moved(self.cell, move)
        found = LAKE[self.cell] == 'G'
        over = found or LAKE[self.cell] == 'o' or not self.left
        return f'c{self.cell}', float(found), over, False, {'success': found}


@dataclass
class Task:
    """A task: the model that a run begins with, by seed; the trainer's settings; and the held-out score."""

    start: Callable[[int], Any]
    tokenizer: Any
    settings: dict[str, Any]
    score: Callable[[Any], float]
    rates: tuple[float, float]
    critic_rate: float
    tune_s: float
    """CPU seconds of a trial"""
    compare_s: float
    episodes: int
    """of a run that is compared: its CPU seconds and its episodes, whichever end later"""
    prompts: Any = None
    reward: Any = None
    blocks: int = 0
    """number of top blocks that learn; 0: all"""
    play: Any = None
    """(actor, count, seed) -> samples"""
    train_batch: int = 32
    precision: Any = 'fp32'


# ---------------------------------------------------------------- the two tasks


def lake_tokenizer() -> Any:
    """Returns a tokenizer with a token for each move and each cell."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ['<pad>', '<end>', *MOVES, *(f'c{i}' for i in range(len(LAKE)))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='<pad>'))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token='<pad>', eos_token='<end>')


Player = Callable[[Lake, random.Random], str]
"""chooses a move"""


def at_random(game: Lake, draws: random.Random) -> str:
    return draws.choice(list(MOVES))


def imitated(seed: int, words: Any, player: Player) -> Sequence:
    """Returns an episode of a player."""
    game, draws = Lake(), random.Random(f'player {seed}')
    prompt = words.encode(game.reset(seed))
    ids: list[int] = []
    mask: list[bool] = []
    for _ in range(TURNS):
        move = player(game, draws)
        cell, _, over, _, _ = game.step(move)
        ids, mask = [*ids, *words.encode(move), words.eos_token_id], [*mask, True, True]
        if over:
            break
        ids, mask = [*ids, *words.encode(cell)], [*mask, False]
    return Sequence(prompt_ids=torch.tensor(prompt), response_ids=torch.tensor(ids), response_mask=torch.tensor(mask))


def lake_task(player: Player = at_random) -> Task:
    """player: whom the initial policy imitates."""
    words, limits = lake_tokenizer(), EnvironmentSettings(max_turns=TURNS, max_turn_tokens=2)
    config = harness.gpt2(len(words), 2, 64, 4, 48, eos_token_id=words.eos_token_id, initializer_range=0.1)
    sampling = SamplingParams(max_new_tokens=3 * TURNS, eos_token_ids=(words.eos_token_id,), pad_token_id=0)

    @cache
    def taught(seed: int) -> Any:
        from transformers import GPT2LMHeadModel

        torch.manual_seed(seed)
        actor = Actor(GPT2LMHeadModel(config))
        records = [imitated((seed << 32) + i, words, player) for i in range(32 * 60)]
        adam = partial(torch.optim.AdamW, lr=3e-3)
        with NaiveStrategy(seed=seed, device='cpu') as strategy:
            trainer = harness.offline_trainer(
                SFTTrainer, strategy, actor, records, optimizer=adam, train_batch_size=32, max_epochs=1
            )
            trainer.fit()
        return actor.model

    def start(seed: int) -> Any:
        return deepcopy(taught(seed))

    def play(actor: Actor, count: int, seed: int) -> list[Sample]:
        """Returns games sampled at temperature 1."""
        engine = EpisodeEngine(LocalEngine(), Lake, words, limits)
        engine.begin(actor)
        prompts = [Prompt(ids=torch.zeros(0, dtype=torch.int64))] * count
        samples = engine.generate(Call.of(prompts, sampling, seed=seed, indices=range(count)))
        engine.end()
        engine.close()
        return samples

    def score(trainer: Any) -> float:
        """Returns the share of 256 new games in which the goal is reached."""
        games = play(trainer.strategy.unwrap(trainer.actor), 256, 1_000_000)
        return statistics.mean(float(s.episode.success) for s in games)

    settings = {'environment': Lake, 'environment_settings': limits, 'max_new_tokens': 3 * TURNS}
    return Task(start, words, settings, score, (1e-3, 3e-3), 3e-3, 12.0, 24.0, 2048, play=play)


def additions_task(start: str, prompts: Path, held_out: Path) -> Task:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(start)
    asked, kept = ([json.loads(line) for line in path.read_text().splitlines()] for path in (prompts, held_out))

    def prompt(row: dict[str, Any]) -> Prompt:
        text = words.apply_chat_template(row['prompt'], tokenize=False, add_generation_prompt=True)
        ids = words(text, add_special_tokens=False)['input_ids']
        return Prompt(ids=torch.tensor(ids), text=text, columns={'answer': row['answer']})

    def right(prompts: list[str], responses: list[str], answer: list[int]) -> list[float]:
        found = [re.findall(r'\d+', response.replace(',', '')) for response in responses]
        return [float(bool(n) and int(n[-1]) == int(a)) for n, a in zip(found, answer, strict=True)]

    evaluate = PromptEvaluation(
        [prompt(row) for row in kept[:200]], words, right, num_rows=0, do_sample=False, max_new_tokens=NEW_TOKENS
    )
    return Task(
        lambda seed: AutoActor(pretrained=start).model, words, {'max_new_tokens': NEW_TOKENS},
        lambda trainer: evaluate(trainer)['score_mean'], (3e-5, 1e-4), 6e-5, 70.0, 100.0, 320,
        prompts=[prompt(row) for row in asked], reward=right, blocks=8,
    )  # fmt: skip


def sums_task(pretrain: str) -> Task:
    """The task of sums.py. The policy begins after SFT on few answers."""
    from transformers import AutoTokenizer

    words, (held_out, _, asked) = AutoTokenizer.from_pretrained(pretrain), sums.questions(pretrain)
    sampled = {'num_rows': 0, 'do_sample': True, 'max_new_tokens': sums.NEW_TOKENS}
    evaluate = PromptEvaluation(held_out, words, sums.right, **sampled)
    taught = cache(partial(sums.taught, pretrain, 'bf16'))
    return Task(
        lambda seed: deepcopy(taught()), words, {'max_new_tokens': sums.NEW_TOKENS},
        lambda trainer: evaluate(trainer)['score_mean'], (3e-5, 1e-4), 1e-4, 100.0, 200.0, 1024,
        prompts=asked, reward=sums.right, blocks=8, train_batch=16, precision='bf16',
    )  # fmt: skip


# ---------------------------------------------------------------- runs


class Course(Callback):
    """Records every phase until a run has had its CPU seconds and its episodes. A run with episodes, which is none of the
    trials, has its held-out score at either point. CPU seconds do not include evaluations."""

    def __init__(self, task: Task, cpu_s: float, episodes: int) -> None:
        self.task, self.ends = task, {'cpu_s': cpu_s, 'episodes': float(episodes)}
        self.rows: list[dict[str, float]] = []
        self.score: dict[str, float] = {}
        self._apart = 0.0

    def on_fit_start(self, trainer: Any) -> None:
        self._begun = time.process_time()

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        row = {'cpu_s': time.process_time() - self._begun - self._apart, 'episodes': float(EPISODES * (step))}
        wanted = {'score': 'rollout/score_mean', 'explained_variance': 'ppo/explained_variance'}
        self.rows.append(row | {key: metrics[name] for key, name in wanted.items() if name in metrics})
        begun = time.process_time()
        passed = [name for name, end in self.ends.items() if row[name] >= end]
        new = [name for name in passed if name not in self.score]
        if new and self.ends['episodes']:
            self.score |= dict.fromkeys(new, self.task.score(trainer))
        self._apart += time.process_time() - begun
        if len(passed) == len(self.ends):
            trainer.request_stop()


def train(
    task: Task, method: str, kind: str, lr: float, seed: int, cpu_s: float, episodes: int, **more: Any
) -> dict[str, Any]:
    """Makes one run and returns its phases and held-out scores. more: settings beside those of the kind."""
    torch.set_num_threads(1)
    settings = {'advantage_estimator': 'gae' if method == 'ppo' else method, 'lam': LAM}
    settings |= (KINDS[method] | STARTS).get(kind, {}) | more
    make = settings.pop('saved', None)
    saved = make(task, seed) if make else None
    with_critic, adam = settings.pop('critic', None), partial(torch.optim.AdamW, weight_decay=0.0, eps=1e-5)
    model = task.start(seed)
    course = Course(task, cpu_s, episodes)
    with NaiveStrategy(seed=seed, precision=task.precision, device='cpu') as strategy:
        if task.blocks:
            freeze_below(model, task.blocks)
        critic = saved or (critic_of(deepcopy(model), settings, seed) if with_critic == 'own' else None)
        actor = Actor(model, value_head=with_critic == 'shared' or None)
        trainer = harness.ppo_trainer(
            strategy,
            actor,
            critic,
            task.reward,
            optimizer=partial(adam, lr=lr),
            critic_optimizer=partial(adam, lr=task.critic_rate),
            callbacks=[course, Doctor(enabled=False)],
            tokenizer=task.tokenizer,
            experience_batch_size=EPISODES // settings.get('num_samples_per_prompt', 1),
            train_batch_size=task.train_batch,
            max_epochs=EPOCHS,
            kl_coef=0.0,
            **settings,
            **task.settings,
        )
        trainer.fit(*([task.prompts] if task.prompts else []), max_timesteps=100_000, update_timesteps=1)
    return {'method': method, 'kind': kind, 'lr': lr, 'seed': seed, 'score': course.score, 'rows': written(course.rows)}


def saved_critic(task: Task, seed: int) -> Critic:
    """Returns a critic that has learned from 8 phases of the initial policy, other episodes than those of a run."""
    with NaiveStrategy(seed=seed + 100, precision=task.precision, device='cpu') as strategy:
        model = task.start(seed)
        if task.blocks:
            freeze_below(model, task.blocks)
        trainer = harness.ppo_trainer(
            strategy,
            Actor(model),
            critic_of(deepcopy(model), {}, seed),
            task.reward,
            optimizer=partial(torch.optim.AdamW, lr=task.critic_rate, weight_decay=0.0, eps=1e-5),
            callbacks=[Doctor(enabled=False)],
            tokenizer=task.tokenizer,
            experience_batch_size=EPISODES,
            train_batch_size=task.train_batch,
            critic_warmup_phases=9,
            critic_epochs=4,
            kl_coef=0.0,
            lam=1.0,
            **task.settings,
        )
        trainer.fit(*([task.prompts] if task.prompts else []), max_timesteps=8, update_timesteps=1)
        found: Critic = strategy.unwrap(trainer.critic)
        return found


def written(rows: list[dict[str, float]]) -> list[str]:
    """Returns a line of numbers for each phase, in the order of `COLUMNS`."""
    return [' '.join(f'{row.get(name, 0.0):.4f}' for name in COLUMNS) for row in rows]


def phases(record: dict[str, Any]) -> list[dict[str, float]]:
    """Returns the numbers of each phase of a recorded run by name."""
    return [dict(zip(COLUMNS, map(float, line.split()), strict=True)) for line in record['rows']]


def critic_of(model: Any, settings: dict[str, Any], seed: int) -> Critic:
    """Returns a critic that begins with the actor's weights."""
    torch.manual_seed(seed)
    if settings.get('critic_loss') != 'categorical':
        return Critic(model)
    return Critic(model, CategoricalHead(hidden_size(model), **settings['critic_loss_settings']))


def on_the_way(record: dict[str, Any], key: str, end: float) -> float:
    """Returns the mean score of the training episodes until `key` (cpu_s, episodes) reaches `end`."""
    return statistics.mean(row['score'] for row in phases(record) if row[key] <= end)


def measure(results: harness.Results, name: str, task: Task, method: str, kind: str, lr: float, seed: int) -> Any:
    """Returns the record of a run, which runs if there is none. Seed 0 is that of the trials."""
    cpu_s, episodes = (task.compare_s, task.episodes) if seed in SEEDS else (task.tune_s, 0)
    if kind in STARTS:
        cpu_s, episodes = 0.0, GOALS[name][1]
    return results.measure(
        f'{name} {method} {kind} lr {lr:g} seed {seed}',
        lambda: {'task': name} | train(task, method, kind, lr, seed, cpu_s, episodes),
        lambda found: f'{found["score"]} after {phases(found)[-1]["episodes"]:.0f} episodes',
    )


def compare(results: harness.Results, name: str, task: Task, methods: list[str]) -> None:
    best: dict[str, tuple[str, float]] = {}
    for method in methods:
        trials = {
            (kind, lr): on_the_way(measure(results, name, task, method, kind, lr, 0), 'cpu_s', task.tune_s)
            for kind, lr in product(KINDS[method], task.rates)
        }
        best[method] = max(trials, key=lambda trial: trials[trial])
    for seed, method in product(SEEDS, methods):
        measure(results, name, task, method, *best[method], seed)
    if name in GOALS and 'ppo' in methods:
        for seed, kind in product(SEEDS if name == 'lake' else SEEDS[:3], STARTS):
            measure(results, name, task, 'ppo', kind, best['ppo'][1], seed)


# ---------------------------------------------------------------- the page


def page(results: harness.Results) -> None:
    starts = [r for r in results.values() if r['kind'] in STARTS]
    records = [r for r in results.values() if r['seed'] in SEEDS and r['kind'] not in STARTS]
    rows, tasks = [], list(dict.fromkeys(r['task'] for r in records))
    with harness.figure('critic.png', max(len(tasks), 1)) as axes:
        for name, axis in zip(tasks, axes, strict=True):
            runs = {m: [r for r in records if (r['task'], r['method']) == (name, m)] for m in KINDS}
            ends = {key: min(phases(r)[-1][key] for r in records if r['task'] == name) for key in ('cpu_s', 'episodes')}
            num_bins = min(12, int(ends['cpu_s'] / max(map(longest_phase, (r for own in runs.values() for r in own)))))
            for number, (method, own) in enumerate(runs.items()):
                if own:
                    rows.append(
                        [name, method, f'{own[0]["kind"]}, lr {own[0]["lr"]:g}', *columns(own, runs['ppo'], ends)]
                    )
                    width = ends['cpu_s'] / num_bins
                    bins = [on_the_way_at(own, at, width) for at in range(num_bins)]
                    middle, low, high = zip(*bins, strict=True)
                    at = [(i + 0.5) * width for i in range(num_bins)]
                    axis.plot(at, middle, color=f'C{number}', label=method)
                    axis.fill_between(at, low, high, color=f'C{number}', alpha=0.15)
            axis.set(title=name, xlabel='CPU seconds', ylabel='score of training episodes')
    head = ['task', 'method', 'best trial', 'at equal CPU seconds', 'PPO ahead by', 'at equal episodes', 'PPO ahead by']
    head += ['on the way, CPU seconds', 'PPO ahead by', 'CPU ms per episode', 'explained variance, first actor step']
    harness.write_page('critic.md', critic=harness.markdown(head, rows), starts=starts_table(starts))


def starts_table(records: list[dict[str, Any]]) -> str:
    """Returns the table of episodes until the goal, by the critic's start."""
    rows = []
    for (task, (goal, _)), kind in product(GOALS.items(), STARTS):
        by_seed = {(r['seed'], r['kind']): r for r in records if r['task'] == task}
        seeds = [seed for seed in SEEDS if (seed, kind) in by_seed]
        if not seeds:
            continue
        own, new = ([by_seed[seed, k] for seed in seeds] for k in (kind, 'own, new'))
        episodes = [until(r, goal) for r in own]
        saved = [1 - a / until(b, goal) for a, b in zip(episodes, new, strict=True)]
        first = [found for r in own if (found := first_explained(r)) is not None]
        rows.append([task, goal, kind, len(own), harness.mean_and_spread(episodes, '.0f')])
        rows[-1] += [harness.mean_and_spread(saved, '.2f'), harness.mean_and_spread(first, '.2f')]
    head = ['task', 'mean score', 'critic', 'seeds', 'episodes until then', 'share saved']
    return harness.markdown([*head, 'explained variance, first actor step'], rows)


def until(record: dict[str, Any], goal: float) -> float:
    """Returns the number of episodes after which the mean score of three phases first reaches the goal, or all."""
    rows = phases(record)
    for i in range(2, len(rows)):
        if statistics.mean(row['score'] for row in rows[i - 2 : i + 1]) >= goal:
            return float(rows[i]['episodes'])
    return float(rows[-1]['episodes'])


def longest_phase(record: dict[str, Any]) -> float:
    """Returns the CPU seconds of the longest phase of a run: a bin of this width has a phase of it."""
    ends = [0.0, *(row['cpu_s'] for row in phases(record))]
    return max(end - begin for begin, end in pairwise(ends))


def on_the_way_at(records: list[dict[str, Any]], number: int, width: float) -> tuple[float, float, float]:
    """Returns the mean, lowest and highest of the runs' mean scores in the CPU seconds of bin `number`."""
    means = [
        statistics.mean(row['score'] for row in phases(r) if number * width <= row['cpu_s'] < (number + 1) * width)
        for r in records
    ]
    return statistics.mean(means), min(means), max(means)


def columns(own: list[dict[str, Any]], ppo: list[dict[str, Any]], ends: dict[str, float]) -> list[str]:
    """Returns the cells of a method beside PPO's."""
    cells = []
    for value in (
        lambda r: r['score']['cpu_s'],
        lambda r: r['score']['episodes'],
        lambda r: on_the_way(r, 'cpu_s', ends['cpu_s']),
    ):
        mine = [value(r) for r in own]
        paired = own is not ppo and len(own) == len(ppo)
        cells += [harness.mean_and_spread(mine), harness.interval([value(r) for r in ppo], mine) if paired else '']
    cost = statistics.median(1000 * phases(r)[-1]['cpu_s'] / phases(r)[-1]['episodes'] for r in own)
    first = [found for r in own if r['method'] == 'ppo' and (found := first_explained(r)) is not None]
    return [*cells, f'{cost:.1f}', harness.mean_and_spread(first, '.2f') if first else '']


def first_explained(record: dict[str, Any]) -> float | None:
    """Returns the explained variance of the phase of the first actor step."""
    waits = (KINDS[record['method']] | STARTS)[record['kind']].get('critic_warmup_phases', 0)
    found: float | None = phases(record)[waits].get('explained_variance')
    return found


def main() -> None:
    parser = harness.script_parser(__doc__, page='critic.md')
    parser.add_argument('task', nargs='?', choices=('lake', 'additions', 'sums'))
    parser.add_argument(
        '--start', help='additions: folder of the model that every run starts from; sums: the model before SFT'
    )
    parser.add_argument('--prompts', type=Path, help='additions: JSON lines of `prompt` and `answer`')
    parser.add_argument('--held_out', type=Path, help='additions: held-out prompts in the same format')
    parser.add_argument('--methods', nargs='+', choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    results = harness.Results(RECORDS)
    if args.page:
        return page(results)
    if args.task == 'lake':
        task = lake_task()
    elif args.task and args.start and args.prompts and args.held_out:
        task = additions_task(args.start, args.prompts, args.held_out)
    elif args.task == 'sums' and args.start:
        task = sums_task(args.start)
    else:
        parser.error('give a task: lake, sums with --start, or additions with --start, --prompts and --held_out')
    compare(results, args.task, task, args.methods)


if __name__ == '__main__':
    main()
