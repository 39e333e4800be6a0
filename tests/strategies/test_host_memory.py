"""Freed memory stays with a CPU process, unless the user has a setting of their own. Each case in a process of its
own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import resource, torch
from chatgpt.strategies.machine import keep_freed_memory
told = keep_freed_memory()
def use():
    blocks = [torch.ones(1 << 21) for _ in range(8)]
for _ in range(4): use()  # until the heap has found its shape
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4): use()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(('MALLOC_', 'GLIBC_', 'LD_PRELOAD'))}
    told, count = subprocess.run(
        [sys.executable, '-c', CODE], env=clean | env, capture_output=True, text=True, check=True
    ).stdout.split()
    return told == 'True', int(count)


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='mallopt is of glibc')
def test_freed_blocks_are_used_again():
    told, count = faults()
    if not told:
        pytest.skip('this C library has no mallopt')
    assert count < 2000  # of the 64 MiB x 4 that are filled; 65536 pages when given back in between
    told, given_back = faults(MALLOC_TRIM_THRESHOLD_='131072', MALLOC_MMAP_THRESHOLD_='131072')
    assert not told and given_back > 10 * count
