"""The machine that a run is on, and the advice at the end of an out-of-memory error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypedDict

import torch

from chatgpt.plan.setup import Setup

OUT_OF_CPU_MEMORY = ("can't allocate memory", 'Cannot allocate memory')
"""what torch's CPU allocator says, in a plain RuntimeError"""


class Machine(TypedDict):
    """Memory limits, as `Setup` takes them."""

    on_cuda: bool
    memory: int | None
    host_memory: int | None


def this_machine() -> Machine:
    """The first device and the host, which a container may have been given less of."""
    on_cuda = torch.cuda.is_available()
    host = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') if hasattr(os, 'sysconf') else None
    for name in ('memory.max', 'memory/memory.limit_in_bytes'):
        limit = Path('/sys/fs/cgroup', name)
        text = limit.read_text().strip() if limit.is_file() else ''
        if text.isdigit() and host is not None:
            host = min(host, int(text))
    memory = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory) if on_cuda else None
    return {'on_cuda': on_cuda, 'memory': memory, 'host_memory': host}


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_CPU_MEMORY)
    )


def note_on_memory(error: BaseException, make_setup: Any) -> None:
    """Let an out-of-memory error end with what the run needs and the cheapest change that makes it fit."""
    from chatgpt.plan.advice import explain_out_of_memory

    if not is_out_of_memory(error):
        return
    try:
        setup: Setup | None = make_setup()
    except Exception:  # the advice must not hide the error it is about
        setup = None
    error.add_note(explain_out_of_memory(setup, error))
