"""The child of capacity.py: one rung of a ladder trains one PPO phase under a cap on memory, in a process of its own.

    python benchmarks/capacity_rung.py \\
        '{"settings": {...}, "ladder": "gpt", "rung": "s", "memory": N, "host_memory": M, "out": FILE}'

On CUDA the device's cap is the limit of torch's allocator, so memory that it does not manage (the CUDA context, NCCL's
buffers) is not counted; what asks the device for its free memory is told of the cap. The host's is RLIMIT_DATA, and
pinned memory, which that limit does not see, is added up afterwards. On a CPU there is one cap, RLIMIT_DATA, above what
the process holds before any model exists. The outcome is written to `out` as JSON; a process that is killed writes
none.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import dummy
from harness import process_memory, write_json


def cap_process(extra: int) -> None:
    """Let this process take `extra` bytes of private memory more than it has now."""
    limit = process_memory().get('VmData', 0) + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def cap_allocator(memory: int, device: Any) -> None:
    """Let torch's allocator have `memory` bytes of the device, and whoever asks for its free memory be told so."""
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    if memory > total:
        raise ValueError(f'memory={memory} is more than the {total} bytes that the device has')
    torch.cuda.set_per_process_memory_fraction(memory / total, device)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return max(memory - torch.cuda.memory_reserved(device), 0), memory

    torch.cuda.mem_get_info = mem_get_info  # the strategies decide by it what to stream and to offload


def cap_cuda(memory: int, device: Any) -> None:
    """Make the device look and behave as one of `memory` bytes."""
    import torch

    cap_allocator(memory, device)
    try:
        from colossalai.legacy.utils.memory import colo_set_process_memory_fraction
    except ImportError:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    colo_set_process_memory_fraction(memory / total)  # Gemini's own record of the same


def outcome_of(error: BaseException, on_cuda: bool) -> dict[str, Any]:
    """Which limit an exception means; `limit` is None where it is not about memory."""
    import torch

    text = ' '.join(str(error).split())
    words = text.lower()
    # the last two are oneDNN's, which says no more
    host_words = (
        "can't allocate memory",
        'cannot allocate memory',
        'bad_alloc',
        'not enough memory',
        'could not create a memory object',
        'could not create a primitive',
    )
    if isinstance(error, torch.OutOfMemoryError) or 'cuda out of memory' in words:
        limit = 'device memory'
    elif isinstance(error, MemoryError) or any(w in words for w in host_words) or getattr(error, 'errno', None) == 12:
        limit = 'host memory' if on_cuda else 'memory'
    else:
        limit = None
    return {'trained': False, 'limit': limit, 'message': f'{type(error).__name__}: {text}'[:400]}


def attempt(spec: dict[str, Any]) -> dict[str, Any]:
    import torch

    on_cuda = torch.cuda.is_available()

    def ready(strategy: Any) -> None:
        if on_cuda:
            cap_cuda(spec['memory'], strategy.device)
            if spec['host_memory'] is not None:
                cap_process(spec['host_memory'])
        else:
            cap_process(spec['memory'])

    try:
        result = dummy.run(dummy.DummyRun(**spec['settings']), spec['ladder'], spec['rung'], ready=ready)
    except Exception as error:
        return outcome_of(error, on_cuda)
    memory = result['memory']
    host = memory['host_peak_over_start'] + memory.get('host_pinned', 0)
    outcome = {
        'trained': True,
        'limit': None,
        'peak': memory['peak'],
        'reserved': memory.get('reserved'),
        'host': host,
        'parameters': result['parameters'],
        'seconds': result['wall_s'],
        'machine': result['machine'],
        'precision': result['settings']['precision'],
    }
    if on_cuda and spec['host_memory'] is not None and host > spec['host_memory']:
        return outcome | {
            'trained': False,
            'limit': 'host memory',
            'message': f'it took {host} bytes of host memory, pinned ones counted',
        }
    return outcome


if __name__ == '__main__':
    given = json.loads(sys.argv[1])
    done = attempt(given)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.getrlimit(resource.RLIMIT_DATA)[1],) * 2)
    write_json(Path(given['out']), done)
    os._exit(0)  # after a failed allocation, teardown can only go wrong
