"""Rollout workers without Ray, each in a thread, or in a separate process that can be killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.remote import WorkerDied
from chatgpt.rollout.vllm_worker import make_worker

STAND_IN = Path(__file__).parent / 'stand_in'
"""folder of the fake vLLM package"""

_worker: Any = None  # the worker of this process


def _make(spec: Any, options: Mapping[str, Any], around: Any) -> Any:
    fetch = lambda bucket: torch.from_numpy(bucket.copy())  # noqa: E731
    return make_worker(spec, options, fetch=fetch, device='cpu', around=around)


def _init_process(environment: Mapping[str, str], *arguments: Any) -> None:
    global _worker
    os.environ.update(environment)  # the fork server has the environment of its start
    _worker = _make(*arguments)


def _call_worker(method: str, args: Any) -> Any:
    return getattr(_worker, method)(*args)


class SpawnedWorkers:
    """Implements `RolloutWorkers`. spawn: run each worker in a process."""

    beside = True

    def __init__(self, num_workers: int, resources: Mapping[str, float] | None = None, *, spawn: bool = False) -> None:
        self.spawn = spawn
        self.num_workers, self.resources = num_workers, dict(resources or {})
        self.calls: list[tuple[int, str]] = []
        """(worker, method) in order"""
        self._workers: list[tuple[Any, Any]] = []

    def start(self, spec: Any, engine_options: Mapping[str, Any], around: Any = None) -> None:
        self._arguments = spec, engine_options, around
        self._workers = [self._new() for _ in range(self.num_workers)]

    def _new(self) -> tuple[Any, Any]:
        """Returns the executor of a worker's calls, and the worker if it is in this process."""
        if not self.spawn:
            return ThreadPoolExecutor(1), _make(*self._arguments)
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(['chatgpt.rollout.vllm_worker', 'chatgpt.testing', 'transformers.models.gpt2'])
        environment = {name: value for name, value in os.environ.items() if name.startswith(('STAND_IN', 'VLLM'))}
        return ProcessPoolExecutor(1, context, _init_process, (environment, *self._arguments)), None

    def put(self, bucket: Tensor) -> Any:
        return bucket.clone().numpy()

    def submit(self, worker: int, request: Any) -> Any:
        return self.call(worker, 'generate', request)

    def call(self, worker: int, method: str, *args: Any) -> Any:
        self.calls.append((worker, method))
        pool, here = self._workers[worker]
        try:
            if here is None:
                return pool.submit(_call_worker, method, args)
            return pool.submit(getattr(here, method), *pickle.loads(pickle.dumps(args)))
        except BrokenExecutor as error:
            dead: Future[Any] = Future()
            dead.set_exception(error)
            return dead

    def wait(self, handle: Any) -> Any:
        try:
            return handle.result()
        except BrokenExecutor as error:
            raise WorkerDied('its process ended') from error

    def cancel(self, handle: Any) -> None:
        pass

    def kill(self, worker: int) -> None:
        pool, _ = self._workers[worker]
        for process in (getattr(pool, '_processes', None) or {}).values():
            process.kill()
        pool.shutdown()

    def replace(self, worker: int) -> None:
        self.kill(worker)
        self._workers[worker] = self._new()

    def close(self) -> None:
        for worker in range(len(self._workers)):
            self.kill(worker)
        self._workers.clear()
