"""Which build of torch `make` installs, by what nvidia-smi shows."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CPU = 'https://download.pytorch.org/whl/cpu'


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / 'install_torch.py'))


def nvidia_smi(folder: Path, text: str, code: int = 0) -> dict[str, str]:
    """An environment whose nvidia-smi says this."""
    tool = folder / 'nvidia-smi'
    tool.write_text(f'#!/bin/sh\n[ "$1" = -L ] && printf \'{text}\'\nexit {code}\n')
    tool.chmod(0o755)
    return {**os.environ, 'PATH': f'{folder}{os.pathsep}{os.environ["PATH"]}'}


def test_a_machine_with_gpus_gets_the_default_build_and_says_so(script, tmp_path):
    env = nvidia_smi(tmp_path, r'GPU 0: NVIDIA H200 (UUID: a)\nGPU 1: NVIDIA H200 (UUID: b)\n')
    env.pop('TORCH_INDEX', None)
    done = subprocess.run(
        [sys.executable, str(ROOT / 'install_torch.py'), '--dry-run'], env=env, capture_output=True, text=True
    )
    (said, command), pin = done.stdout.splitlines(), script['pinned']()
    assert said == f'{pin}: the default build, which has CUDA on Linux, for nvidia-smi shows 2 GPUs'
    assert command.endswith(pin) and 'index' not in command


def test_without_a_gpu_it_is_the_cpu_build_where_its_index_answers(script, monkeypatch):
    choose = script['choose']
    for answers, want in ((True, CPU), (False, None)):
        monkeypatch.setitem(choose.__globals__, 'answers', lambda index, a=answers: a)
        index, why = choose(None, 0, 'Linux')
        assert index == want and why.startswith('the CPU build' if answers else 'the default build')
    monkeypatch.setitem(choose.__globals__, 'answers', lambda index: pytest.fail('asked'))
    assert choose(None, 0, 'Darwin')[0] is None
    assert script['answers']('http://127.0.0.1:9') is False
    assert choose('https://host/whl', 4, 'Linux') == ('https://host/whl', 'from https://host/whl, as TORCH_INDEX says')
