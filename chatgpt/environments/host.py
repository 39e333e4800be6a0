"""Holds the environments of a thread or process: makes, calls and closes them. Their errors become a `Failure`.

`main` is a process that runs environments for a `Runner`, with pickled commands and answers over one socket.

    first message: (factory, files of its modules, limit)     answer: None, or the text of an import error
    then:          ('reset', number, seed, columns) | ('step', number, response) | ('close', number) | ('end',)

It is a new interpreter that imports this package's environments and the user's, and no torch. When the socket closes it
kills its process group, with all processes that environments have started in it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from chatgpt.data.rewards.calling import describe_error
from chatgpt.environments.base import (
    EnvironmentFactory,
    Failure,
    InvalidStep,
    Step,
    checked_observation,
    checked_rewards,
    checked_step,
)
from chatgpt.registry import load_module

Answer = Step | Failure


def kill_group(pid: int) -> None:
    """Kills a process group; one that has ended is no error."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS raises the latter for a group that has ended
        pass


def name_of(factory: Any) -> str:
    """Returns the name of an environment in messages: that of its class or function."""
    factory = factory.func if isinstance(factory, partial) else factory
    return getattr(factory, '__qualname__', None) or type(factory).__name__


class Host:
    """Environments by number.

    Args:
        factory: makes the environment of one episode.
        limit_s: of a `reset` or `step` that is a coroutine, which is cancelled then. Coroutines of all environments run
            in one event loop, which keeps running between their steps, so that connections stay alive.
    """

    def __init__(self, factory: EnvironmentFactory, limit_s: float) -> None:
        self.factory, self.limit_s, self.name = factory, limit_s, name_of(factory)
        self.environments: dict[int, Any] = {}
        self.asynchronous: set[int] = set()
        """environments that use this host's event loop"""
        self._loop: asyncio.AbstractEventLoop | None = None

    def reset(self, number: int, seed: int, columns: Mapping[str, Any]) -> Answer:
        def first() -> Step:
            environment = self.environments[number] = self.factory()
            _check_reset(environment.reset, columns)
            return Step(observation=checked_observation(self._called(number, environment.reset, seed, **columns)))

        return self._answered(first)

    def step(self, number: int, response: str | Mapping[str, Any]) -> Answer:
        environment = self.environments[number]
        return self._answered(lambda: checked_step(self._called(number, environment.step, response)))

    def finish(self, number: int) -> Answer:
        """Returns the rewards of `finish`, if the environment has it, for an episode that is cut off."""
        finish = getattr(self.environments[number], 'finish', dict)
        return self._answered(lambda: Step(observation='', rewards=checked_rewards(self._called(number, finish))))

    def close(self, number: int) -> None:
        """Closes an environment, and ignores what its `close` raises."""
        environment = self.environments.pop(number, None)
        if callable(getattr(environment, 'close', None)):
            try:
                self._called(number, environment.close)
            except BaseException:
                pass
        self.asynchronous.discard(number)

    def end(self) -> None:
        """Closes all environments and the event loop."""
        for number in list(self.environments):
            self.close(number)
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _answered(self, ask: Callable[[], Step]) -> Answer:
        start = time.perf_counter()
        try:
            return replace(ask(), seconds=time.perf_counter() - start)
        except InvalidStep as error:
            reason, message = 'invalid', str(error)
        except _TimeLimitExceeded:
            reason, message = 'timeout', f'took longer than {self.limit_s:g} s'
        except BaseException as error:  # SystemExit too: only the episode ends, not the run
            reason, message = 'error', f'raised {describe_error(error)}'
        return failure(reason, f'{self.name}: {message}', time.perf_counter() - start)

    def _called(self, number: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value = fn(*args, **kwargs)
        if not inspect.isawaitable(value):
            return value
        self.asynchronous.add(number)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name='environment-loop', daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_within(value, self.limit_s), self._loop).result()


def _check_reset(reset: Callable[..., Any], columns: Mapping[str, Any]) -> None:
    """Raises TypeError for a `reset` that does not accept its arguments, and lists these."""
    try:
        signature = inspect.signature(reset)
    except (TypeError, ValueError):  # not written in Python
        return
    try:
        signature.bind(0, **columns)
    except TypeError as error:
        call = ', '.join(['seed', *(f'{name}=...' for name in columns)])
        wrong = f'reset{signature} is called as reset({call}): {error}; write reset(self, seed, **columns)'
        raise TypeError(wrong) from None


class _TimeLimitExceeded(Exception):
    pass


async def _within(value: Awaitable[Any], limit_s: float) -> Any:
    """`asyncio.wait_for` with another exception for its own limit than the environment's TimeoutError."""
    task = asyncio.ensure_future(value)
    done, _ = await asyncio.wait({task}, timeout=limit_s)
    if done:
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    raise _TimeLimitExceeded


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def failure(reason: Any, message: str, seconds: float = 0.0) -> Failure:
    """Returns a `Failure` with a message of one line."""
    line = ' '.join(message.split())
    return Failure(reason=reason, message=line if len(line) <= 300 else line[:297] + '...', seconds=seconds)


# ---------------------------------------------------------------------- a process of environments


def main(descriptor: int) -> None:
    # A scheduler may send signals to every process of a job, but the trainer decides when to stop. Processes that
    # environments start would inherit SIG_IGN, but not a handler.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)
    connection = Connection(descriptor)
    found = _found(connection.recv())
    if isinstance(found, str):
        connection.send(found)
        os._exit(1)
    factory, limit_s = found
    connection.send(None)
    host = Host(factory, limit_s)
    commands: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, commands), daemon=True).start()
    while True:
        verb, *arguments = commands.get()
        if verb == 'end':
            host.end()
            os.killpg(0, signal.SIGKILL)  # including this process
        _send(connection, host, getattr(host, verb)(*arguments))


def _found(first: tuple[bytes, dict[str, str], float]) -> tuple[Any, float] | str:
    """Returns the factory and the limit, or the error of loading them."""
    pickled, files, limit_s = first
    try:
        while True:
            try:
                return pickle.loads(pickled), limit_s
            except ModuleNotFoundError as error:
                file = files.pop(error.name or '', None)
                if file is None or error.name is None:
                    raise
                # A file given by its path, which may have another module name in the trainer.
                sys.modules.setdefault(error.name, load_module(file, file))
    except BaseException as error:
        return f'{type(error).__name__}: {error}'


def _read(connection: Connection, commands: SimpleQueue[tuple[Any, ...]]) -> None:
    try:
        while True:
            commands.put(connection.recv())
    except (EOFError, OSError):  # the trainer has ended
        os.killpg(0, signal.SIGKILL)


def _send(connection: Connection, host: Host, answer: Any) -> None:
    try:
        pickled = pickle.dumps(answer)
    except Exception as error:
        message = f'{host.name}: its answer cannot be pickled, and so not leave its process: {error}'
        pickled = pickle.dumps(failure('invalid', message))
    connection.send_bytes(pickled)
