"""Learning curves on the randomwalks task: ILQL from scratch, PPO and the critic-free methods from a model trained on
the walks.

    python benchmarks/randomwalks.py --method ppo --graph_seed 1000 --seed 1 --out FILE.json
    python benchmarks/randomwalks.py --report FOLDER [--out docs/results/randomwalks.md]

Methods are ilql, ppo, a2c, grpo, rloo and reinforce++.

The task is `randomwalks_task`. A file holds `optimality`, the mean over 32 samples from each of the 20 starts at every
evaluation, and the settings and seconds. ILQL: GPT-2 of 6 layers x 144, 200 optimizer steps of batch 100, target heads
synced at each, lr from 2e-4 to 0; the values of the one β of 0, 1, 100 that is best at the last of these evaluations.
Online: the same model first trained 300 steps on the walks (SFT), then 160 optimizer steps of batch 100, each on 100
fresh responses, with lr 3e-4 and no KL; the critic of PPO and A2C is a network of its own with new weights and lr 1e-3.
--times 3 trains three times as long. Seconds include the SFT; wall seconds also what shared the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import randomwalks_task as rw
import torch

ROOT = Path(__file__).resolve().parent.parent
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
    """Collects what an `Evaluator` measures."""

    def __init__(self, evaluate: Any) -> None:
        self.evaluate, self.rows = evaluate, list[dict[str, float]]()

    def __call__(self, trainer: Any) -> dict[str, float]:
        self.rows.append(self.evaluate(trainer))
        return self.rows[-1]


def evaluation(task: rw.Task, tokenizer: Any, **generate: Any) -> Any:
    from chatgpt.trainer import PromptEvaluation

    prompts = [p for p in task.starts for _ in range(NUM_SAMPLES)]
    return PromptEvaluation(
        prompts, tokenizer, reward_of(task), num_rows=0, do_sample=True, max_new_tokens=rw.MAX_LENGTH - 1, **generate
    )


def run_ilql(graph_seed: int, seed: int, times: int = 1, *, every: int = 20, **changes: Any) -> dict[str, Any]:
    from transformers import GPT2LMHeadModel

    from chatgpt.nn import ILQLModel
    from chatgpt.trainer import BetaEvaluation, ILQLTrainer, rewarded
    from chatgpt.trainer.callbacks import Evaluator, ProgressBar
    from chatgpt.trainer.strategies import NaiveStrategy

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
        model = ILQLModel(GPT2LMHeadModel(rw.config()))
        model, optim = strategy.prepare((model, torch.optim.AdamW(model.parameters(), lr=2e-4)))
        trainer = ILQLTrainer(
            strategy,
            model,
            optim,
            records,
            tokenizer=tokenizer,
            train_batch_size=BATCH,
            log_interval=every,
            callbacks=[Evaluator(curve, 1), ProgressBar(enabled=False)],
            **{'max_epochs': 20 * times} | settings | changes,
        )
        trainer.fit()
    by_beta = {f'{b:g}': [row[f'score_mean@beta={b:g}'] for row in curve.rows] for b in BETAS}
    best = max(by_beta, key=lambda b: by_beta[b][-1])
    return {'optimality': by_beta[best], 'beta': best, 'by_beta': by_beta, 'settings': settings}


def sft_model(task: rw.Task, graph_seed: int, seed: int, cache: Path | None = None) -> tuple[Any, dict[str, float]]:
    """The model that has learned the walks (300 steps of batch 100) and its seconds; kept in `cache` for the other
    methods."""
    from chatgpt.nn import GPTActor
    from chatgpt.trainer import SFTTrainer
    from chatgpt.trainer.callbacks import ProgressBar
    from chatgpt.trainer.strategies import NaiveStrategy

    file = cache / f'sft-{graph_seed}-{seed}.pt' if cache is not None else None
    if file is not None and file.exists():
        kept = torch.load(file, weights_only=True)
        actor = GPTActor(config=rw.config())
        actor.load_state_dict(kept['weights'])
        return actor, kept['seconds']
    wall, cpu = time.perf_counter(), time.process_time()
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor = GPTActor(config=rw.config())
        actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=3e-4)))
        SFTTrainer(
            strategy,
            actor,
            optim,
            rw.sequences(task.walks),
            train_batch_size=BATCH,
            max_epochs=1000,
            max_steps=SFT_STEPS,
            callbacks=[ProgressBar(enabled=False)],
        ).fit()
        bare = strategy.unwrap(actor)
    seconds = {'sft_wall_s': time.perf_counter() - wall, 'sft_cpu_s': time.process_time() - cpu}
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f'.{os.getpid()}')
        torch.save({'weights': bare.state_dict(), 'seconds': seconds}, part)
        part.replace(file)
    return bare, seconds


def run_online(
    method: str,
    graph_seed: int,
    seed: int,
    times: int = 1,
    cache: Path | None = None,
    *,
    every: int = 10,
    **changes: Any,
) -> dict[str, Any]:
    from chatgpt.nn import GPTCritic
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.algorithms import ESTIMATORS
    from chatgpt.trainer.callbacks import Evaluator, ProgressBar
    from chatgpt.trainer.strategies import NaiveStrategy

    task, tokenizer = rw.make_task(graph_seed), rw.tokenizer()
    actor, seconds = sft_model(task, graph_seed, seed, cache)
    wall, cpu = time.perf_counter(), time.process_time()
    curve = Curve(evaluation(task, tokenizer))
    settings = {'max_epochs': 1, 'lr': 3e-4, 'critic_lr': 1e-3, 'kl_coef': 0.0} | ONLINE[method] | changes
    lr, critic_lr = settings.pop('lr'), settings.pop('critic_lr')
    group = settings.get('num_samples_per_prompt', 1)
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        actor, optim = strategy.prepare(
            (actor, torch.optim.AdamW(actor.parameters(), lr=lr, eps=1e-5, weight_decay=0.0))
        )
        critic = critic_optim = None
        if ESTIMATORS[settings['advantage_estimator']].needs_values:
            critic = GPTCritic(config=rw.config())
            critic_optim = torch.optim.AdamW(critic.parameters(), lr=critic_lr, eps=1e-5, weight_decay=0.0)
            critic, critic_optim = strategy.prepare((critic, critic_optim))
        trainer = PPOTrainer(
            strategy,
            actor,
            critic,
            reward_of(task),
            None,
            optim,
            critic_optim,
            tokenizer=tokenizer,
            experience_batch_size=BATCH // group,
            train_batch_size=BATCH,
            max_new_tokens=rw.MAX_LENGTH - 1,
            callbacks=[Evaluator(curve, every), ProgressBar(enabled=False)],
            **settings,
        )
        trainer.fit(task.starts, 1, STEPS * times // settings['max_epochs'], 1)
    return {
        'optimality': [row['score_mean'] for row in curve.rows],
        'settings': settings | {'lr': lr, 'critic_lr': critic_lr},
        'wall_s': seconds['sft_wall_s'] + time.perf_counter() - wall,
        'cpu_s': seconds['sft_cpu_s'] + time.process_time() - cpu,
        **seconds,
    }


def run(method: str, graph_seed: int, seed: int, times: int, out: Path, cache: Path | None = None) -> None:
    torch.set_num_threads(1)
    start, cpu = time.perf_counter(), time.process_time()
    if method == 'ilql':
        result = run_ilql(graph_seed, seed, times)
        result |= {'wall_s': time.perf_counter() - start, 'cpu_s': time.process_time() - cpu}
    else:
        result = run_online(method, graph_seed, seed, times, cache)
    result |= {
        'method': method,
        'graph_seed': graph_seed,
        'seed': seed,
        'times': times,
        'last_four': sum(result['optimality'][-4:]) / 4,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + '\n')
    print(
        f'{method} graph {graph_seed} seed {seed}: last four {result["last_four"]:.3f}, {result["cpu_s"]:.0f} CPU s',
        flush=True,
    )


def betas_chosen(runs: Iterable[list[dict[str, Any]]]) -> str:
    """A clause on which β the ILQL files have."""
    counts = Counter(r['beta'] for found in runs for r in found if 'beta' in r)
    if not counts:
        return ''
    of_each = ', '.join(
        f'{beta} in {number}' for beta, number in sorted(counts.items(), key=lambda item: float(item[0]))
    )
    return (
        f', which is {next(iter(counts))} in all {counts.total()} files'
        if len(counts) == 1
        else f', which is {of_each} files'
    )


def report(folder: Path, out: Path) -> None:
    """A table and a plot of every result in a folder."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    runs: dict[tuple[int, int, int], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob('*.json')):
        content = json.loads(path.read_text())
        runs[METHODS.index(content['method']), content['times'], content['graph_seed']].append(content)
    legend = ' '.join(' '.join((__doc__ or '').split('\n\n')[2:]).split())
    legend = legend.replace('last of these evaluations', f'last of these evaluations{betas_chosen(runs.values())}')
    lines = ['# Randomwalks', '', f'`python benchmarks/randomwalks.py`. {legend}', '']
    lines += [
        '| method | graph | seeds | last four evaluations: mean (least, greatest) | goal | wall s | CPU s |',
        '|' + '---|' * 7,
    ]
    for (number, times, graph), found in sorted(runs.items()):
        method, last = METHODS[number], [r['last_four'] for r in found]
        name = method + (f', {times} times as long' if times > 1 else '')
        spread = f'{sum(last) / len(last):.3f} ({min(last):.3f}, {max(last):.3f})'
        goal = GOALS.get(method)
        reached = f'> {goal:g}: {sum(x > goal for x in last)} of {len(last)}' if goal else ''
        wall, cpu = (sum(r[k] for r in found) / len(found) for k in ('wall_s', 'cpu_s'))
        lines.append(f'| {name} | {graph} | {len(found)} | {spread} | {reached} | {wall:.0f} | {cpu:.0f} |')
    lines += ['', f'![Optimality over the training]({out.stem}.png)', '']
    titles = ['one line a seed'] + ['three times as long'] * any(times > 1 for _, times, _ in runs)
    figure, axes = plt.subplots(
        1, len(titles), figsize=(5.5 * len(titles), 4.2), squeeze=False, sharey=True, constrained_layout=True
    )
    for (number, times, graph), found in sorted(runs.items()):
        if graph != 1000:
            continue
        for i, one in enumerate(found):
            values = one['optimality']
            steps = (200 if METHODS[number] == 'ilql' else STEPS) * times
            x = [j * steps / (len(values) - 1) for j in range(len(values))]
            label = METHODS[number] if i == 0 else None
            axes[0][min(times, 2) - 1].plot(x, values, color=f'C{number}', alpha=0.8, label=label)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set(
            xlabel='optimizer steps of batch 100', ylabel='optimality', title=f'graph 1000, {title}', ylim=(0, 1.02)
        )
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(loc='lower right')
    figure.savefig(out.with_suffix('.png'), dpi=100)
    out.write_text('\n'.join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--method', choices=METHODS, default='ilql')
    parser.add_argument('--graph_seed', type=int, default=1000)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--times', type=int, default=1)
    parser.add_argument(
        '--cache', type=Path, default=ROOT / 'outputs' / 'randomwalks', help='where the models of the SFT stay'
    )
    parser.add_argument('--report', type=Path)
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    if args.report:
        report(args.report, args.out or ROOT / 'docs' / 'results' / 'randomwalks.md')
    else:
        name = f'{args.method}-{args.graph_seed}-{args.seed}' + (f'-x{args.times}' if args.times > 1 else '')
        out = args.out or ROOT / 'benchmarks' / 'results' / 'randomwalks' / f'{name}.json'
        run(args.method, args.graph_seed, args.seed, args.times, out, args.cache)


if __name__ == '__main__':
    main()
