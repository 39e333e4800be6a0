"""A run that is killed at random moments and started again ends with the bits of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chatgpt.checkpoint import CheckpointReader, latest
from chatgpt.testing.processes import free_port, torchrun_environment

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import hashlib, sys
from copy import deepcopy
import torch
from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar, SaveCheckpoint
from chatgpt.trainer import strategies

strategy = getattr(strategies, sys.argv[3])(seed=1, device='cpu')
config = tiny_config('gpt2', positions=48)
actor, critic = GPTActor(config=config), GPTCritic(config=config)
(actor, ao), (critic, co), initial = strategy.prepare(
    (actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)), (critic, torch.optim.AdamW(critic.parameters(), lr=1e-3)), deepcopy(actor))
trainer = PPOTrainer(
    strategy, actor, critic, lambda p, r: [float(sum(c in 'aeiou' for c in x)) for x in r], initial, ao, co, tokenizer=char_tokenizer(),
    run_dir=sys.argv[1], callbacks=[SaveCheckpoint(interval=1, keep_last=2), ProgressBar(enabled=False)], experience_batch_size=8,
    train_batch_size=4, max_new_tokens=6, kl_target=3.0, score_scaling='running')
trainer.load_checkpoint('auto')
print('ready', trainer.phase, flush=True)
trainer.fit([f'a {w}' for w in 'one two three four five'.split()], 1, int(sys.argv[2]), 1)
digest = hashlib.sha256()
def add(tensor):
    digest.update((tensor.to_local() if hasattr(tensor, 'to_local') else tensor).detach().numpy().tobytes())
for model in trainer.models().values():
    for p in model.parameters():
        add(p)
for o in trainer.optimizers().values():
    for state in o.state.values():
        add(state['exp_avg']), add(state['exp_avg_sq'])
print('hash', digest.hexdigest(), flush=True)
"""


def start(folder: Path, phases: int, kind: str = 'NaiveStrategy', ranks: int = 1) -> list[subprocess.Popen[str]]:
    command, port = [sys.executable, '-c', SCRIPT, str(folder), str(phases), kind], free_port()
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
    places = [torchrun_environment(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks)]
    pipes: Any = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    return [subprocess.Popen(command, env=env | place, **pipes) for place in places]


def finished(folder: Path, phases: int, kind: str = 'NaiveStrategy', ranks: int = 1) -> list[str]:
    """Each rank's hash."""
    hashes = []
    for process in start(folder, phases, kind, ranks):
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
        hashes.append(next(line for line in output.splitlines() if line.startswith('hash')))
    return hashes


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(('perf/', 'time'))} for row in rows]


def killed_many_times(folder: Path, kills: int, phases: int, seed: int, kind: str = 'NaiveStrategy', ranks: int = 1) -> None:
    """Kill all ranks of a run at random moments of its saves and phases; every restart goes on from the newest whole checkpoint.

    A kill that came after the run's end counts for nothing: it is another attempt.
    """
    rng = random.Random(seed)
    undisturbed = finished(folder / 'straight', phases, kind, ranks)
    run, interrupted, resumed_from = folder / 'killed', 0, 0
    for _ in range(2 * kills):
        processes = start(run, phases, kind, ranks)
        output = processes[0].stdout
        assert output is not None
        assert next(line for line in output if line.startswith('ready')).strip() == f'ready {resumed_from}'
        enough = resumed_from + rng.randrange(phases // kills)
        while done_phases(run) < enough and processes[0].poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.1))
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
        interrupted += all(process.returncode == -signal.SIGKILL for process in processes)
        newest = latest(run / 'checkpoints')
        resumed_from = 0 if newest is None else CheckpointReader(newest).meta['phase']
        if interrupted == kills:
            break
    assert interrupted == kills
    assert finished(run, phases, kind, ranks) == undisturbed
    assert metrics(run) == metrics(folder / 'straight')
    assert [row['step'] for row in metrics(run)] == list(range(1, phases + 1))


def done_phases(folder: Path) -> int:
    path = folder / 'metrics.jsonl'
    return path.read_text().count('\n') if path.is_file() else 0


def test_five_kills(tmp_path):
    killed_many_times(tmp_path, kills=5, phases=40, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills(tmp_path):
    killed_many_times(tmp_path, kills=20, phases=120, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_kills_of_two_sharded_ranks(tmp_path):
    killed_many_times(tmp_path, kills=5, phases=20, seed=2, kind='FSDPStrategy', ranks=2)
