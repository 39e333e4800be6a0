"""Where a process stands among those that train together, and how it talks to them: `Strategy.ranks`.

`OneProcess` here, torchrun's in `processes`.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from chatgpt.strategies.checkpoint.layout import CheckpointError, CheckpointMismatch
from chatgpt.strategies.machine import default_device, keep_freed_memory

T = TypeVar('T')


class Ranks(ABC):
    """One process of many: seven abstract members, and what follows from them.

    A rank is who has a share of the data of its own. That is a process, but under tensor parallelism, where a few
    processes hold a model together and are one rank (`tensor_ranks.TensorRanks`).
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this rank, 0 .. world_size - 1."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many ranks train together."""

    @property
    def processes(self) -> Ranks:
        """The same of processes, for what each of them does: pieces in files, timing."""
        return self

    @property
    def leads(self) -> bool:
        """Whether this is the first process of its rank, which writes what is the rank's own."""
        return True

    @property
    @abstractmethod
    def local_rank(self) -> int:
        """Number of this process on its machine."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where this process computes."""

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str = 'sum') -> Tensor:
        """A new tensor: the sum, mean, max or min of `tensor` over ranks, on the tensor's device."""

    @abstractmethod
    def all_gather_object(self, obj: T) -> list[T]:
        """Every rank's `obj`, in rank order, on every rank."""

    @abstractmethod
    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Rank `src`'s `obj` on every rank."""

    def from_leader(self, obj: T) -> T:
        """The `obj` of this rank's first process, on all of its processes, which call it together."""
        return obj

    def note_progress(self, where: str) -> None:
        """Say where the run is, for the message that names a rank which keeps the others waiting. Nothing on one
        process."""
        return

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather_object(None)

    def run_on_rank0(self, fn: Callable[[], T]) -> T:
        """`fn()` is called on rank 0 alone; its result, or its exception with the same message, reaches every rank."""
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

    def failure_guard(self) -> AbstractContextManager[None]:
        """Around a whole run: one rank's exception ends all ranks within seconds with its message. Nothing on one
        process."""
        return nullcontext()

    def fails_together(self, state: str) -> bool:
        """Whether every rank is ending with an exception at the same place, so that they may still work together: to
        save. `state` must be equal on all. Inside `failure_guard`; another rank that goes on, or waits in a collective,
        makes it False after a moment.
        """
        return self.world_size == 1

    def leave(self) -> None:
        """Give back what was joined."""
        return


class OnRanks:
    """Answers the members of `ranks` by their own names."""

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
    barrier: Callable[[], None]
    run_on_rank0: Callable[[Callable[[], Any]], Any]
    note_progress: Callable[[str], None]
    failure_guard: Callable[[], AbstractContextManager[None]]
    fails_together: Callable[[str], bool]

    def __getattr__(self, name: str) -> Any:
        ranks = self.__dict__.get('ranks')
        if ranks is None or ranks is self or name not in OnRanks.__annotations__:
            raise AttributeError(f'{type(self).__name__} has no attribute {name!r}')
        return getattr(ranks, name)


class OneProcess(Ranks):
    """No other process: the first GPU when there is one, otherwise the CPU."""

    rank, world_size, local_rank, device = 0, 1, 0, torch.device('cpu')

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.device = torch.device(device or ('cuda:0' if default_device() == 'cuda' else 'cpu'))
        if self.device.type == 'cpu':
            keep_freed_memory()

    def all_reduce(self, tensor: Tensor, op: str = 'sum') -> Tensor:
        if op not in ('sum', 'mean', 'max', 'min'):
            raise ValueError(f'all_reduce: op={op!r} is not one of sum, mean, max, min')
        return tensor.detach().clone()

    def all_gather_object(self, obj: T) -> list[T]:
        return [obj]

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        return obj


def same_kind(kind: str, message: str) -> Exception:
    """Rank 0's exception on another rank: of the same class where it is a builtin or ours."""
    ours: dict[str, type[Exception]] = {'CheckpointError': CheckpointError, 'CheckpointMismatch': CheckpointMismatch}
    found = ours.get(kind) or getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(message)
        except TypeError:  # UnicodeDecodeError and the like want more than a message
            pass
    return RuntimeError(f'rank 0: {kind}: {message}')


def check_world_size(processes: int, tensor_parallel: int) -> int:
    """How many ranks there are; ValueError where processes cannot be grouped."""
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int) or tensor_parallel < 1:
        raise ValueError(f'tensor_parallel={tensor_parallel!r} must be a whole number of at least 1')
    if processes % tensor_parallel:
        lower = processes // tensor_parallel * tensor_parallel
        near = f'{lower} or {lower + tensor_parallel}' if lower else str(tensor_parallel)
        raise ValueError(
            f'tensor_parallel={tensor_parallel}: {processes} process{"es" if processes > 1 else ""} cannot be grouped '
            f'by it; start a multiple of it, such as {near}'
        )
    return processes // tensor_parallel
