"""`FailureGuard`: one rank's exception ends all ranks within seconds, with that rank's message.

The failing rank writes its message into the process group's store. A thread on every other rank looks there several times a
second; when it finds a message it gives the process a moment to fail by itself (the same mistake, a broken connection), then prints
the message and ends the process, which may be stuck in a collective that will never finish.
Leaving the guard without an exception waits for the other ranks, so that the store outlives everyone who looks into it.
Left out: processes that die without a word (SIGKILL); their launcher ends the others.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import uuid
from contextlib import AbstractContextManager
from types import TracebackType

import torch.distributed as dist

POLL_S = 0.2
GRACE_S = 5.0
"""how long the failing rank waits for the others to have read its message"""
LEAVE_S = 1.0
"""how long a process has to fail by itself once another has failed"""


class RankFailure(RuntimeError):
    """Another rank failed first; the message is that rank's."""


class FailureGuard(AbstractContextManager[None]):
    """Enter and leave on every rank together. A guard inside another does nothing.

    Keys in the store: `failure` (the first message), `seen` (how many ranks have read it), `done` (how many left well).
    """

    _active = False

    def __init__(self, rank: int, world_size: int, *, timeout_s: float = 1800.0) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._message: str | None = None
        """another rank's failure, once the watching thread has read it"""

    def __enter__(self) -> None:
        if FailureGuard._active or self.world_size == 1:
            return
        FailureGuard._active = True
        # a name of its own for the keys: a launcher's store may outlive a restart, and hold the failure that was its reason
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        prefix = f'chatgpt/guard/{name[0]}'
        store = dist.distributed_c10d._get_default_store()
        # a connection of its own: the main thread may be waiting for a key while holding the other one
        self._store = dist.PrefixStore(prefix, store.clone() if hasattr(store, 'clone') else store)
        self._thread = threading.Thread(target=self._watch, name='chatgpt-failure-guard', daemon=True)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout=GRACE_S)
        self._thread = None
        FailureGuard._active = False
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._leave_together()
        elif not isinstance(error, RankFailure):
            self._report(error)

    # on a rank that fails

    def _report(self, error: BaseException) -> None:
        if self._message is not None:
            error.add_note(self._because(self._message))
            return
        text = f'rank {self.rank} failed: {type(error).__name__}: {error}'
        details = ''.join(traceback.format_exception(error)).rstrip()
        try:
            first = self._store.compare_set('failure', '', f'{text}\n{details}').decode()
            if first.startswith(f'rank {self.rank} failed'):
                self._wait_for('seen', self.world_size - 1, GRACE_S)
            else:  # a consequence of the other's failure, or the same mistake noticed here too
                self._store.add('seen', 1)
                error.add_note(self._because(first))
        except (dist.DistError, RuntimeError) as problem:  # rank 0, which holds the store, is gone
            error.add_note(f'The other ranks could not be told: {problem}')

    # on the others

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._message = self._failure()
            if self._message is not None:
                if not self._stop.wait(LEAVE_S):
                    sys.stdout.flush()
                    print(self._because(self._message), file=sys.stderr, flush=True)
                    os._exit(1)
                return

    def _because(self, message: str) -> str:
        return f'[rank {self.rank}] stopped, because {message}'

    def _failure(self) -> str | None:
        """Another rank's message, read and acknowledged."""
        try:
            if not self._store.check(['failure']):
                return None
            message = self._store.get('failure').decode()
            self._store.add('seen', 1)
            return message
        except (dist.DistError, RuntimeError) as problem:
            return f'the store of rank 0 cannot be reached ({str(problem).splitlines()[0]})'

    def _leave_together(self) -> None:
        if self._message is not None:
            raise RankFailure(self._message.splitlines()[0])
        self._store.add('done', 1)
        end = time.monotonic() + self.timeout_s
        while time.monotonic() < end:
            message = self._failure()
            if message is not None:
                raise RankFailure(message.splitlines()[0])
            if self._store.add('done', 0) >= self.world_size:
                break
            time.sleep(POLL_S / 10)
        # the store lives in rank 0: it stays until the others have seen that all are done
        self._store.add('gone', 1)
        if self.rank == 0:
            self._wait_for('gone', self.world_size, GRACE_S)

    def _wait_for(self, key: str, count: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._store.add(key, 0) < count and time.monotonic() < end:
            time.sleep(POLL_S / 10)
