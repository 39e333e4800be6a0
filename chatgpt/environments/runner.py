"""Runs environments in threads or processes, with a time limit per step; a failure is a record, not an exception.
`start`, `act`, `finish` and `forget` return at once, `result` waits for the answer.

An environment stays with one worker, which runs one step at a time. A step over its limit loses the worker: a process
is killed, and a thread is abandoned, because threads cannot be stopped. The other environments of a lost thread move to
a new one. Those of a lost process or event loop are rebuilt at their next step, from their seed and the responses so
far. If a rebuilt environment answers differently than before, its episode ends, because the transcript no longer fits
its state. Threads end when there is no episode; processes wait for the next one until `close`.
"""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from chatgpt.environments.base import EnvironmentFactory, EnvironmentSettings, Failure, Step, shown
from chatgpt.environments.host import Answer, Host, failure, kill_group, name_of

GRACE_S = 0.25
"""time for a coroutine over its limit to be cancelled, before its worker is lost"""
START_S = 60.0
"""limit of starting a worker process, imports included"""
CLOSE_S = 2.0
"""time for environments to close at the end"""
MAX_HUNG_THREADS = 64


class EnvironmentsHang(RuntimeError):
    """Too many threads hang in environments."""


class WorkerError(RuntimeError):
    """A worker process cannot make environments."""


@dataclass(eq=False)
class _Job:
    """A pending answer."""

    episode: _Episode
    command: tuple[Any, ...]
    began: float | None = None  # start of its latest call of the environment
    answer: Answer | Exception | None = None


@dataclass(eq=False)
class _Episode:
    number: int
    worker: _Worker
    history: list[tuple[tuple[Any, ...], Step]] = field(default_factory=list)  # commands and answers
    job: _Job | None = None


class Runner:
    """Environments by key, one per episode.

    Args:
        factory: makes the environment of one episode.
        settings: see `EnvironmentSettings`.

    Raises:
        ValueError: a factory that worker processes cannot import.
    """

    def __init__(self, factory: EnvironmentFactory, settings: EnvironmentSettings | None = None) -> None:
        self.factory, self.settings = factory, settings or EnvironmentSettings()
        self.name = name_of(factory)
        if self.settings.workers == 'processes':
            _check_importable(factory, self.name)
        self.changed = threading.Condition()
        self.hung: list[threading.Thread] = []
        """abandoned threads that have not ended"""
        self._workers: list[_Worker] = []
        self._episodes: dict[Any, _Episode] = {}
        self._numbers = 0

    # ------------------------------------------------------------------ episodes

    def start(self, key: Any, seed: int, columns: Mapping[str, Any]) -> None:
        with self.changed:
            if key in self._episodes:
                raise ValueError(f'environment {key!r} has been started already; forget it first')
            self._numbers += 1
            episode = self._episodes[key] = _Episode(self._numbers, self._least_busy())
            self._submit(episode, 'reset', seed, dict(columns))

    def act(self, key: Any, response: str | Mapping[str, Any]) -> None:
        with self.changed:
            self._submit(self._episodes[key], 'step', response)

    def finish(self, key: Any) -> None:
        """Requests the rewards of an episode that is cut off; `result` returns them."""
        with self.changed:
            self._submit(self._episodes[key], 'finish')

    def result(self, key: Any) -> Answer:
        """Returns the answer to the latest `start`, `act` or `finish`.

        Raises:
            EnvironmentsHang, WorkerError: no more environments can be run.
        """
        with self.changed:
            job = self._episodes[key].job
            assert job is not None, 'start or act first'
            while job.answer is None:
                nearest = self._expire()
                if job.answer is None:
                    self.changed.wait(nearest)
            if isinstance(job.answer, Exception):
                raise job.answer
            return job.answer

    def forget(self, key: Any) -> None:
        with self.changed:
            episode = self._episodes.pop(key, None)
            if episode is not None:
                worker = episode.worker
                worker.waiting = deque(job for job in worker.waiting if job.episode is not episode)
                self._submit(episode, 'close')

    def close(self) -> None:
        """Closes environments, within two seconds, then kills processes. `start` may be called again afterwards."""
        with self.changed:
            workers, self._workers = self._workers, []
            self._episodes = {}
            for worker in workers:
                worker.waiting.clear()
                worker.ending = True
            self.changed.notify_all()
        deadline = time.monotonic() + CLOSE_S
        for worker in workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            if worker.thread.is_alive():
                worker.kill()
                if not worker.left_behind:
                    worker.thread.join(CLOSE_S)

    # ------------------------------------------------------------------ with `changed` held

    def _submit(self, episode: _Episode, verb: str, *arguments: Any) -> None:
        episode.job = _Job(episode, (verb, episode.number, *arguments))
        episode.worker.waiting.append(episode.job)
        self.changed.notify_all()

    def _least_busy(self) -> _Worker:
        kind = _Thread if self.settings.workers == 'threads' else _Process
        loads = dict.fromkeys(self._workers, 0)
        for episode in self._episodes.values():
            loads[episode.worker] += 1
        if len(loads) < self.settings.num_workers and all(loads.values()):
            self._workers.append(kind(self))
            return self._workers[-1]
        return min(loads, key=loads.__getitem__)

    def _expire(self) -> float | None:
        """Gives up jobs over their limit. Returns the seconds until the next limit, None if nothing runs."""
        now, limit = time.monotonic(), self.settings.step_timeout_s
        left = []
        for worker in list(self._workers):
            job = worker.current
            if job is None or job.began is None:
                continue
            over = job.began + limit + GRACE_S - now
            if over > 0:
                left.append(over)
            else:
                if job.answer is None:
                    job.answer = failure('timeout', f'{self.name}: took longer than {limit:g} s', now - job.began)
                worker.lose()
        self.hung = [thread for thread in self.hung if thread.is_alive()]
        if len(self.hung) > MAX_HUNG_THREADS:
            raise EnvironmentsHang(
                f'{self.name}: {len(self.hung)} threads hang in it, and threads cannot be ended; set '
                "workers='processes', where a step over its limit is killed, or raise step_timeout_s"
            )
        return min(left, default=None)

    @property
    def has_episodes(self) -> bool:
        return bool(self._episodes)

    def leave(self, worker: _Worker) -> None:
        """Removes a worker, which takes no more jobs."""
        self._workers = [other for other in self._workers if other is not worker]

    def replace(self, old: _Worker, new: _Worker) -> None:
        """Moves the episodes and jobs of `old` to `new`."""
        self._workers[self._workers.index(old)] = new
        new.waiting, old.waiting = old.waiting, deque()
        for job in new.waiting:
            job.episode.worker = new
        for episode in self._episodes.values():
            if episode.worker is old:
                episode.worker = new


class _Worker(ABC):
    """A thread of this process that works off jobs: it runs environments itself or in a process."""

    left_behind = False  # its thread may never end

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.waiting: deque[_Job] = deque()
        self.current: _Job | None = None
        self.ending = False
        self.lost = False
        self.thread = threading.Thread(target=self._work, name='environments', daemon=True)
        self.thread.start()

    @abstractmethod
    def has(self, number: int) -> bool:
        """Returns True if this worker has the environment; False if it was with a lost worker."""

    def prepare(self) -> None:
        """Runs before a call, outside of its limit."""

    @abstractmethod
    def call(self, command: tuple[Any, ...]) -> Any:
        """Runs a command in the environment."""

    @abstractmethod
    def lose(self) -> None:
        """Called with `changed` held if the current job is over its limit."""

    @abstractmethod
    def end(self) -> None:
        """Closes everything, at the end, in the worker's thread."""

    def is_idle(self) -> bool:
        """Returns True if it need not wait for more jobs."""
        return False

    def kill(self) -> None:
        """Called if it did not end in time."""

    def _work(self) -> None:
        changed = self.runner.changed
        while True:
            with changed:
                self.current = None
                while not (self.waiting or self.ending or self.lost or self.is_idle()):
                    changed.wait()
                if not self.waiting or self.ending or self.lost:
                    self.runner.leave(self)
                    break
                job = self.current = self.waiting.popleft()
            answer = self._answer(job)
            with changed:
                if job.answer is None:  # else it was over its limit
                    job.answer = answer
                    if isinstance(answer, Step):
                        job.episode.history.append((job.command, answer))
                changed.notify_all()
        self.end()

    def _answer(self, job: _Job) -> Any:
        verb, number, *_ = job.command
        try:
            if verb == 'close':
                return self._timed(job, job.command) if self.has(number) else None
            self.prepare()
            if verb != 'reset' and not self.has(number):
                for at, (command, before) in enumerate(job.episode.history):
                    again = self._timed(job, command)
                    if isinstance(again, Failure):
                        return replace(again, message=f'{again.message} (built again after its worker was lost)')
                    if different := difference(before, again):
                        return failure(
                            'invalid',
                            f'{self.runner.name}: built again from its seed and the responses so far, it answers turn '
                            f'{at} differently: {different}',
                        )
            return self._timed(job, job.command)
        except Exception as error:  # an error of the worker, not of the environment
            return error

    def _timed(self, job: _Job, command: tuple[Any, ...]) -> Any:
        with self.runner.changed:
            job.began = time.monotonic()
            self.runner.changed.notify_all()  # `result` computes the limit again
        return self.call(command)


class _Thread(_Worker):
    """Environments in a thread."""

    def __init__(self, runner: Runner, environments: Mapping[int, Any] | None = None) -> None:
        self.host = Host(runner.factory, runner.settings.step_timeout_s)
        self.host.environments |= environments or {}
        super().__init__(runner)

    def is_idle(self) -> bool:
        return not self.runner.has_episodes

    def has(self, number: int) -> bool:
        return number in self.host.environments

    def call(self, command: tuple[Any, ...]) -> Any:
        verb, *arguments = command
        return getattr(self.host, verb)(*arguments)

    def lose(self) -> None:
        assert self.current is not None
        self.lost = self.left_behind = True
        hanging, host = self.current.episode.number, self.host
        movable = {n for n in host.environments if n != hanging and n not in host.asynchronous}
        moved = {n: host.environments.pop(n) for n in movable}
        self.runner.hung.append(self.thread)
        self.runner.replace(self, _Thread(self.runner, moved))

    def end(self) -> None:
        self.host.end()

    def kill(self) -> None:
        self.left_behind = True
        self.runner.hung.append(self.thread)


class _Process(_Worker):
    """Environments in a separate process, started with the first job, and again after it was lost."""

    def __init__(self, runner: Runner) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self.here: set[int] = set()
        self.reaping = threading.Lock()
        super().__init__(runner)

    def has(self, number: int) -> bool:
        return number in self.here

    def call(self, command: tuple[Any, ...]) -> Any:
        verb, number, *_ = command
        assert self.connection is not None
        try:
            pickled = pickle.dumps(command)
        except Exception as error:
            raise WorkerError(
                f'{self.runner.name}: the columns of a prompt cannot be pickled for a worker process: {error}; set '
                "workers='threads'"
            ) from None
        try:
            self.connection.send_bytes(pickled)
            answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return failure('error', f'{self.runner.name}: its worker process ended: {self._gone()}')
        (self.here.discard if verb == 'close' else self.here.add)(number)
        return answer

    def prepare(self) -> None:
        if self.connection is not None:
            return
        ours, theirs = socket.socketpair()
        program = 'import json, sys; sys.path[:] = json.loads(sys.argv[2]); '
        program += 'from chatgpt.environments.host import main; main(int(sys.argv[1]))'
        arguments = [str(theirs.fileno()), json.dumps(sys.path)]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, '-c', program, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # All processes, replacements included, have the same order of sets.
                env={**os.environ, 'PYTHONHASHSEED': '0'},
                start_new_session=True,  # only the trainer handles Ctrl-C in a terminal
            )
        self.connection = Connection(ours.detach())
        factory = self.runner.factory
        try:
            pickled = pickle.dumps(factory)
            self.connection.send((pickled, _files_of(pickled), self.runner.settings.step_timeout_s))
            error = self.connection.recv() if self.connection.poll(START_S) else f'no answer within {START_S:g} s'
        except (EOFError, OSError):
            error = self._gone()
        if error is not None:
            self._gone()
            raise WorkerError(
                f'{self.runner.name}: a worker process cannot import it: {error}; give environments in a module that '
                "can be imported alone, or set workers='threads'"
            )

    def _gone(self) -> str:
        """Cleans up after the process. Returns how it ended."""
        process, connection, self.process, self.connection = self.process, self.connection, None, None
        self.here = set()
        if process is None:
            return 'it did not start'
        if connection is not None:
            connection.close()
        with self.reaping:
            kill_group(process.pid)  # before waiting: until then the pid cannot be reused
            code = process.wait()
        if code >= 0:
            return f'exit code {code}'
        name = signal.Signals(-code).name
        return f'{name}, as when memory runs out' if -code == signal.SIGKILL else name

    def lose(self) -> None:
        self.kill()  # its thread waits for the process

    def end(self) -> None:
        if self.connection is not None:
            try:
                self.connection.send(('end',))
                self.connection.recv_bytes()
            except (EOFError, OSError):
                pass
        self._gone()

    def kill(self) -> None:
        process = self.process
        with self.reaping:
            if process is not None and process.returncode is None:
                kill_group(process.pid)


def difference(before: Step, now: Step) -> str | None:
    """Describes the first difference of two answers; None if they are equal apart from their time."""
    for name in ('observation', 'rewards', 'terminated', 'truncated', 'success'):
        a, b = getattr(before, name), getattr(now, name)
        if a != b:
            return f'{name} was {shown(a, 60)} and is {shown(b, 60)}'
    return None


def _files_of(pickled: bytes) -> dict[str, str]:
    """Returns the files of the modules that a pickle names."""
    texts = {text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)}
    found = {name: getattr(sys.modules[name], '__file__', None) for name in texts & sys.modules.keys()}
    return {name: file for name, file in found.items() if file is not None}


def _check_importable(factory: Any, name: str) -> None:
    what = f"environment {name} cannot go to a worker process (workers='processes')"
    try:
        pickled = pickle.dumps(factory)
    except Exception as error:
        raise ValueError(
            f'{what}, since it cannot be pickled ({" ".join(str(error).split())}); give a class or function at the top '
            "level of a module, with options that can be pickled, or set workers='threads'"
        ) from None
    if b'__main__' in pickled:
        raise ValueError(
            f'{what}: it is defined in the script that runs, which would run again there; move it to a module of its '
            "own, or set workers='threads'"
        )
