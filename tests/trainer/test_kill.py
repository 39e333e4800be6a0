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

import pytest

from chatgpt.checkpoint import CheckpointReader, latest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import hashlib, sys
from copy import deepcopy
import torch
from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar, SaveCheckpoint
from chatgpt.trainer.strategies import NaiveStrategy

strategy = NaiveStrategy(seed=1, device='cpu')
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
for model in trainer.models().values():
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
for o in trainer.optimizers().values():
    for state in o.state.values():
        digest.update(state['exp_avg'].numpy().tobytes() + state['exp_avg_sq'].numpy().tobytes())
print('hash', digest.hexdigest(), flush=True)
"""


def start(folder: Path, phases: int) -> subprocess.Popen[str]:
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-c', SCRIPT, str(folder), str(phases)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(folder: Path, phases: int) -> str:
    output, _ = (process := start(folder, phases)).communicate(timeout=100)
    assert process.returncode == 0, output
    return next(line for line in output.splitlines() if line.startswith('hash'))


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(('perf/', 'time'))} for row in rows]


def killed_many_times(folder: Path, kills: int, phases: int, seed: int) -> None:
    """Kill a run at random moments of its saves and phases; every restart goes on from the newest whole checkpoint.

    A kill that came after the run's end counts for nothing: it is another attempt.
    """
    rng = random.Random(seed)
    undisturbed = finished(folder / 'straight', phases)
    run, interrupted, resumed_from = folder / 'killed', 0, 0
    for _ in range(2 * kills):
        process = start(run, phases)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == f'ready {resumed_from}'
        enough = resumed_from + rng.randrange(phases // kills)
        while done_phases(run) < enough and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.1))
        process.kill()
        process.communicate()
        interrupted += process.returncode == -signal.SIGKILL
        newest = latest(run / 'checkpoints')
        resumed_from = 0 if newest is None else CheckpointReader(newest).meta['phase']
        if interrupted == kills:
            break
    assert interrupted == kills
    assert finished(run, phases) == undisturbed
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
