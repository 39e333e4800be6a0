"""A short run of PPO as a script, on one process or more, that a test may stop and start again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
        output, _ = process.communicate()
        assert process.returncode == 0, output
        hashes.append(next(line for line in output.splitlines() if line.startswith('hash')))
    return hashes


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(('perf/', 'time'))} for row in rows]
