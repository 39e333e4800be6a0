"""Rollout engines for the fixed runs: one that answers ahead, and workers of `RemoteEngine` in this process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from chatgpt.rollout import Abilities, EngineAround, LocalEngine


class AheadOfTime(EngineAround):
    """Draws with a copy of the weights of the latest `begin`, when it is asked."""

    def __init__(self) -> None:
        super().__init__(LocalEngine())
        self.abilities = Abilities(copies_weights=False, reproducible=True, answers_ahead=True)

    def begin(self, actor: Any) -> None:
        super().begin(deepcopy(actor))

    def submit(self, call: Any) -> list[Any]:
        return self.generate(call)

    def take(self, ticket: list[Any]) -> list[Any]:
        return ticket

    def cancel(self, ticket: list[Any]) -> None:
        pass


class Workers:
    """`RolloutWorkers` that answer a request when they are waited for."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.queued: dict[int, tuple[int, Any]] = {}

    def start(self, spec: Any, engine_options: Any) -> None:
        from chatgpt.rollout.worker import RolloutWorker  # the one name in the fixed runs that no package exports

        self.workers = [RolloutWorker(spec, engine_options, device='cpu') for _ in range(self.num_workers)]

    def put(self, bucket: Any) -> Any:
        return bucket.clone()

    def submit(self, worker: int, request: Any) -> int:
        handle = max(self.queued, default=0) + 1
        self.queued[handle] = worker, request
        return handle

    def ready(self, handle: int) -> bool:
        return handle not in self.queued

    def wait(self, handle: int) -> Any:
        worker, request = self.queued.pop(handle)
        return self.workers[worker].generate(request)

    def cancel(self, handle: int) -> None:
        self.queued.pop(handle, None)

    def replace(self, worker: int) -> None:
        raise AssertionError('these workers do not die')

    def close(self) -> None:
        self.queued.clear()
