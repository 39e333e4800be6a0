"""Instructions of the processor, GPUs that torch cannot use, and freed memory that a CPU process keeps."""

from __future__ import annotations

import ast
import ctypes
import math
import os
import resource
import runpy
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import pretend_cuda

from chatgpt.strategies import NaiveStrategy, machine
from chatgpt.strategies.machine import Processor, grow_segments, processor, unused_card
from chatgpt.strategies.processes import ProcessGroup
from chatgpt.strategies.ranks import OneProcess
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks.run_record import this_start


@pytest.fixture
def found(monkeypatch):
    """Returns a function that sets the capabilities that torch reports and returns (bf16, fp16) of `processor`."""
    monkeypatch.delenv('CHATGPT_PROCESSOR')
    monkeypatch.delenv('ONEDNN_MAX_CPU_ISA', raising=False)
    monkeypatch.delenv('DNNL_MAX_CPU_ISA', raising=False)

    def ask(onednn: bool = True, architecture: str = 'x86_64', **capabilities: bool) -> tuple[bool, bool]:
        for kind in ('bf16', 'fp16'):
            monkeypatch.setattr(torch.ops.mkldnn, f'_is_mkldnn_{kind}_supported', lambda: onednn)
        monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: {'architecture': architecture, **capabilities})
        monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: 'AVX512')
        answer = processor()
        assert answer.vectors == 'avx512'
        return answer.bf16, answer.fp16

    return ask


def test_what_torch_finds(found, monkeypatch):
    assert found(avx512_f=True) == (False, False)
    assert found(avx512_f=True, avx512_bf16=True) == (True, False)
    assert found(amx_bf16=True, avx512_fp16=True) == (True, True)
    assert found(architecture='aarch64', bf16=True) == (True, True)
    assert found(onednn=False, amx_bf16=True, amx_fp16=True) == (False, False)
    for limit, can in (('AVX512_CORE', (False, False)), ('avx512_core_bf16', (True, False)), ('ALL', (True, True))):
        monkeypatch.setenv('ONEDNN_MAX_CPU_ISA', limit)
        assert found(avx512_bf16=True, avx512_fp16=True) == can


def test_the_variable_answers_in_its_place(monkeypatch):
    monkeypatch.setenv('ONEDNN_MAX_CPU_ISA', 'AVX2')
    answers = {
        'avx2': ('avx2', False, False),
        'avx512,bf16': ('avx512', True, False),
        'default,fp16': ('default', 0, 1),
    }
    for given, answer in answers.items():
        monkeypatch.setenv('CHATGPT_PROCESSOR', given)
        assert processor() == Processor(*answer) and str(processor()) == given
    for given in ('sse', 'bf16', 'avx2,int8', 'avx2;bf16'):
        monkeypatch.setenv('CHATGPT_PROCESSOR', given)
        with pytest.raises(ValueError, match=f"CHATGPT_PROCESSOR='{given}': give one of default, avx2, avx512"):
            processor()


def test_every_test_has_the_same_answer_and_ranks_have_it_too(without_16_bits):
    assert str(processor()) == os.environ['CHATGPT_PROCESSOR'] == 'avx2'
    assert run_distributed(processor, 1) == run_distributed(processor, 1, fresh=True) == [processor()]


QUERIES = {'get_capabilities', 'get_cpu_capability', '_is_avx512_supported', '_is_amx_tile_supported', '/proc/cpuinfo'}
ALLOWED = {'chatgpt/strategies/machine.py', 'tests/strategies/test_machine.py'}
ALLOWED |= {'chatgpt/trainer/callbacks/run_record.py', 'tests/fixed_runs/record.py'}  # record the processor's name


def test_nothing_else_asks_the_processor():
    """Searches both packages and the tests for the names in `QUERIES`."""
    root = Path(__file__).resolve().parents[2]
    found_in = set()
    for path in (p for folder in ('chatgpt', 'compat', 'tests') for p in (root / folder).rglob('*.py')):
        text = path.read_text()
        nodes = ast.walk(ast.parse(text)) if any(word in text for word in QUERIES) else ()
        if any(getattr(node, 'attr', getattr(node, 'value', None)) in QUERIES for node in nodes):
            found_in.add(path.relative_to(root).as_posix())
    assert found_in <= ALLOWED and 'chatgpt/strategies/machine.py' in found_in


CARD = 'echo "NVIDIA H100, 470.57.02"; echo "NVIDIA H100, 470.57.02"'


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def put(script: str) -> None:
        program = tmp_path / 'nvidia-smi'
        program.write_text(f'#!/bin/sh\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
        monkeypatch.setattr(torch, '__version__', '9.9')
        for name in ('CUDA_VISIBLE_DEVICES', 'LOCAL_RANK'):
            monkeypatch.delenv(name, raising=False)

    unused_card.cache_clear()
    yield put
    unused_card.cache_clear()


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert NaiveStrategy().device.type == 'cpu'
    return [str(w.message) for w in caught if 'NVIDIA' in str(w.message)]


@pytest.mark.parametrize(
    ('built', 'message'),
    [
        (None, 'torch 9.9 is a build without CUDA'),
        ('13.0', 'torch 9.9 is built for CUDA 13.0, for which driver 470.57.02'),
    ],
)
def test_a_card_that_stays_idle_is_named_with_both_versions(nvidia_smi, monkeypatch, built, message):
    nvidia_smi(CARD)
    monkeypatch.setattr(torch.version, 'cuda', built)
    (text,) = warned()
    assert 'NVIDIA H100 (driver 470.57.02), and the run goes to the CPU' in text and message in text


@pytest.mark.parametrize(
    ('script', 'name', 'value'),
    [('exit 9', '', ''), ('echo "No devices"', '', ''), (CARD, 'CUDA_VISIBLE_DEVICES', ''), (CARD, 'LOCAL_RANK', '1')],
)
def test_silent(nvidia_smi, monkeypatch, script, name, value):
    """No GPU, GPUs hidden by the user, and another process of the machine."""
    nvidia_smi(script)
    if name:
        monkeypatch.setenv(name, value)
    assert warned() == []


def faults() -> int:
    """Returns the page faults while 64 MiB are filled and freed four times."""

    def use() -> None:
        _ = [torch.ones(1 << 21) for _ in range(8)]

    for _ in range(4):  # warm-up of the heap
        use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def faults_by_setting() -> tuple[bool, int, bool, int]:
    """Returns results and page faults with glibc's defaults, one of which the user has set, and with the library's. The
    thread that limits what is kept makes no look meanwhile."""
    machine.TRIM_INTERVAL_S = 3600.0
    for name in [n for n in os.environ if n.startswith(('MALLOC_', 'GLIBC_', 'LD_PRELOAD'))]:
        del os.environ[name]
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    for threshold in (machine.M_TRIM_THRESHOLD, machine.M_MMAP_THRESHOLD) if mallopt else ():
        mallopt(threshold, 131072)
    os.environ['MALLOC_TRIM_THRESHOLD_'] = '131072'
    refused, given_back = machine.keep_freed_memory(), faults()
    del os.environ['MALLOC_TRIM_THRESHOLD_']
    return refused, given_back, machine.keep_freed_memory(), faults()


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='mallopt is of glibc')
def test_freed_blocks_are_used_again_unless_the_user_has_settings_of_their_own():
    [(with_the_users, given_back, changed, count)] = run_distributed(faults_by_setting, 1)
    if not changed:
        pytest.skip('this C library has no mallopt')
    assert count < 2000  # 65536 if memory is returned to the kernel in between
    assert not with_the_users and given_back > 10 * count


def growth(limited: bool) -> float:
    """Returns by how many MiB the process grew at most. Each of 8 rounds uses 100 MiB in blocks that are larger than
    the gaps which the rounds before it left. The thread's looks are made here, one after each round."""
    for name in [n for n in os.environ if n.startswith(('MALLOC_', 'GLIBC_', 'LD_PRELOAD'))]:
        del os.environ[name]
    machine.TRIM_INTERVAL_S = 3600.0
    if not machine.keep_freed_memory():
        return math.nan
    assert 'malloc-trim' in {thread.name for thread in threading.enumerate()}
    trim = ctypes.CDLL(None).malloc_trim
    pages, kept, needed = [machine._resident_pages()], [], machine._resident_pages()
    for size in range(8, 24, 2):
        blocks = []
        for _ in range(100 // size):
            blocks.append(torch.ones(size << 18))
            kept.append(torch.ones(1 << 10))
        pages.append(machine._resident_pages())
        del blocks
        if limited:
            needed = machine._trimmed(trim, needed)
    return (max(pages) - pages[0]) * resource.getpagesize() / 2**20


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='malloc_trim is of glibc')
def test_freed_blocks_that_nothing_fits_into_do_not_accumulate():
    [limited], [unlimited] = (run_distributed(growth, 1, choice) for choice in (True, False))
    if math.isnan(limited):
        pytest.skip('this C library has no malloc_trim')
    assert 90 < limited < unlimited / 2


def test_one_function_says_it_at_the_installation_in_processes_and_in_the_record_of_a_run(nvidia_smi, monkeypatch):
    nvidia_smi(CARD)
    line = unused_card()
    assert line is not None and 'NVIDIA H100 (driver 470.57.02)' in line and 'torch 9.9' in line
    with pytest.warns(UserWarning) as caught:
        assert ProcessGroup._choose_device(ProcessGroup.__new__(ProcessGroup), None).type == 'cpu'
    assert [str(w.message) for w in caught] == [line]
    assert this_start(0).machine['unused_card'] == line
    ran = []

    def run(command, **options):
        ran.append((command, options))
        return subprocess.CompletedProcess(command, 0, stdout='9.9')

    root = Path(__file__).resolve().parents[2]
    script = runpy.run_path(str(root / 'install_torch.py'))
    for name, value in (('gpus', lambda: 1), ('pinned', lambda: 'torch==9.9')):
        monkeypatch.setitem(script['main'].__globals__, name, value)
    monkeypatch.setattr(sys, 'argv', ['install_torch.py'])
    monkeypatch.setattr(subprocess, 'run', run)
    script['main']()
    command, options = ran[-1]
    assert 'machine import unused_card' in command[2] and options['cwd'] == root
    exec(command[2])  # as the installation calls it


def test_no_line_where_torch_sees_the_card(nvidia_smi, monkeypatch):
    nvidia_smi(CARD)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert unused_card() is None


@pytest.mark.parametrize('name', ['', 'PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'])
def test_segments_grow_on_a_gpu_unless_the_user_has_set_the_allocator_up(name, monkeypatch):
    given: list[str] = []
    monkeypatch.setattr(torch._C, '_accelerator_setAllocatorSettings', given.append)
    for variable in ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'):
        monkeypatch.delenv(variable, raising=False)
    if name:
        monkeypatch.setenv(name, 'backend:native')
    OneProcess('cpu')
    assert given == []
    with pretend_cuda():
        OneProcess('cuda:0')
    assert given == ([] if name else ['expandable_segments:True'])
    monkeypatch.delattr(torch._C, '_accelerator_setAllocatorSettings')
    assert grow_segments() is False
