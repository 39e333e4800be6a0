"""`FailureGuard`: an exception on one rank ends all ranks within seconds with its message; a rank that hangs is named.

The failing rank writes its message to the process group's store. A thread on every rank polls the store; when it finds
another rank's message it waits a moment for the process to fail by itself (the same mistake, a broken connection), then
prints the message and exits the process, which may be stuck in a collective.

A rank that has waited for almost the whole timeout requests the location of every rank's main thread. All then exit
with a message that names the ranks that are not in a collective or do not answer. A rank counts as waiting if it is in
a collective of the strategy, or, for other collectives (of a sharded forward), if its main thread uses no CPU time.

Leaving the guard without an exception waits for the other ranks, so that the store outlives its readers. A process that
is killed (SIGKILL) is detected by its launcher, which ends the others. A rank that waits on a GPU for the result of
another library's collective is ended by NCCL's watchdog, without a name.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import ClassVar

import torch.distributed as dist

POLL_S = 0.2
GRACE_S = 5.0
"""how long the failing rank waits until the others have read its message"""
AGREE_S = 3.0
"""how long a failing rank waits for all others to fail too"""
EXIT_S = 1.0
"""how long a process may take to fail by itself after another has failed"""
STUCK_SHARE = 0.9
"""share of the timeout after which a waiting rank requests the locations of the others; the timeout of the collective
itself would not name the late rank"""
IDLE_CPU_S = 0.001
"""CPU time below which a thread made no progress"""
NUM_FRAMES = 3
"""frames of the main thread's stack in a message"""
_STORE_ERRORS = (dist.DistError, RuntimeError)
"""errors of the store when rank 0, which holds it, has ended"""


class RankStatus:
    """The state of a rank's main thread: its last progress note, its time, and whether it waits for other ranks.

    Args:
        clock: returns the time in seconds; tests replace it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.where = 'before the run'
        self.since = clock()
        self.thread = threading.get_ident()
        self.collectives = 0
        """number of the strategy's collectives that have finished"""
        self._depth = 0

    def note(self, where: str) -> None:
        self.where, self.since = where, self.clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context for a collective."""
        self._depth += 1
        self.since = self.clock()
        try:
            yield
            self.collectives += 1
        finally:
            self._depth -= 1
            self.since = self.clock()

    def in_own_collective(self) -> bool:
        return self._depth > 0

    def is_waiting(self) -> bool:
        """Returns True inside a collective of the strategy, or of a sharded forward or backward."""
        inside = os.path.join('torch', 'distributed', '')
        return self.in_own_collective() or any(inside in frame.filename for frame in self._stack())

    def cpu_s(self) -> float:
        """Returns the CPU time of the main thread so far; where the system cannot report it, the elapsed time."""
        if not hasattr(time, 'pthread_getcpuclockid'):
            return time.monotonic()
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread))

    def describe(self) -> str:
        """Returns the innermost frames of the main thread, 'reward.py:12 (score) called by ...'."""
        frames = [f'{os.path.basename(f.filename)}:{f.lineno} ({f.name})' for f in reversed(self._stack())]
        return ' called by '.join(frames[:NUM_FRAMES]) or 'nowhere'

    def _stack(self) -> list[traceback.FrameSummary]:
        frame = sys._current_frames().get(self.thread)
        return list(traceback.extract_stack(frame)) if frame is not None else []


def _unreachable(problem: Exception) -> str:
    return f'the store of rank 0 cannot be reached ({str(problem).splitlines()[0]})'


class RankFailure(RuntimeError):
    """Raised when another rank failed first, with that rank's message."""


class FailureGuard(AbstractContextManager[None]):
    """A context that every rank enters and leaves. Does nothing inside another guard.

    Keys in the store: `failure` (the first message), `seen` (number of ranks that have read it), `done` and `gone`
    (number of ranks that left without an error, and that know that all did), `asked` (locations are requested),
    `at/RANK` (the locations), `failing/N/RANK` (where a rank failed the N-th time), `together/N` (whether all failed at
    the same place), `met/N` (number of ranks at the N-th meeting).
    """

    _active: ClassVar[FailureGuard | None] = None

    def __init__(
        self, rank: int, world_size: int, *, timeout_s: float = 1800.0, status: RankStatus | None = None
    ) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.status = status or RankStatus()
        self._answered = False
        self._meetings = self._agreements = 0
        self._idle_since, self._used = self.status.clock(), 0.0
        """since when the main thread has used no CPU time, and its CPU time then"""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._message: str | None = None
        """another rank's failure, set by the watching thread"""

    def __enter__(self) -> None:
        if FailureGuard._active is not None or self.world_size == 1:
            return
        # a new prefix for the keys: a launcher's store may outlive a restart and hold the failure before it
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        prefix = f'chatgpt/guard/{name[0]}'
        store = dist.distributed_c10d._get_default_store()
        # a separate connection, since the main thread may hold the other one while it waits for a key
        self._store = dist.PrefixStore(prefix, store.clone() if hasattr(store, 'clone') else store)
        FailureGuard._active = self
        self._thread = threading.Thread(target=self._watch, name='chatgpt-failure-guard', daemon=True)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout=GRACE_S)
        self._thread = None
        FailureGuard._active = None
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._wait_for_others()
        elif not isinstance(error, RankFailure):
            self._report(error)

    @classmethod
    def meet(cls) -> None:
        """Waits until all ranks have called it, without a limit of time. Does nothing outside of a guard."""
        guard = cls._active
        if guard is None:
            return
        guard._meetings += 1
        key, start = f'met/{guard._meetings}', time.monotonic()
        guard._store.add(key, 1)
        while guard._store.add(key, 0) < guard.world_size:
            time.sleep(min(POLL_S / 4, (time.monotonic() - start) / 20))

    # on a failing rank

    @classmethod
    def agree(cls, state: str) -> bool:
        """See `Strategy.fails_together`. Returns the same on all ranks that call it."""
        guard = cls._active
        if guard is None:
            return False
        try:
            return guard._agree(state)
        except _STORE_ERRORS:
            return False

    def _agree(self, state: str) -> bool:
        self._agreements += 1
        keys = [f'failing/{self._agreements}/{rank}' for rank in range(self.world_size)]
        self._store.set(keys[self.rank], state)
        end = time.monotonic() + AGREE_S
        while time.monotonic() < end and not self._store.check(keys):
            time.sleep(POLL_S / 10)
        together = self._store.check(keys) and all(self._store.get(key).decode() == state for key in keys)
        # The first decision holds for all ranks: a late one would find all keys and wait for ranks that have ended.
        return self._store.compare_set(f'together/{self._agreements}', '', 'yes' if together else 'no') == b'yes'

    def _report(self, error: BaseException) -> None:
        if self._message is not None:
            error.add_note(self._stop_message(self._message))
            return
        text = f'rank {self.rank} failed: {type(error).__name__}: {error}'
        details = ''.join(traceback.format_exception(error)).rstrip()
        try:
            first = self._store.compare_set('failure', '', f'{text}\n{details}').decode()
            if first.startswith(f'rank {self.rank} failed'):
                self._wait_for('seen', self.world_size - 1, GRACE_S)
            else:  # a consequence of the other failure, or the same mistake on this rank
                self._store.add('seen', 1)
                error.add_note(self._stop_message(first))
        except _STORE_ERRORS as problem:
            error.add_note(f'The other ranks could not be notified: {problem}')

    # on the other ranks

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._message = self._failure()
            if self._message is not None:
                if not self._stop.wait(EXIT_S):
                    sys.stdout.flush()
                    self._print(self._message)
                    os._exit(1)
                return
            self._report_location()
            if self._is_stuck():
                self._exit_stuck()

    # when a rank is late

    def _is_stuck(self) -> bool:
        """Returns True if this rank has waited in the same collective for too long."""
        here, patience = self.status, STUCK_SHARE * self.timeout_s
        now = here.clock()
        if here.in_own_collective():
            return now - here.since > patience
        used = here.cpu_s()
        if used - self._used > IDLE_CPU_S or here.since > self._idle_since:
            self._used, self._idle_since = used, now
        if now - self._idle_since <= patience:
            return False
        # Reading the frames of a running thread has crashed Python 3.11, so it is done only here and on request.
        if not here.is_waiting():
            self._idle_since = now
            return False
        return True

    def _report_location(self) -> None:
        """Writes this rank's location to the store, once, when another rank has requested it."""
        try:
            if not self._answered and self._store.check(['asked']):
                self._answered = True
                here = self.status
                self._store.set(f'at/{self.rank}', f'{int(here.is_waiting())} {here.describe()}')
        except _STORE_ERRORS:
            return

    def _exit_stuck(self) -> None:
        """Requests the locations of all ranks and exits with a message that names the late ones."""
        try:
            self._request_locations()
        except _STORE_ERRORS as problem:
            self._print(_unreachable(problem))
        sys.stdout.flush()
        os._exit(1)

    def _request_locations(self) -> None:
        self._store.set('asked', '1')
        self._report_location()
        # before the collective itself times out
        end = time.monotonic() + min(GRACE_S, (1 - STUCK_SHARE) * self.timeout_s / 2 + POLL_S)
        keys = {rank: f'at/{rank}' for rank in range(self.world_size)}
        while time.monotonic() < end and not self._store.check(list(keys.values())):
            time.sleep(POLL_S / 2)
        found = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        # These are in no visible collective; on a GPU a rank may also wait where it reads a result.
        late = [f'rank {rank} is in {text[2:]}' for rank, text in found.items() if text[0] == '0']
        late += [f'rank {rank} does not answer' for rank in keys if rank not in found]
        waiting = [str(rank) for rank, text in found.items() if text[0] == '1']
        locations = '; '.join(f'rank {rank} in {text[2:]}' for rank, text in found.items())
        reason = '; '.join(late) or f'all ranks wait, in different collectives: {locations}'
        text = (
            f'rank {self.rank} failed: no progress for {STUCK_SHARE * self.timeout_s:.0f} s ({self.status.where}): '
            f'{reason}. Waiting: {", ".join(waiting) or "none"}. A rank that needs longer needs more than '
            f'timeout_s={self.timeout_s:g}'
        )
        first = self._store.compare_set('failure', '', text).decode()
        if first == text:
            self._wait_for('seen', len(found) - 1, GRACE_S)
        else:
            self._store.add('seen', 1)
        self._print(first)

    def _print(self, message: str) -> None:
        print(self._stop_message(message), file=sys.stderr, flush=True)

    def _stop_message(self, message: str) -> str:
        return f'[rank {self.rank}] stopped, because {message}'

    def _failure(self) -> str | None:
        """Reads and acknowledges another rank's message; None if there is none."""
        try:
            if not self._store.check(['failure']):
                return None
            message = self._store.get('failure').decode()
            self._store.add('seen', 1)
            return message
        except _STORE_ERRORS as problem:
            return _unreachable(problem)

    def _wait_for_others(self) -> None:
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
        # rank 0 holds the store, so it stays until the others have read that all are done
        self._store.add('gone', 1)
        if self.rank == 0:
            self._wait_for('gone', self.world_size, GRACE_S)

    def _wait_for(self, key: str, count: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._store.add(key, 0) < count and time.monotonic() < end:
            time.sleep(POLL_S / 10)
