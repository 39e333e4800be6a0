"""examples/train_prompts.py in this process and in others."""

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

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / 'examples' / 'train_prompts.py'
SHARED = ROOT.parent / 'shared'
QUICK = [
    '--num_episodes=1',
    '--max_timesteps=2',
    '--update_timesteps=1',
    '--experience_batch_size=4',
    '--train_batch_size=4',
    '--max_epochs=1',
    '--max_new_tokens=4',
    '--sample_interval=1',
]
REWARD = ['--reward_fn', f'{ROOT / "examples" / "rewards.py"}:joy']


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """The script's main with these flags, in this process."""
    spec = importlib.util.spec_from_file_location('train_prompts', SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, 'argv', [str(SCRIPT), *flags])
    run_main(module.main)


def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 2) -> str:
    """The one line that a wrong command line ends with; nothing else may be on stderr."""
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *flags)
    assert stop.value.code == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith('error: ')
    return lines[0]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def start(folder: Path, model: Path, *flags: str, ranks: int = 1) -> subprocess.Popen[str]:
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONUNBUFFERED': '1'}
    launcher = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', str(ranks)] if ranks > 1 else []
    command = [
        sys.executable,
        *launcher,
        str(SCRIPT),
        *QUICK,
        '--pretrain',
        str(model),
        '--save_path',
        str(folder),
        *flags,
    ]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
