"""Synthetic run folders for the report: numbers by formula, texts with markup."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from recorded import recorded_row

from chatgpt.monitor.run_folder import RunRecord, Start
from chatgpt.monitor.run_folder.rollouts import FOLDER, write_rollouts

HOSTILE = (
    '</script><script>window.hacked = 1</script>',
    '<img src=x onerror="window.hacked = 2">',
    '<!-- <script>',
    ']]>&lt;b&gt;"\'`${1}',
    'ends \x00 with \x1b[31m control \u2028 and a lone \ud800 surrogate',
    'שלום עולם \u202e reversed',
    '🦊🦊🏽‍🚀 e\u0301',
    'w' * 5000,
)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    # As the library writes them, except that lone surrogates are escaped.
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


OTHERS = dict.fromkeys(
    'ppo/return_mean ppo/advantage_mean ppo/policy_loss ppo/value_clip_fraction ppo/value_loss '
    'ppo/skipped_batches ppo/early_stopped perf/collect_cpu_s perf/score_cpu_s perf/learn_cpu_s perf/new_tokens_per_s '
    'perf/learn_tokens_per_s custom/repetition rollout/kl_coef rollout/entropy ppo/entropy'.split(),
    0.5,
)
"""metrics that tests only require to be present; the doctor finds nothing in them"""
OTHERS |= {'rollout/score_std': 1.5, 'rollout/non_score_reward_mean': -0.3, 'rollout/response_len_mean': 18.0}
OTHERS |= {'rollout/response_len_std': 4.5, 'rollout/prompt_len_mean': 10.0, 'perf/total_s': 3.9, 'ppo/value_mean': 1.0}
OTHERS |= {
    'ppo/first_ratio_error': 1e-6,
    'ppo/first_approx_kl': 1e-8,
    'ppo/approx_kl': 0.006,
    'ppo/approx_kl_k3': 0.006,
}
OTHERS |= {
    'ppo/explained_variance': 0.5,
    'ppo/clip_fraction': 0.06,
    'ppo/ratio_mean': 1.0,
    'ppo/ratio_min': 0.4,
    'ppo/ratio_max': 2.0,
}
OTHERS |= {'ppo/return_var': 4.0, 'ppo/advantage_std': 1.5, 'ppo/actor_grad_norm': 0.4, 'ppo/critic_grad_norm': 2.0}


def ppo_row(step: int, phases: int, rng: random.Random) -> dict[str, float | None]:
    """Returns the metrics of a phase of a good PPO run."""
    t = step / phases
    rise = 1 - math.exp(-4 * t)
    score = -1.4 + 4.2 * rise + rng.gauss(0, 0.25)
    own = {'rollout/score_mean': score, 'rollout/score_min': score - 4, 'rollout/score_max': score + 3}
    own |= {'rollout/kl_mean': 6 * rise, 'rollout/kl_k3_mean': 6.4 * rise}
    own |= {'rollout/ended_share': min(1.0, 0.86 + 0.12 * rise + rng.gauss(0, 0.01))}
    own |= {'ppo/lr': 3e-4 * (1 - t), 'ppo/critic_lr': 1e-3 * (1 - t), 'ppo/num_updates': 8.0 * step}
    own |= {'perf/collect_s': 1.2 + 0.1 * rng.random(), 'perf/score_s': 0.4 + 0.05 * rng.random()}
    own |= {'perf/learn_s': 2.1 + 0.2 * rng.random(), 'perf/peak_memory_gib': 0.7}
    return OTHERS | own


def record(method: str = 'ppo', **given: Any) -> RunRecord:
    """Returns the record of a good run, with the given changes."""
    settings = {'lr': 3e-4, 'critic_lr': 1e-3, 'train_batch_size': 32, 'kl_coef': 0.05, 'max_epochs': 4, 'gamma': 1.0}
    machine = {'system': 'Linux 6.1', 'processor': 'A processor', 'cores': 2, 'memory_gib': 24.0, 'gpus': []}
    start = Start(
        at='2026-11-22T10:00:00+00:00',
        phase=0,
        command=['python', '-m', 'chatgpt', method, 'my prompts.jsonl', '--lr', '3e-4'],
        git={'commit': 'b281334d7cde2c8d9c1a5e0f3b6a7d8e9f001122', 'dirty': True},
        versions={'python': '3.12.1', 'chatgpt': '0.2.0', 'torch': '2.13.0', 'transformers': '5.23.0'},
        machine=machine,
    )
    fields: dict[str, Any] = {
        'method': method,
        'trainer': 'PPOTrainer',
        'settings': settings,
        'defaults': {**settings, 'lr': 1e-5, 'critic_lr': 1e-5, 'train_batch_size': 8},
        'generation': {'max_new_tokens': 24, 'temperature': 1.0},
        'strategy': {'name': 'NaiveStrategy', 'world_size': 1, 'precision': 'fp32', 'device': 'cpu', 'seed': 42},
        'models': {'actor': {'kind': 'gpt2', 'source': 'outputs/sft/actor', 'parameters': 209408, 'trained': 209408}},
        'optimizers': {'actor': [{'kind': 'AdamW', 'lr': 3e-4, 'weight_decay': 0.0}]},
        'reward': 'rewards.py:score',
        'data': {'prompts': 200, 'distinct': 180},
        'plan': {'peak_gib': 0.9, 'phases': {'collect': 0.5, 'learn': 0.9}},
        'num_phases': 40,
        'starts': [start],
        'status': 'ended',
        'phase': 40,
        'ended': '2026-11-22T10:12:30+00:00',
    }
    return RunRecord(**(fields | given))


def make_run(folder: Path, phases: int = 40, *, seed: int = 0, texts: tuple[str, ...] = (), **given: Any) -> Path:
    """Writes a PPO run with evaluations and samples; `texts` replace the responses, `given` is for run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = [{'step': step, **ppo_row(step, phases, rng)} for step in range(1, phases + 1)]
    evaluated = sorted({0, phases, *range(0, phases + 1, max(1, phases // 5))})
    evals = [{'step': s, 'eval/score_mean': -1.2 + 3 * s / phases, 'eval/length_mean': 17.0} for s in evaluated]
    for line in evals:
        if line['step']:
            rows[int(line['step']) - 1].update({k: v for k, v in line.items() if k != 'step'})
    write_lines(folder / 'metrics.jsonl', rows)
    write_lines(folder / 'eval.jsonl', evals)
    prompts = ['one day a small fox went to the river .', 'the old dog slept near the door and', 'a boy found a kite .']
    stock = [
        'it was a good day and the fox was happy .',
        'the fox saw a fish and felt proud . it ran home and told its mother .',
        'then it rained , and they all laughed .',
    ]
    samples = []
    for n, s in enumerate(evaluated):
        for i, prompt in enumerate(texts or prompts):
            asked, text = (prompt + str(i), texts[(i + n) % len(texts)]) if texts else (prompt, stock[(i + n) % 3])
            samples.append({'step': s, 'prompt': asked, 'response': text, 'score': rng.gauss(s / phases * 3, 0.5)})
    write_lines(folder / 'eval_samples.jsonl', samples)
    record(**({'num_phases': phases, 'phase': phases} | given)).write(folder)
    return folder


def make_offline_run(folder: Path, phases: int = 30, prefix: str = 'sft', **given: Any) -> Path:
    """Writes an offline run: loss, its own metrics, eval data every fifth phase."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    rows: list[dict[str, Any]] = []
    for step in range(1, phases + 1):
        loss = 1 + 3 * math.exp(-step / 8) + 0.05 * rng.random()
        row: dict[str, float] = {f'{prefix}/loss': loss, f'{prefix}/grad_norm': 1.0, f'{prefix}/lr': 1e-3}
        if prefix == 'sft':
            row['sft/perplexity'] = math.exp(loss)
        else:
            row |= {f'{prefix}/accuracy': 1 - 0.4 * math.exp(-step / 8), f'{prefix}/margin': step / 10}
        if step % 5 == 0:
            row |= {f'{prefix}/val_loss': loss + 0.1}
        rows.append({'step': step, **row, 'perf/learn_s': 0.5, 'perf/total_s': 0.5, 'perf/learn_tokens_per_s': 9000.0})
    write_lines(folder / 'metrics.jsonl', rows)
    record(prefix, **({'num_phases': phases, 'phase': phases, 'generation': {}} | given)).write(folder)
    return folder


def write_sequences(folder: Path, texts: tuple[str, ...], phases: tuple[int, ...] = (1, 20, 40)) -> None:
    """Writes recorded sequences with a token per character; one of four ended by a stop string."""
    for phase in phases:
        rows = []
        for i, text in enumerate(texts):
            numbers = {'ref_logprobs': [-0.7] * len(text), 'advantages': [0.25 * i - 0.5] * len(text)}
            about = {'prompt': f'prompt {i // 2}', 'finish_reason': ('eos', 'stop', 'length', 'eos')[i % 4]}
            rows.append(recorded_row(phase, i, text, **about, **numbers))
        write_rollouts(folder / FOLDER, phase, rows)
