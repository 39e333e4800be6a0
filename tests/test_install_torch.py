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


@pytest.mark.parametrize(
    ('text', 'code', 'number'), [('GPU 0: A\\n', 0, 1), ('No devices were found\\n', 6, 0), ('', 0, 0)]
)
def test_only_listed_gpus_count(script, text, code, number, tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', nvidia_smi(tmp_path, text, code)['PATH'])
    assert script['gpus']() == number


def test_without_a_gpu_it_is_the_cpu_build_where_its_index_answers(script, monkeypatch):
    choose = script['choose']
    for answers, want in ((True, CPU), (False, None)):
        monkeypatch.setitem(choose.__globals__, 'answers', lambda index, a=answers: a)
        index, why = choose(None, 0, 'Linux')
        assert index == want and why.startswith('the CPU build' if answers else 'the default build')
    monkeypatch.setitem(choose.__globals__, 'answers', lambda index: pytest.fail('asked'))
    assert choose(None, 0, 'Darwin')[0] is None
    assert choose('https://host/whl', 4, 'Linux') == ('https://host/whl', 'from https://host/whl, as TORCH_INDEX says')


def test_an_index_that_does_not_answer_is_no_error(script):
    assert script['answers']('http://127.0.0.1:9') is False


@pytest.mark.parametrize(('cuda', 'number', 'warned'), [('', 1, True), ('13.0', 1, False), ('', 0, False)])
def test_what_was_installed_is_said_and_a_gpu_without_cuda_is_warned_of(
    script, cuda, number, warned, tmp_path, monkeypatch, capsys
):
    calls = []

    def run(command, **_):
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=f'2.13.0+x {cuda}\n')

    main = script['main']
    monkeypatch.setitem(main.__globals__, 'gpus', lambda: number)
    monkeypatch.setitem(main.__globals__, 'answers', lambda index: True)
    monkeypatch.delenv('TORCH_INDEX', raising=False)
    monkeypatch.setattr(subprocess, 'run', run)
    monkeypatch.setattr(sys, 'argv', ['install_torch.py'])
    main()
    assert (calls[0][-2:] == ['--extra-index-url', CPU]) == (not number)
    out, err = capsys.readouterr()
    assert f'torch 2.13.0+x is installed: {"CUDA 13.0" if cuda else "a CPU build"}' in out
    assert ('the GPU stays idle' in err) == warned


def test_the_readme_has_the_one_line_for_the_cpu_build(script):
    assert f'pip install {script["pinned"]()} --index-url {CPU}' in (ROOT / 'README.md').read_text()
