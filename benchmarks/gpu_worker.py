"""A process that does one part of gpu_check.py after another, so that torch and transformers are imported once.

It says {"ready": {...}} and answers each line of JSON, {"function", "options", "out", "seconds"}, with {"status": "passed"
| "left out" | "failed", "reason", "held"}. `function` is one of gpu_parts.py; its numbers go to `out` as they come. What
is printed goes to stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


class Note:
    """Where a part writes its numbers, and what it runs on."""

    def __init__(self, device: Any, out: Path, seconds: float) -> None:
        self.device, self.out = device, out
        self._end = time.monotonic() + seconds
        self.content: dict[str, Any] = {}

    def left(self) -> float:
        """Seconds before the part is ended."""
        return self._end - time.monotonic()

    def write(self, **entries: Any) -> None:
        """Keep these, now."""
        from harness import write_json

        self.content |= entries
        write_json(self.out, self.content)

    @property
    def card(self) -> int | None:
        """Bytes of the device; None on a CPU."""
        import torch

        on_cuda = self.device.type == 'cuda'
        return torch.cuda.get_device_properties(self.device).total_memory if on_cuda else None


def do(task: dict[str, Any], device: Any) -> dict[str, Any]:
    """One part, and room for the next."""
    import gpu_parts
    import torch

    note = Note(device, Path(task['out']), task['seconds'])
    try:
        gpu_parts.FUNCTIONS[task['function']](note, **task['options'])
        answer: dict[str, Any] = {'status': 'passed'}
    except gpu_parts.LeftOut as reason:
        answer = {'status': 'left out', 'reason': str(reason)}
    except Exception as error:
        traceback.print_exc()
        lacks = isinstance(error, ImportError) and 'nvcc' in str(error)  # ColossalAI compiles Gemini's optimizer
        answer = {
            'status': 'left out' if lacks else 'failed',
            'reason': f'{type(error).__name__}: {" ".join(str(error).split())}'[:300],
        }
    gc.collect()
    answer['held'] = 0
    if device.type == 'cuda':
        torch.cuda.empty_cache()
        answer['held'] = torch.cuda.memory_allocated(device)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', choices=('cuda', 'cpu'), required=True)
    args = parser.parse_args()
    start = time.perf_counter()
    out = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + '\n')
        out.flush()

    import torch
    from harness import machine

    import chatgpt.trainer  # noqa: F401

    if args.device == 'cuda' and not torch.cuda.is_available():
        say({'ready': None})
        return
    device = torch.device('cuda:0' if args.device == 'cuda' else 'cpu')
    say({'ready': machine(device) | {'import_s': round(time.perf_counter() - start, 1)}})
    for line in sys.stdin:
        say(do(json.loads(line), device))


if __name__ == '__main__':
    main()
