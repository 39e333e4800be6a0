"""Learning curves on the randomwalks task: ILQL from scratch, PPO and the critic-free methods from a model trained on
the walks.

    python benchmarks/randomwalks.py --methods ppo grpo --graph_seeds 1000 1002 --seeds 1 2 3
    python benchmarks/randomwalks.py --page

Methods are ilql, ppo, a2c, grpo, rloo and reinforce++; --times 3 trains three times as long. The task is
`randomwalks_task`, and docs/results/randomwalks.md describes training and measurement.
"""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import harness
import randomwalks_task as rw
import torch
from transformers import GPT2LMHeadModel

from chatgpt.nn import GPTActor, GPTCritic, ILQLModel
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer import BetaEvaluation, ILQLTrainer, PromptEvaluation, rewarded
from chatgpt.trainer.algorithms import ESTIMATORS
from chatgpt.trainer.callbacks import Evaluator

BETAS = (0.0, 1.0, 100.0)
NUM_SAMPLES, BATCH, SFT_STEPS, STEPS = 32, 100, 300, 160
ONLINE: dict[str, dict[str, Any]] = {
    'ppo': {'advantage_estimator': 'gae', 'lam': 0.95, 'gamma': 1.0},
    'a2c': {'advantage_estimator': 'a2c', 'policy_loss': 'reinforce'},
    'grpo': {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 5},
    'rloo': {'advantage_estimator': 'rloo', 'num_samples_per_prompt': 5},
    'reinforce++': {'advantage_estimator': 'reinforce++'},
}
METHODS = ('ilql', *ONLINE)
GOALS = {'ilql': 0.95, 'ppo': 0.9}


def reward_of(task: rw.Task) -> Any:
    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        return [task.optimality(p + r) for p, r in zip(prompts, responses, strict=True)]

    return reward


class Curve:
    """A wrapper of an evaluation that keeps its results."""

    def __init__(self, evaluate: Any) -> None:
        self.evaluate, self.rows = evaluate, list[dict[str, float]]()

    def __call__(self, trainer: Any) -> dict[str, float]:
        self.rows.append(self.evaluate(trainer))
        return self.rows[-1]


def evaluation(task: rw.Task, tokenizer: Any, **generate: Any) -> Any:
    prompts = [p for p in task.starts for _ in range(NUM_SAMPLES)]
    return PromptEvaluation(
        prompts, tokenizer, reward_of(task), num_rows=0, do_sample=True, max_new_tokens=rw.MAX_LENGTH - 1, **generate
    )


def run_ilql(graph_seed: int, seed: int, times: int = 1, **changes: Any) -> dict[str, Any]:
    task, tokenizer = rw.make_task(graph_seed), rw.tokenizer()
    records = rewarded(rw.sequences(task.walks), [task.optimality(w) for w in task.walks])
    curve = Curve(BetaEvaluation(evaluation(task, tokenizer, top_k=10), BETAS))
    settings: dict[str, Any] = {
        'tau': 0.8,
        'cql_scale': 0.1,
        'awac_scale': 1.0,
        'alpha': 0.1,
        'beta': 0.0,
        'gamma': 0.99,
        'target_sync_interval': 1,
        'lr_schedule': 'linear',
    }
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        trainer = harness.offline_trainer(
            ILQLTrainer,
            strategy,
            ILQLModel(GPT2LMHeadModel(rw.config())),
            records,
            optimizer=partial(torch.optim.AdamW, lr=2e-4),
            callbacks=[Evaluator(curve, 1)],
            tokenizer=tokenizer,
            train_batch_size=BATCH,
            log_interval=20,
            **{'max_epochs': 20 * times} | settings | changes,
        )
        trainer.fit()
    by_beta = {f'{b:g}': [row[f'score_mean@beta={b:g}'] for row in curve.rows] for b in BETAS}
    best = max(by_beta, key=lambda b: by_beta[b][-1])
    return {'optimality': by_beta[best], 'beta': best, 'by_beta': by_beta, 'settings': settings}


def sft_model(task: rw.Task, graph_seed: int, seed: int, cache: Path) -> tuple[Any, dict[str, float]]:
    """Returns a model trained on the walks (300 steps of batch 100) and its seconds; cached in `cache`."""
    file = cache / f'sft-{graph_seed}-{seed}.pt'
    if file.exists():
        kept = torch.load(file, weights_only=True)
        actor = GPTActor(config=rw.config())
        actor.load_state_dict(kept['weights'])
        return actor, kept['seconds']
    bare, seconds = harness.timed(lambda: rw.learn_walks(task, rw.config(), seed, steps=SFT_STEPS, lr=3e-4))
    seconds = {f'sft_{name}': spent for name, spent in seconds.items()}
    cache.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f'.{os.getpid()}')
    torch.save({'weights': bare.state_dict(), 'seconds': seconds}, part)
    part.replace(file)
    return bare, seconds


def run_online(
    method: str, graph_seed: int, seed: int, times: int = 1, *, cache: Path, **changes: Any
) -> dict[str, Any]:
    task, tokenizer = rw.make_task(graph_seed), rw.tokenizer()
    actor, seconds = sft_model(task, graph_seed, seed, cache)
    curve = Curve(evaluation(task, tokenizer))
    settings = {'max_epochs': 1, 'lr': 3e-4, 'critic_lr': 1e-3, 'kl_coef': 0.0} | ONLINE[method] | changes
    lr, critic_lr = settings.pop('lr'), settings.pop('critic_lr')
    group = settings.get('num_samples_per_prompt', 1)
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        values = ESTIMATORS[settings['advantage_estimator']].needs_values
        adam = partial(torch.optim.AdamW, eps=1e-5, weight_decay=0.0)
        trainer = harness.ppo_trainer(
            strategy,
            actor,
            GPTCritic(config=rw.config()) if values else None,
            reward_of(task),
            optimizer=partial(adam, lr=lr),
            critic_optimizer=partial(adam, lr=critic_lr),
            callbacks=[Evaluator(curve, 10)],
            tokenizer=tokenizer,
            experience_batch_size=BATCH // group,
            train_batch_size=BATCH,
            max_new_tokens=rw.MAX_LENGTH - 1,
            **settings,
        )
        _, spent = harness.timed(lambda: trainer.fit(task.starts, 1, STEPS * times // settings['max_epochs'], 1))
    return {
        'optimality': [row['score_mean'] for row in curve.rows],
        'settings': settings | {'lr': lr, 'critic_lr': critic_lr},
        **{name: seconds[f'sft_{name}'] + spent[name] for name in spent},
        **seconds,
    }


def measure(method: str, graph_seed: int, seed: int, times: int, cache: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    if method == 'ilql':
        result, spent = harness.timed(lambda: run_ilql(graph_seed, seed, times))
        result |= spent
    else:
        result = run_online(method, graph_seed, seed, times, cache=cache)
    return result | {'method': method, 'graph_seed': graph_seed, 'seed': seed, 'times': times}


def last_four(run: dict[str, Any]) -> float:
    return sum(run['optimality'][-4:]) / 4


def table(runs: dict[tuple[int, int, int], list[dict[str, Any]]]) -> str:
    rows = []
    for (number, times, graph), found in sorted(runs.items()):
        last, goal = [last_four(r) for r in found], GOALS.get(METHODS[number])
        name = METHODS[number] + (f', {times} times as long' if times > 1 else '')
        reached = f'> {goal:g}: {sum(x > goal for x in last)} of {len(last)}' if goal else ''
        seconds = [f'{sum(r[k] for r in found) / len(found):.0f}' for k in ('wall_s', 'cpu_s')]
        rows.append([name, graph, len(found), harness.mean_and_spread(last), reached, *seconds])
    return harness.markdown(
        'method | graph | seeds | last four evaluations: mean (least, greatest) | goal | wall s | CPU s', rows
    )


def plot(runs: dict[tuple[int, int, int], list[dict[str, Any]]]) -> None:
    titles = ['one line a seed'] + ['three times as long'] * any(times > 1 for _, times, _ in runs)
    with harness.figure('randomwalks.png', len(titles), sharey=True) as axes:
        for (number, times, graph), found in sorted(runs.items()):
            for i, one in enumerate(found if graph == 1000 else ()):
                steps, last = (200 if METHODS[number] == 'ilql' else STEPS) * times, len(one['optimality']) - 1
                x = [j * steps / last for j in range(last + 1)]
                label = None if i else METHODS[number]
                axes[min(times, 2) - 1].plot(x, one['optimality'], color=f'C{number}', alpha=0.8, label=label)
        for axis, title in zip(axes, titles, strict=True):
            axis.set(
                xlabel='optimizer steps of batch 100', ylabel='optimality', title=f'graph 1000, {title}', ylim=(0, 1.02)
            )


def main() -> None:
    parser = harness.script_parser(__doc__, 'randomwalks.md')
    parser.add_argument('--methods', nargs='*', choices=METHODS, default=list(METHODS))
    parser.add_argument('--graph_seeds', type=int, nargs='+', default=[1000])
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3])
    parser.add_argument('--times', type=int, default=1)
    parser.add_argument(
        '--cache', type=Path, default=harness.ROOT / 'outputs' / 'randomwalks', help='folder of the SFT models'
    )
    args = parser.parse_args()
    results = harness.Results('randomwalks.json')
    for method, graph, seed in product(args.methods, args.graph_seeds, args.seeds):
        asked = (method, graph, seed, args.times)
        results.measure(' '.join(map(str, asked)), lambda a=asked: measure(*a, args.cache), show=last_four)
    if args.page:
        runs = defaultdict(list)
        for run in results.values():
            runs[METHODS.index(run['method']), run['times'], run['graph_seed']].append(run)
        harness.write_page('randomwalks.md', runs=table(runs))
        plot(runs)


if __name__ == '__main__':
    main()
