"""Properties of this machine: instructions of its processor, default device, handling of freed memory.

All code that depends on the processor's instructions calls `processor`. The variable CHATGPT_PROCESSOR overrides it, so
that tests behave the same on every machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

VARIABLE = 'CHATGPT_PROCESSOR'
WIDTHS = ('default', 'avx2', 'avx512')
"""widths of vectors, by their names in ATEN_CPU_CAPABILITY for x86 processors"""
BEFORE_BF16 = frozenset(('SSE41', 'AVX', 'AVX2', 'AVX2_VNNI', 'AVX2_VNNI_2', 'AVX512_CORE', 'AVX512_CORE_VNNI'))
"""values of ONEDNN_MAX_CPU_ISA with which oneDNN has no matrix products in 16 bits"""


class Processor(NamedTuple):
    """The instructions of a processor.

    Args:
        vectors: the widest vectors that torch uses, one of `WIDTHS`.
        bf16: True if it has instructions for matrix products in bf16 that oneDNN may use.
        fp16: True if it has instructions for matrix products in fp16 that oneDNN may use.
    """

    vectors: str
    bf16: bool
    fp16: bool

    def __str__(self) -> str:
        return ','.join((self.vectors, *(name for name in ('bf16', 'fp16') if getattr(self, name))))


def processor() -> Processor:
    """Returns this machine's processor, or the one in CHATGPT_PROCESSOR, such as 'avx512,bf16,fp16' or 'avx2'.

    Raises:
        ValueError: if CHATGPT_PROCESSOR cannot be parsed.
    """
    if not (given := os.environ.get(VARIABLE)):
        return Processor(torch.backends.cpu.get_cpu_capability().lower(), _multiplies('bf16'), _multiplies('fp16'))
    width, *kinds = given.split(',')
    if width not in WIDTHS or not set(kinds) <= {'bf16', 'fp16'}:
        raise ValueError(
            f"{VARIABLE}={given!r}: give one of {', '.join(WIDTHS)}, then bf16 and fp16 if it has them: 'avx512,bf16'"
        )
    return Processor(width, 'bf16' in kinds, 'fp16' in kinds)


def _multiplies(kind: str) -> bool:
    limit = (os.environ.get('ONEDNN_MAX_CPU_ISA') or os.environ.get('DNNL_MAX_CPU_ISA') or 'ALL').upper()
    supported = getattr(torch.ops.mkldnn, f'_is_mkldnn_{kind}_supported', None)  # True if torch calls oneDNN for it
    if supported is None or not supported() or limit in BEFORE_BF16 or (kind == 'fp16' and limit == 'AVX512_CORE_BF16'):
        return False
    found = torch.cpu.get_capabilities()
    return found.get('architecture') not in ('x86_64', 'x86') or any(
        bool(found.get(f'{family}_{kind}')) for family in ('amx', 'avx512')
    )


def default_device() -> str:
    """Returns 'cuda' if torch has a CUDA device, else 'cpu', with a warning from local rank 0 about unused GPUs."""
    if torch.cuda.is_available():
        return 'cuda'
    if os.environ.get('LOCAL_RANK', '0') == '0' and (message := unused_card()):
        warnings.warn(message, stacklevel=5)
    return 'cpu'


@cache
def unused_card() -> str | None:
    """Returns a line for the installation, the start of a run and the doctor if nvidia-smi lists a GPU that torch
    cannot use; None if CUDA_VISIBLE_DEVICES hides all."""
    if torch.cuda.is_available():
        return None
    program = shutil.which('nvidia-smi')
    if program is None or os.environ.get('CUDA_VISIBLE_DEVICES', '0').strip() in ('', '-1'):
        return None
    query = [program, '--query-gpu=name,driver_version', '--format=csv,noheader']
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        name, driver = listed.splitlines()[0].rsplit(', ', 1)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None  # no GPU
    built = torch.version.cuda
    why = (
        f'torch {torch.__version__} is a build without CUDA'
        if built is None
        else f'torch {torch.__version__} is built for CUDA {built}, for which driver {driver} is too old, most likely'
    )
    return (
        f'this machine has an {name} (driver {driver}), and the run goes to the CPU, many times slower: {why}. Install '
        'a build of torch that fits the driver (https://pytorch.org/get-started/locally)'
        + ('' if built is None else ', or a newer driver')
        + '; CUDA_VISIBLE_DEVICES= (empty) asks for the CPU'
    )


@contextmanager
def all_cores() -> Iterator[None]:
    """A context in which this process has at least its share of the machine's cores as threads; launchers set one."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    torch.set_num_threads(max(before, cores // int(os.environ.get('LOCAL_WORLD_SIZE', '1'))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def grow_segments() -> bool:
    """Configures torch's CUDA allocator to grow its segments, so that batches of varying length do not fragment it.
    Returns False if the user has set it up, or torch has no such setting. `VLLMEngine` sets it back where vLLM sleeps.
    """
    setting = getattr(torch._C, '_accelerator_setAllocatorSettings', None)
    if setting is None or any(name in os.environ for name in ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')):
        return False
    setting('expandable_segments:True')
    return True


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 1 << 30
"""bytes that may be free at the end of the heap"""
LARGEST_BLOCK = 1 << 28
"""bytes; larger blocks are still mapped, and returned to the kernel when freed"""
TRIM_INTERVAL_S, TRIM_FACTOR = 0.25, 1.05
"""seconds between two looks at the size of the process, and its growth after which freed memory is returned"""
_USER_SETTINGS = ('MALLOC_TRIM_THRESHOLD_', 'MALLOC_MMAP_THRESHOLD_', 'GLIBC_TUNABLES', 'LD_PRELOAD')


def keep_freed_memory() -> bool:
    """Configures glibc to keep freed memory in the process, up to about 5% of the most that was in use at once. Returns
    False without glibc, or if the user has set it up.

    By default glibc returns large freed blocks to the kernel, which zeroes their pages before they are used again. On a
    CPU, where activations are allocated and freed all the time, that takes 5% of a PPO update and more. Without a limit
    the freed blocks that no later tensor fits into accumulate, up to 80% of what is in use.
    """
    if not sys.platform.startswith('linux') or any(name in os.environ for name in _USER_SETTINGS):
        return False
    libc, name = ctypes.CDLL(None), 'malloc-trim'
    if not hasattr(libc, 'mallopt') or not hasattr(libc, 'malloc_trim'):
        return False
    if all(thread.name != name for thread in threading.enumerate()):
        threading.Thread(target=_limit_freed_memory, args=(libc.malloc_trim,), name=name, daemon=True).start()
    return bool(libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)) and bool(libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK))


def _limit_freed_memory(trim: Callable[[int], int]) -> None:
    needed = 0
    while True:
        time.sleep(TRIM_INTERVAL_S)
        needed = _trimmed(trim, needed)


def _trimmed(trim: Callable[[int], int], needed: int) -> int:
    """Calls `malloc_trim`, which returns freed memory to the kernel, if the process is more than 5% larger than
    `needed`. Returns the larger of `needed` and the size that is left, in pages."""
    if _resident_pages() <= TRIM_FACTOR * needed:
        return needed
    trim(0)
    return max(needed, _resident_pages())


def _resident_pages() -> int:
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1])
