"""The end of a process that has used gloo: its threads finish while the interpreter is still whole.

A gloo thread drops the tensors of a finished collective a moment after the caller has gone on, and needs the
interpreter's lock for it. If the interpreter is already being taken down, Python ends that thread in the middle of a
C++ destructor, and the process dies with "terminate called without an active exception" (SIGABRT) after its work is
done. Leaving the group is not enough: torch keeps it, threads and all, once DistributedDataParallel has used it (2.13).
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

import torch.distributed as dist

QUIET_S = 0.1
"""how long the threads must not have moved: a busy machine leaves one that could run waiting for some tens of
milliseconds"""
LIMIT_S = 5.0
"""how long a thread that does not come to rest is waited for"""
THREAD = 'pt_gloo_runloop'
FIELDS = ('Pid', 'State', 'voluntary_ctxt_switches', 'nonvoluntary_ctxt_switches')


def finish_gloo_at_exit() -> None:
    """Leave the gloo group before the interpreter is taken down, and let its threads end. May be called more than
    once."""
    atexit.unregister(_finish)
    atexit.register(_finish)


def _finish() -> None:
    if dist.is_initialized() and dist.get_backend() == 'gloo':
        dist.destroy_process_group()
    end = time.monotonic() + LIMIT_S
    before = _activity()
    while before and time.monotonic() < end:
        time.sleep(QUIET_S)  # without the interpreter's lock
        now = _activity()
        if now == before and not any('running' in state for state in now):
            return
        before = now


def _activity() -> list[str]:
    """For each of gloo's threads in this process: whether it sleeps, and how often it has been put on and taken off a
    processor.

    Empty where the system has no /proc, or where the group ended with its threads.
    """
    found = []
    for task in sorted(Path('/proc/self/task').glob('*')):
        try:
            lines = (task / 'status').read_text().splitlines()
        except OSError:  # ended meanwhile
            continue
        fields = {name: value.strip() for name, _, value in (line.partition(':') for line in lines)}
        if fields.get('Name') == THREAD:
            found.append(' '.join(fields.get(name, '') for name in FIELDS))
    return found
