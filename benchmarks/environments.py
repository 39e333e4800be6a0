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
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import environments_runs as plan
import torch
from environments_page import WINDOW, report
from environments_runs import QUICK, Budget, Record, Task, comparison, key, key_of, read, tuning

from chatgpt.trainer.callbacks import Callback
from chatgpt.types import Prompt, Sequence

ROOT = Path(__file__).resolve().parent.parent
PAD, BOS, EOS = '~', '<', '>'
CHARACTERS = '\n ?=.' + '0123456789' + 'abcdefghijklmnopqrstuvwxyz'
EVALUATION_SEED = 1_000_000
MEASURED = (
    'environment/success_share',
    'environment/return_mean',
    'rollout/entropy',
    'environment/observation_share',
)
"""of each phase, behind its episodes and CPU seconds so far"""

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

    task = plan.TASKS[name]
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

    task, keywords = plan.TASKS[name], plan.METHODS[method] | setting
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
