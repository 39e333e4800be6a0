"""Who runs environments: in threads, each answer within a limit, a failure as a record and never as an exception.

    runner.start(key, seed, columns)      # reset; returns at once
    answer = runner.result(key)           # Step | Failure; waits
    runner.act(key, 'guess 5')            # step; returns at once
    answer = runner.result(key)
    runner.forget(key)

Left out: what is done with an answer.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

from chatgpt.environments.base import (
    EnvironmentFactory,
    EnvironmentSettings,
    Failure,
    InvalidStep,
    Step,
    checked_observation,
    checked_rewards,
    checked_step,
)


class Runner:
    """Environments by key, one per episode."""

    def __init__(self, factory: EnvironmentFactory, settings: EnvironmentSettings | None = None) -> None:
        self.factory, self.settings = factory, settings or EnvironmentSettings()
        self.name = getattr(factory, '__qualname__', None) or type(factory).__name__
        self._environments: dict[Any, Any] = {}
        self._pending: dict[Any, Future[Step]] = {}
        self._threads = ThreadPoolExecutor(self.settings.num_workers, thread_name_prefix='environment')

    def start(self, key: Any, seed: int, columns: Mapping[str, Any]) -> None:
        def reset() -> Step:
            environment = self._environments[key] = self.factory()
            return Step(observation=checked_observation(_called(environment.reset, seed, **columns)))

        self._pending[key] = self._threads.submit(_timed, reset)

    def finish(self, key: Any) -> None:
        """Ask for the rewards of an episode that is cut off; `result` has them."""
        finish = getattr(self._environments[key], 'finish', dict)
        self._pending[key] = self._threads.submit(
            _timed, lambda: Step(observation='', rewards=checked_rewards(_called(finish)))
        )

    def act(self, key: Any, response: str | Mapping[str, Any]) -> None:
        environment = self._environments[key]
        self._pending[key] = self._threads.submit(_timed, lambda: checked_step(_called(environment.step, response)))

    def result(self, key: Any) -> Step | Failure:
        future = self._pending.pop(key)
        try:
            return future.result(self.settings.step_timeout_s)
        except NotInTime:
            limit = self.settings.step_timeout_s
            return Failure(reason='timeout', message=f'{self.name} took longer than {limit:g} s', seconds=limit)
        except InvalidStep as error:
            return Failure(reason='invalid', message=f'{self.name}: {error}')
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else ''
            return Failure(reason='error', message=f'{self.name} raised {type(error).__name__}: {first}')

    def forget(self, key: Any) -> None:
        environment = self._environments.pop(key, None)
        if hasattr(environment, 'close'):
            self._threads.submit(environment.close)

    def close(self) -> None:
        for key in list(self._environments):
            self.forget(key)
        self._threads.shutdown(wait=False, cancel_futures=False)


def _called(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    value = fn(*args, **kwargs)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _timed(fn: Callable[[], Step]) -> Step:
    from dataclasses import replace

    start = time.perf_counter()
    step = fn()
    return replace(step, seconds=time.perf_counter() - start)
