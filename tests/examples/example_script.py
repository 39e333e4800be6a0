"""Tools that run the examples in this process and in others."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chatgpt.launch.arguments import run_main
from chatgpt.testing.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / 'shared'
QUICK = (
    '--num_episodes=1 --max_timesteps=2 --update_timesteps=1 --experience_batch_size=4 --train_batch_size=4 '
    '--max_epochs=1 --max_new_tokens=4 --sample_interval=1'
).split()
REWARD = ['--reward_fn', f'{ROOT}/examples/rewards.py:joy']


def loaded(name: str) -> Any:
    """Imports an example."""
    spec = importlib.util.spec_from_file_location(name, ROOT / 'examples' / f'{name}.py')
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Runs an example's main with these flags in this process."""
    main = loaded(name).main
    monkeypatch.setattr(sys, 'argv', [name, *flags])
    run_main(main)


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    script('train_prompts', monkeypatch, *flags)


def error_of(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 2
) -> str:
    """Returns the error of a wrong command line, which must be the only line on stderr."""
    with pytest.raises(SystemExit) as stop:
        script(name, monkeypatch, *flags)
    assert stop.value.code == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith('error: ')
    return line


def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 2) -> str:
    return error_of('train_prompts', monkeypatch, capsys, *flags, code=code)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


def start(folder: Path, model: Path, *flags: str, ranks: int = 1) -> subprocess.Popen[str]:
    """Starts train_prompts.py in a process, or under torchrun."""
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONUNBUFFERED': '1'}
    launcher = f'-m torch.distributed.run --standalone --nproc_per_node {ranks}'.split() if ranks > 1 else []
    own = f'{ROOT}/examples/train_prompts.py --pretrain {model} --save_path {folder}'.split()
    command = [sys.executable, *launcher, *own, *QUICK, *flags]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def torchrun(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs an example on two processes under torchrun."""
    launcher = f'-m torch.distributed.run --nproc-per-node=2 --master-port={free_port()}'.split()
    command = [sys.executable, *launcher, f'{ROOT}/examples/{name}.py', *flags]
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    return subprocess.run(command, capture_output=True, text=True, env=env)
