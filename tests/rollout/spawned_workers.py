"""Rollout workers behind pipes, without Ray: asked in order, dead when the pipe ends. In threads, or in processes of
their own, which can be killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.remote import WorkerDied
from chatgpt.rollout.vllm_worker import make_worker


def _serve(pipe: Any, environment: Mapping[str, str], spec: Any, options: Mapping[str, Any], around: Any) -> None:
    os.environ.update(environment)  # a server that forks has that of its start

    def fetch(bucket: Any) -> Tensor:
        return torch.from_numpy(bucket.copy())

    worker = make_worker(spec, options, fetch=fetch, device='cpu', around=around)
    pipe.send((True, os.getpid()))
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        if method == 'end':
            pipe.close()
            return
        try:
            pipe.send((True, getattr(worker, method)(*args)))
        except Exception as error:
            pipe.send((False, error))


class SpawnedWorkers:
    """`RolloutWorkers`. `apart`: in processes."""

    def __init__(self, num_workers: int, resources: Mapping[str, float] | None = None, *, apart: bool = False) -> None:
        self.apart = apart
        self.num_workers, self.resources = num_workers, dict(resources or {})
        self.calls: list[tuple[int, str]] = []
        """(worker, method) in the order of asking"""
        self._workers: list[Any] = []

    def start(self, spec: Any, engine_options: Mapping[str, Any], around: Any = None) -> None:
        self._made_of = self.apart, spec, engine_options, around
        self._workers = [self._new() for _ in range(self.num_workers)]
        for worker in self._workers:
            self.wait(worker.ready)

    def _new(self) -> _Worker:
        return _Worker(*self._made_of)

    def put(self, bucket: Tensor) -> Any:
        return bucket.clone().numpy()

    def submit(self, worker: int, request: Any) -> Any:
        return self.call(worker, 'generate', request)

    def call(self, worker: int, method: str, *args: Any) -> Any:
        self.calls.append((worker, method))
        return self._workers[worker].ask(method, args)

    def host(self) -> str:
        return '127.0.0.1'

    def ready(self, handle: Any) -> bool:
        return handle.done()

    def wait(self, handle: Any) -> Any:
        return handle.result()

    def cancel(self, handle: Any) -> None:
        pass

    def kill(self, worker: int) -> None:
        self._workers[worker].end()

    def replace(self, worker: int) -> None:
        self.kill(worker)
        self._workers[worker] = self._new()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
            worker.reader.join()
        self._workers.clear()


class _Worker:
    def __init__(self, apart: bool, *made_of: Any) -> None:
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(['chatgpt.rollout.vllm_worker', 'chatgpt.testing', 'transformers.models.gpt2'])
        self.pipe, there = context.Pipe()
        environment = {name: value for name, value in os.environ.items() if name.startswith(('STAND_IN', 'VLLM'))}
        kind: Any = context.Process if apart else threading.Thread
        self.process = kind(target=_serve, args=(there, environment, *made_of), daemon=True)
        self.process.start()
        if apart:
            there.close()
        self.asked: list[Future[Any]] = [Future()]
        self.ready = self.asked[0]
        self.lock = threading.Lock()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def end(self) -> None:
        if isinstance(self.process, threading.Thread):
            self.pipe.send(('end', ()))
        else:
            self.process.kill()
        self.process.join()

    def ask(self, method: str, args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self.lock:
            self.asked.append(future)
            try:
                self.pipe.send((method, args))
            except OSError:
                self.asked.remove(future)
                future.set_exception(WorkerDied('its pipe is closed'))
        return future

    def _read(self) -> None:
        while True:
            try:
                fine, answer = self.pipe.recv()
            except (EOFError, OSError):
                break
            with self.lock:
                future = self.asked.pop(0)
            future.set_result(answer) if fine else future.set_exception(answer)
        with self.lock:
            lost, self.asked = self.asked, []
        for future in lost:
            future.set_exception(WorkerDied('its process ended'))
