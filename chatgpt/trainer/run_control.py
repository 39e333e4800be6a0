"""Orderly stops by signals, clocks of phases, and checks between ranks.

The first SIGINT or SIGTERM requests a stop at the next safe point, where the run saves and exits; a second SIGINT stops
at once. All ranks agree on the safe point.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from chatgpt.monitor.run_folder.differences import leaves
from chatgpt.strategies.base import Strategy

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Context that records the first signal. Installs nothing outside the main thread, which alone can handle
    signals."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._old: dict[signal.Signals, Any] = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(signum)
            print(
                f'\n{self.received.name}: stopping at the next safe point (Ctrl-C again stops at once)',
                file=sys.stderr,
                flush=True,
            )

    def __enter__(self) -> StopSignals:
        self.received = None
        if threading.current_thread() is threading.main_thread():
            for signum in HANDLED:
                self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._old.items():
            if handler is not None:  # one that was not set from Python
                signal.signal(signum, handler)
        self._old.clear()

    def agree(self, strategy: Strategy) -> bool:
        """Gives every rank the signal that one of them has received, and returns True if there is one. A collective."""
        number = int(self.received or 0)
        if strategy.processes.world_size > 1:
            own = torch.tensor(float(number), device=strategy.device)
            number = int(strategy.all_reduce(own, op='max').item())
            if number:  # else one that arrives meanwhile stays
                self.received = signal.Signals(number)
        return number > 0

    def raise_received(self) -> None:
        """Ends the process as the signal does: KeyboardInterrupt, or exit code 128 + its number."""
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + int(self.received))


def agreed(flag: bool, strategy: Strategy) -> bool:
    """Returns True on every rank if `flag` is True on any."""
    if strategy.processes.world_size == 1:
        return flag
    return bool(strategy.all_reduce(torch.tensor(float(flag), device=strategy.device), op='max').item() > 0)


class PhaseClock:
    """Wall and CPU seconds of the parts of a phase: collect, score, learn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._since: float | None = None
        """end of the measured parts of the previous phase, or start of the first part of this run"""

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        self._synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        self._since = wall if self._since is None else self._since
        try:
            yield
        finally:
            self._synchronize()
            self.wall[part] = self.wall.get(part, 0.0) + time.perf_counter() - wall
            self.cpu[part] = self.cpu.get(part, 0.0) + time.process_time() - cpu

    def _synchronize(self) -> None:
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)

    def metrics(self) -> dict[str, float]:
        """Returns `perf/<part>_s`, `perf/<part>_cpu_s`, `perf/total_s`, `perf/other_s` and the peak memory so far. Call
        once per phase, after its parts."""
        result = {f'perf/{part}_s': seconds for part, seconds in self.wall.items()}
        result |= {f'perf/{part}_cpu_s': seconds for part, seconds in self.cpu.items()}
        result['perf/total_s'] = sum(self.wall.values())
        now = time.perf_counter()
        result['perf/other_s'] = max(now - (now if self._since is None else self._since) - result['perf/total_s'], 0.0)
        self._since = now
        if self.device.type == 'cuda':
            result['perf/peak_memory_gib'] = torch.cuda.max_memory_allocated(self.device) / 2**30
        else:
            unit = 1 if sys.platform == 'darwin' else 1024  # ru_maxrss is in bytes on macOS, KiB elsewhere
            result['perf/peak_memory_gib'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
        return result

    def reset(self) -> None:
        self.wall.clear()
        self.cpu.clear()


MAY_DIFFER = ('callbacks', 'reward', 'initial_model')
"""state that may differ between ranks: some callbacks write files and count on rank 0 alone; a reward function is
called only there, and may hold a device or a rank; a model's folder may be one of its machine"""
MAX_SHOWN = 4


class RankMismatchError(RuntimeError):
    """Ranks have different settings, data or positions. The message names ranks and values."""


def check_ranks(strategy: Strategy, facts: Mapping[str, Any], where: str) -> None:
    """Compares nested `facts` between ranks. A collective; does nothing on one process.

    Raises:
        RankMismatchError: on every rank, with the same message.
    """
    if strategy.processes.world_size == 1:
        return
    everyone = strategy.processes.all_gather_object({key: repr(value) for key, value in leaves(facts)})
    first = everyone[0]
    found = []
    for rank, theirs in enumerate(everyone):
        keys = [k for k in {**first, **theirs} if first.get(k) != theirs.get(k)]
        if keys:
            shown = ', '.join(
                f'{k} is {theirs.get(k, "not there")} instead of {first.get(k, "not there")}' for k in keys[:MAX_SHOWN]
            )
            found.append(
                f'on rank {rank} {shown}' + (f' and {len(keys) - MAX_SHOWN} more' if len(keys) > MAX_SHOWN else '')
            )
    if found:
        raise RankMismatchError(f'the ranks do not run the same run, seen {where}: {"; ".join(found)} (as on rank 0)')
