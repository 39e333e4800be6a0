"""Ranks and collectives of the processes that train together: `Strategy.ranks`.

`OneProcess` is here, the ranks of torchrun's processes are in `processes`.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from chatgpt.strategies.checkpoint.layout import CheckpointError, CheckpointMismatch
from chatgpt.strategies.machine import default_device, grow_segments, keep_freed_memory

T = TypeVar('T')


class Ranks(ABC):
    """The ranks of a run as seen by one process: seven abstract members, and others built on them.

    Each rank has its own share of the data. It is one process, or several that hold a model together
    (`tensor_ranks.TensorRanks`) or compute its sequences together (`sequence_parallel.SequenceRanks`).
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """Index of this rank, 0 .. world_size - 1."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def processes(self) -> Ranks:
        """The same interface with one rank per process, for work of every process: pieces in files, timing."""
        return self

    @property
    def leads(self) -> bool:
        """True on the first process of a rank, which writes the rank's files."""
        return True

    @property
    @abstractmethod
    def local_rank(self) -> int:
        """Index of this process on its machine."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of this process."""

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str = 'sum') -> Tensor:
        """Returns a new tensor, the sum, mean, max or min of `tensor` over ranks, on its device."""

    @abstractmethod
    def all_gather_object(self, obj: T) -> list[T]:
        """Returns every rank's `obj`, in rank order, on every rank."""

    @abstractmethod
    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Returns rank `src`'s `obj` on every rank."""

    def scatter_object(self, objs: SequenceOf[T]) -> T:
        """Returns the r-th of rank 0's `objs` on rank r; those of other ranks are not read."""
        return self.broadcast_object(objs)[self.rank]

    def exchange(self, sent: SequenceOf[Tensor]) -> list[Tensor]:
        """Sends the r-th tensor, 1-D and of one dtype for all, to rank r. Returns what each rank has sent to this one,
        on the device of the first. Collective."""
        everyone = self.all_gather_object([tensor.cpu() for tensor in sent])
        return [tensors[self.rank].to(sent[0].device) for tensors in everyone]

    def from_leader(self, obj: T) -> T:
        """Returns the `obj` of this rank's first process on all of its processes. Collective within the rank."""
        return obj

    def own_part(self, count: int) -> slice:
        """Returns which of a rank's `count` items this process works on, where its processes have whole models."""
        return slice(count)

    def from_parts(self, items: list[T]) -> list[T]:
        """Returns the items of all processes of this rank, each of which has its `own_part`. Collective within the
        rank."""
        return items

    def note_progress(self, where: str) -> None:
        """Records the current part of the run, for the message about a late rank. Does nothing on one process."""
        return

    def barrier(self) -> None:
        """Waits for every rank to call it."""
        self.all_gather_object(None)

    def run_on_rank0(self, fn: Callable[[], T]) -> T:
        """Calls `fn()` on rank 0; returns its result, or raises its exception with the same message, on every rank."""
        outcome: tuple[str, Any] | None = None
        failure: Exception | None = None
        if self.is_rank_0:
            try:
                outcome = ('', fn())
            except Exception as error:
                failure = error
                outcome = (type(error).__name__, str(error))
        kind, value = self.broadcast_object(outcome)  # type: ignore[misc]
        if failure is not None:
            raise failure
        if kind:
            raise same_kind(kind, value)
        return value

    def untimed(self) -> AbstractContextManager[None]:
        """Returns the context of work that takes other times on other ranks, such as generation. At its end ranks wait
        for each other without the limit of `timeout_s`, inside `failure_guard`. Collective."""
        return nullcontext()

    def failure_guard(self) -> AbstractContextManager[None]:
        """Returns the context of a run, in which an exception on one rank ends all ranks within seconds with its
        message. Empty on one process."""
        return nullcontext()

    def fails_together(self, state: str) -> bool:
        """Returns True if every rank is failing with an exception in the same `state`, so that they can still save
        together; False, after a few seconds, if another rank continues or waits. Call it inside `failure_guard`."""
        return self.world_size == 1

    def leave(self) -> None:
        """Leaves the process group, if this object joined one."""
        return


class OnRanks:
    """A mixin that forwards the members of `Ranks` to `ranks`."""

    ranks: Ranks
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    is_rank_0: bool
    processes: Ranks
    all_reduce: Callable[..., Tensor]
    all_gather_object: Callable[[Any], list[Any]]
    broadcast_object: Callable[..., Any]
    scatter_object: Callable[[SequenceOf[Any]], Any]
    exchange: Callable[[SequenceOf[Tensor]], list[Tensor]]
    from_leader: Callable[[Any], Any]
    barrier: Callable[[], None]
    run_on_rank0: Callable[[Callable[[], Any]], Any]
    note_progress: Callable[[str], None]
    untimed: Callable[[], AbstractContextManager[None]]
    failure_guard: Callable[[], AbstractContextManager[None]]
    fails_together: Callable[[str], bool]

    def __getattr__(self, name: str) -> Any:
        ranks = self.__dict__.get('ranks')
        if ranks is None or ranks is self or name not in OnRanks.__annotations__:
            raise AttributeError(f'{type(self).__name__} has no attribute {name!r}')
        return getattr(ranks, name)


class OneProcess(Ranks):
    """A single process, on the first GPU if there is one, otherwise on the CPU."""

    rank, world_size, local_rank, device = 0, 1, 0, torch.device('cpu')

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.device = torch.device(device or ('cuda:0' if default_device() == 'cuda' else 'cpu'))
        if self.device.type == 'cpu':
            keep_freed_memory()
        elif self.device.type == 'cuda':
            grow_segments()

    def all_reduce(self, tensor: Tensor, op: str = 'sum') -> Tensor:
        if op not in ('sum', 'mean', 'max', 'min'):
            raise ValueError(f'all_reduce: op={op!r} is not one of sum, mean, max, min')
        return tensor.detach().clone()

    def all_gather_object(self, obj: T) -> list[T]:
        return [obj]

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        return obj


def same_kind(kind: str, message: str) -> Exception:
    """Returns rank 0's exception for another rank, of the same class if it is a builtin or a `CheckpointError`."""
    ours: dict[str, type[Exception]] = {'CheckpointError': CheckpointError, 'CheckpointMismatch': CheckpointMismatch}
    found = ours.get(kind) or getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(message)
        except TypeError:  # UnicodeDecodeError and others need more than a message
            pass
    return RuntimeError(f'rank 0: {kind}: {message}')


def check_world_size(processes: int, parts: int, option: str = 'tensor_parallel') -> int:
    """Returns the number of groups, or of processes in each of `parts` groups; ValueError if there is a remainder."""
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(f'{option}={parts!r} must be a whole number of at least 1')
    if processes % parts:
        lower = processes // parts * parts
        near = f'{lower} or {lower + parts}' if lower else str(parts)
        raise ValueError(
            f'{option}={parts}: {processes} process{"es" if processes > 1 else ""} cannot be grouped '
            f'by it; start a multiple of it, such as {near}'
        )
    return processes // parts
