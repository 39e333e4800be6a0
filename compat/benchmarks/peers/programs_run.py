"""Runs one published program and writes what it logs, as JSON.

    python programs_run.py theirs OUT.json PROGRAM.py ARGUMENTS     # in the other system's environment
    python programs_run.py ours OUT.json PROGRAM.py ARGUMENTS       # through chatgpt_compat's runner

The methods that a program logs with are wrapped on both sides, so that each call adds its numbers to the list: `log` of
transformers' trainers, `log_stats` of TRL's classic PPO, and of trlX `Accelerator.log`, whose place metrics.jsonl and
eval.jsonl take here. Modules that trlX imports and does not use on one process are replaced (`compat_trlx_peer.py`), and
a pipeline's GPU is the CPU, as in the runner here.
"""

from __future__ import annotations

import importlib
import json
import math
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOGGED: list[dict[str, float]] = []


def note(found: Mapping[str, Any]) -> None:
    """Adds the numbers of a line of the log; tensors and arrays of one number count."""
    numbers = {}
    for name, value in found.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue
        if math.isfinite(number):
            numbers[name] = number
    LOGGED.append(numbers)


def wrap(place: str, method: str, numbers: Any) -> None:
    """Wraps a method of 'module:class', if it is there, so that `numbers(*arguments)` is noted before each call."""
    module, _, name = place.partition(':')
    owner = getattr(importlib.import_module(module), name)
    before = getattr(owner, method)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(numbers(*args))
        return before(self, *args, **kwargs)

    setattr(owner, method, noted)


def of_step(stats: Mapping[str, Any], batch: Any, rewards: Any, *_: Any) -> dict[str, Any]:
    return {**stats, 'env/reward_mean': sum(map(float, rewards)) / len(rewards)}


def theirs(program: str, arguments: list[str]) -> None:
    has_trl = importlib.util.find_spec('trl') is not None
    if has_trl:
        wrap('transformers:Trainer', 'log', lambda logs, *_: logs)
        wrap('trl:PPOTrainer', 'log_stats', of_step)
    else:
        import transformers
        from compat_trlx_peer import module, stand_ins

        stand_ins()
        module('wandb', Table=lambda **_: None, Histogram=lambda *_: None, run=None)
        wrap('accelerate:Accelerator', 'log', lambda values, *_: values)
        plain = transformers.pipeline
        transformers.pipeline = lambda *a, **k: plain(*a, **k | {'device': -1})  # the programs ask for a GPU
    sys.argv, sys.path[0] = [program, *arguments], str(Path(program).resolve().parent)
    runpy.run_path(program, run_name='__main__')


def ours(program: str, arguments: list[str]) -> None:
    from chatgpt_compat.runner import run

    wrap('chatgpt_compat.trl.training:LaterTrainer', 'log', lambda logs, *_: logs)
    wrap('chatgpt_compat.trl.ppo_step:ClassicPPOTrainer', 'log_stats', of_step)
    if run(program, arguments):
        raise SystemExit(f'{program} failed')
    for file in (Path('ckpts', name) for name in ('metrics.jsonl', 'eval.jsonl')):
        for line in file.read_text().splitlines() if file.is_file() else ():
            note(json.loads(line))


def main() -> None:
    side, out, program, *arguments = sys.argv[1:]
    {'theirs': theirs, 'ours': ours}[side](program, arguments)
    Path(out).write_text(json.dumps(LOGGED))


if __name__ == '__main__':
    main()
