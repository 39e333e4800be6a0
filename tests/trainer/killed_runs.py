"""A short run of PPO as a script, on one process or more, for tests that stop and restart it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from chatgpt.testing.processes import free_port, torchrun_environment

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {'PYTHONPATH': f'{HERE.parents[1]}:{HERE}', 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}

SCRIPT = """
import hashlib, sys
from tiny_runs import PROMPTS, ppo
from chatgpt.trainer import strategies
from chatgpt.trainer.callbacks import SaveCheckpoint

folder, phases, kind = sys.argv[1:]
trainer = ppo(getattr(strategies, kind)(seed=5, device='cpu'), run_dir=folder, experience_batch_size=8, kl_target=3.0,
              score_scaling='running', callbacks=[SaveCheckpoint(interval=1, keep_last=2)])
trainer.load_checkpoint('auto')
print('ready', trainer.phase, flush=True)
trainer.fit(PROMPTS[:5], 1, int(phases), 1)
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
    places = [torchrun_environment(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks)]
    pipes: Any = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    return [subprocess.Popen(command, env=os.environ | ENVIRONMENT | place, **pipes) for place in places]


def finished(folder: Path, phases: int, kind: str = 'NaiveStrategy', ranks: int = 1) -> list[str]:
    hashes = []
    for process in start(folder, phases, kind, ranks):
        output, _ = process.communicate()
        assert process.returncode == 0, output
        hashes.append(next(line for line in output.splitlines() if line.startswith('hash')))
    return hashes


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(('perf/', 'time'))} for row in rows]
