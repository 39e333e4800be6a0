"""Rollout workers in this process, without Ray and threads, with simulated deaths, for tests of `RemoteEngine`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from chatgpt.rollout.remote import WorkerDied
from chatgpt.rollout.wire import ModelSpec, PackedSamples, Request
from chatgpt.rollout.worker import RolloutWorker


class InProcessWorkers:
    """`RolloutWorkers` that compute at `wait`.

    A request or call is answered at `wait` by its worker. `kill(worker)` loses the state; `die_on[index]` is how many
    times a worker dies at the request with this sample index.

    Where an engine asks which request is answered first, a clock says: a request takes its worker as many units of time
    as its longest response has tokens, times `slowness[worker]`.
    """

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers, self.beside = num_workers, False
        self.workers: list[RolloutWorker | None] = []
        self.die_on: dict[int, int] = {}
        self.answered: list[tuple[int, list[int]]] = []
        """(worker, sample indices) of each answer, in order"""
        self.die_at: dict[tuple[int, str, int | None], bool] = {}
        """(worker, method, number of the bucket) of calls at which a worker dies once"""
        self.called: list[tuple[int, str]] = []
        """(worker, method) of each call, in order"""
        self.most_queued = 0
        """largest number of requests in flight"""
        self.num_puts = 0
        self.slowness: dict[int, float] = {}
        self.now = 0.0
        self.closed = False
        self.live_bytes = self.most_live_bytes = 0
        """bytes of the buckets of `put` that exist, and the largest number of them so far"""
        self._queued: dict[int, tuple[int, RolloutWorker, Request]] = {}
        self._calls: dict[int, tuple[int, RolloutWorker, str, Any]] = {}
        self._timed: dict[int, tuple[float, PackedSamples]] = {}
        self._free_at: dict[int, float] = {}
        self._next = 0

    def start(self, spec: ModelSpec, engine_options: Mapping[str, Any], around: Any = None) -> None:
        assert not self.workers, 'started twice'
        self._make = lambda: RolloutWorker(spec, engine_options, device='cpu', around=around)
        self.workers = [self._make() for _ in range(self.num_workers)]

    def put(self, bucket: Tensor) -> Tensor:
        self.num_puts += 1
        stored, size = bucket.clone(), len(bucket)
        self.live_bytes += size
        self.most_live_bytes = max(self.most_live_bytes, self.live_bytes)
        weakref.finalize(stored, self._free, size)
        return stored

    def _free(self, size: int) -> None:
        self.live_bytes -= size

    def call(self, worker: int, method: str, *args: Any) -> int:
        alive = self.workers[worker]
        self._next += 1
        if alive is not None:
            self._calls[self._next] = worker, alive, method, args
        return self._next

    def submit(self, worker: int, request: Request) -> int:
        alive = self.workers[worker]
        self._next += 1
        if alive is not None:
            self._queued[self._next] = worker, alive, request
            self.most_queued = max(self.most_queued, len(self._queued))
        return self._next

    def ready(self, handle: int) -> bool:
        """Used by earlier versions of the package, which tests/fixed_runs compares with."""
        return handle not in self._queued

    def first(self, handles: list[int], timeout_s: float | None = None) -> int:
        for handle in handles:
            if handle in self._timed:
                continue
            if handle not in self._queued or self.die_on.keys() & set(self._queued[handle][2].call.indices):
                return handles.index(handle)  # a dead worker is noticed at once
            number, worker, request = self._queued[handle]
            packed = worker.generate(request)
            start = max(self.now, self._free_at.get(number, 0.0))
            end = start + int(packed.lengths.max()) * self.slowness.get(number, 1.0)
            self._free_at[number], self._timed[handle] = end, (end, packed)
        earliest = min(handles, key=lambda handle: self._timed[handle][0])
        self.now = self._timed[earliest][0]
        return handles.index(earliest)

    def add(self) -> None:
        self.workers.append(self._make())
        self.num_workers += 1

    def wait(self, handle: int) -> Any:
        if handle in self._calls:
            number, alive, method, args = self._calls.pop(handle)
            self.called.append((number, method))
            if self.die_at.pop((number, method, args[0] if method == 'fetch_bucket' else None), None):
                self.kill(number)
                raise WorkerDied(f'in {method}')
            return getattr(alive, method)(*args)
        if handle not in self._queued:
            raise WorkerDied('killed')
        number, worker, request = self._queued[handle]
        for index in request.call.indices:
            if self.die_on.get(index, 0) > 0:
                self.die_on[index] -= 1
                if not self.die_on[index]:
                    del self.die_on[index]
                self.kill(number)
                raise WorkerDied(f'of sample {index}')
        del self._queued[handle]
        packed = self._timed.pop(handle)[1] if handle in self._timed else worker.generate(request)
        self.answered.append((number, list(request.call.indices)))
        return packed

    def cancel(self, handle: int) -> None:
        self._queued.pop(handle, None)

    def kill(self, worker: int) -> None:
        """Removes the worker with its weights and requests."""
        self.workers[worker] = None
        self._queued = {h: entry for h, entry in self._queued.items() if entry[0] != worker}
        self._calls = {h: entry for h, entry in self._calls.items() if entry[0] != worker}

    def replace(self, worker: int) -> None:
        assert self.workers[worker] is None, 'a living worker is replaced'
        self.workers[worker] = self._make()

    def close(self) -> None:
        self.closed = True
        self.workers.clear()
        self._queued.clear()
