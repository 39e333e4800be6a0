"""Freed host memory stays with the process: on a CPU, activations are allocated and freed all the time.

glibc gives large freed blocks back to the kernel, which hands them out again page by page and zeroed; that is a
twentieth of a PPO update and more. A setting of the user's own (`MALLOC_...` or `GLIBC_TUNABLES`) is left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 1 << 30
"""so much may lie free at the end of the heap"""
LARGEST_BLOCK = 1 << 28
"""larger ones are still mapped and given back one by one"""

_USERS_OWN = ('MALLOC_TRIM_THRESHOLD_', 'MALLOC_MMAP_THRESHOLD_', 'GLIBC_TUNABLES', 'LD_PRELOAD')


def keep_freed_memory() -> bool:
    """Tell glibc, for the whole process; False where there is none or the user has settings of their own."""
    if not sys.platform.startswith('linux') or any(name in os.environ for name in _USERS_OWN):
        return False
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is None:
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK))
