"""`ProcessGroup`: torchrun's processes, their devices and collectives; `ProcessGroupStrategy`, which runs on one.

There is one process per device, started by torchrun or by anything else that sets its environment variables.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shlex
import sys
import time
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chatgpt.strategies.base import Strategy
from chatgpt.strategies.guard import FailureGuard, RankStatus
from chatgpt.strategies.machine import default_device, grow_segments, keep_freed_memory
from chatgpt.strategies.precision import Numerics, Precision
from chatgpt.strategies.ranks import Ranks

T = TypeVar('T')

ReduceDtype = Literal['fp32', 'bf16']


def check_reduce_dtype(value: ReduceDtype, numerics: Mapping[str, Any]) -> None:
    """Raises ValueError for an unknown dtype of reductions, or bf16 in an exact run."""
    if value not in get_args(ReduceDtype):
        raise ValueError(f"reduce_dtype={value!r} must be 'fp32' or 'bf16'")
    if value != 'fp32' and numerics.get('reproducible') is not None:
        raise ValueError(f"reproducible='exact' sums gradients in fp32: leave reduce_dtype={value!r} out")


_OPS = {'sum': dist.ReduceOp.SUM, 'mean': dist.ReduceOp.SUM, 'max': dist.ReduceOp.MAX, 'min': dist.ReduceOp.MIN}
_NEEDED = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


_stores: dict[tuple[str, ...], tuple[Any, Iterator[int]]] = {}


def _join(backend: str, timeout: timedelta) -> None:
    """Joins torchrun's process group. Processes that have left a group may join another.

    All groups of a process use the store of the first one, each with its own prefix, so that a new group does not read
    the addresses of an old one.
    """
    where = tuple(os.environ[name] for name in _NEEDED)
    if where not in _stores:
        store, _, _ = next(dist.rendezvous('env://', timeout=timeout))
        _stores[where] = store, itertools.count()
    store, joined = _stores[where]
    store.set_timeout(timeout)
    rank, world_size = (int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE'))
    own = dist.PrefixStore(f'group/{next(joined)}', store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)


def buckets(tensors: Iterable[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Yields lists of consecutive tensors of one dtype, up to `max_bytes` together; a larger tensor is alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (size + num_bytes > max_bytes or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += num_bytes
    if bucket:
        yield bucket


MAX_ARGUMENTS = 4


def this_program() -> str:
    """Returns the command line of this process as arguments for torchrun: `train.py --lr ...`, `-m package run ...`."""
    arguments = [word for word in sys.orig_argv[1:] if word not in ('-u', '-I', '-E', '-s', '-S', '-B', '-O')]
    if not arguments or arguments[0] in ('-c', '-'):
        return 'script.py'
    return shlex.join(arguments[:MAX_ARGUMENTS]) + ' ...' * (len(arguments) > MAX_ARGUMENTS)


class ProcessGroup(Ranks):
    """Joins torchrun's process group: NCCL on CUDA, gloo on the CPU. An existing group is used, and not destroyed.

    Args:
        device: 'cpu' uses no GPU.
        timeout_s: limit of every collective; the failure guard ends all ranks and names those that are late.
        what: name of the user of the group, for error messages.
    """

    local_rank, device = 0, torch.device('cpu')

    def __init__(self, device: str | torch.device | None = None, timeout_s: float = 1800.0, what: str = 'this') -> None:
        if not timeout_s > 0:
            raise ValueError(f'timeout_s={timeout_s} must be positive')
        self.timeout_s, self._what = timeout_s, what
        self.status = RankStatus()
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            missing = [name for name in _NEEDED if name not in os.environ]
            if missing:
                raise ValueError(
                    f'{self._what} runs in processes started together, and {", ".join(missing)} is not set; '
                    f'launch with: torchrun --nproc-per-node=<number of processes> {this_program()}'
                )
        self.local_rank = int(os.environ.get('LOCAL_RANK', '0'))
        self.device = self._choose_device(device)
        if self.device.type == 'cuda':
            torch.cuda.set_device(self.device)
            grow_segments()
        else:
            keep_freed_memory()
        if self._owns_group:
            backend = 'nccl' if self.device.type == 'cuda' else 'gloo'
            _join(backend, timedelta(seconds=timeout_s))
        if dist.get_backend() == 'gloo':
            finish_gloo_at_exit()

    def _choose_device(self, device: str | torch.device | None) -> torch.device:
        if device is not None and torch.device(device).index is not None:
            return torch.device(device)
        kind = torch.device(device).type if device is not None else default_device()
        if kind != 'cuda':
            return torch.device(kind)
        visible = torch.cuda.device_count()
        if visible > 1 and self.local_rank >= visible:
            raise ValueError(f'LOCAL_RANK={self.local_rank} but only {visible} CUDA devices are visible')
        return torch.device('cuda', self.local_rank if visible > 1 else 0)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def all_reduce(self, tensor: Tensor, op: str = 'sum') -> Tensor:
        if op not in _OPS:
            raise ValueError(f'all_reduce: op={op!r} is not one of {", ".join(_OPS)}')
        reduced = tensor.detach().to(self.device, copy=True).contiguous()
        with self.status.waiting():
            dist.all_reduce(reduced, _OPS[op])
            if self.device.type == 'cuda':
                torch.cuda.current_stream(self.device).synchronize()  # NCCL has only queued the reduction
        return (reduced / self.world_size if op == 'mean' else reduced).to(tensor.device)

    def all_gather_object(self, obj: T) -> list[T]:
        gathered: list[Any] = [None] * self.world_size
        with self.status.waiting():
            dist.all_gather_object(gathered, obj)
        return gathered

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        box = [obj]
        with self.status.waiting():
            dist.broadcast_object_list(box, src=src, device=self.device)
        return box[0]

    def scatter_object(self, objs: SequenceOf[T], group: Any = None) -> T:
        box: list[Any] = [None]
        with self.status.waiting():
            dist.scatter_object_list(box, list(objs) if self.rank == 0 else None, src=0, group=group)
        return box[0]

    def exchange(self, sent: SequenceOf[Tensor], group: Any = None) -> list[Tensor]:
        sizes = [len(tensor) for tensor in sent]
        counts = torch.tensor(sizes, device=self.device)
        with self.status.waiting():
            dist.all_to_all_single(coming := torch.empty_like(counts), counts, group=group)
            flat, coming_sizes = torch.cat(list(sent)).to(self.device), coming.tolist()
            received = flat.new_empty(sum(coming_sizes))
            dist.all_to_all_single(received, flat, coming_sizes, sizes, group=group)
            received = received.to(sent[0].device)  # waits for the device
        return list(received.split(coming_sizes))

    def barrier(self) -> None:
        with self.status.waiting():
            if dist.get_backend() == 'nccl':
                dist.barrier(device_ids=[self.device.index])
            else:
                dist.barrier()

    def note_progress(self, where: str) -> None:
        self.status.note(where)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        yield
        FailureGuard.meet()

    def failure_guard(self) -> AbstractContextManager[None]:
        return FailureGuard(self.rank, self.world_size, timeout_s=self.timeout_s, status=self.status)

    def fails_together(self, state: str) -> bool:
        return self.world_size == 1 or FailureGuard.agree(f'{state}, {self.status.collectives} collectives')

    def leave(self) -> None:
        if self._owns_group and dist.is_initialized():
            self._owns_group = False
            dist.destroy_process_group()


IDLE_S = 0.1
"""how long the threads must be idle; on a busy machine a runnable thread may wait for some tens of milliseconds"""
LIMIT_S = 5.0
"""how long to wait for the threads at most"""
GLOO_THREAD = 'pt_gloo_runloop'
FIELDS = ('Pid', 'State', 'voluntary_ctxt_switches', 'nonvoluntary_ctxt_switches')


def finish_gloo_at_exit() -> None:
    """Destroys the gloo group at exit and waits for its threads to finish. May be called more than once.

    A gloo thread frees the tensors of a collective shortly after the caller has returned, and takes the GIL for it. If
    the interpreter is shutting down, Python ends that thread inside a C++ destructor, and the process dies with
    SIGABRT. Destroying the group is not enough: torch 2.13 keeps it after DistributedDataParallel has used it.
    """
    atexit.unregister(_finish)
    atexit.register(_finish)


def _finish() -> None:
    if dist.is_initialized() and dist.get_backend() == 'gloo':
        dist.destroy_process_group()
    end = time.monotonic() + LIMIT_S
    before = _activity()
    while before and time.monotonic() < end:
        time.sleep(IDLE_S)  # releases the GIL
        now = _activity()
        if now == before and not any('running' in state for state in now):
            return
        before = now


def _activity() -> list[str]:
    """Returns the state and the numbers of context switches of each gloo thread of this process. Empty without /proc,
    or if the threads have ended."""
    found = []
    for task in sorted(Path('/proc/self/task').glob('*')):
        try:
            lines = (task / 'status').read_text().splitlines()
        except OSError:  # the thread has ended
            continue
        fields = {name: value.strip() for name, _, value in (line.partition(':') for line in lines)}
        if fields.get('Name') == GLOO_THREAD:
            found.append(' '.join(fields.get(name, '') for name in FIELDS))
    return found


class ProcessGroupStrategy(Strategy):
    """A strategy on the processes that torchrun started; see `ProcessGroup`."""

    ranks: ProcessGroup

    def __init__(
        self,
        seed: int = 42,
        precision: Precision = 'auto',
        *,
        device: str | torch.device | None = None,
        timeout_s: float = 1800.0,
        **numerics: Any,
    ) -> None:
        Numerics.of(type(self), {'precision': precision, **numerics})  # raises for mistakes before joining the group
        ranks = ProcessGroup(device, timeout_s, type(self).__name__)
        super().__init__(seed, precision, ranks=ranks, **numerics)
        if precision == 'auto' and self.device.type == 'cuda':  # all CPUs resolve it alike
            own = self.numerics.precision, torch.cuda.get_device_name(self.device)
            chosen = ranks.all_gather_object(own)
            if len({found for found, _ in chosen}) > 1:
                listed = ', '.join(f'{found} on rank {rank} ({name})' for rank, (found, name) in enumerate(chosen))
                raise ValueError(
                    f"precision='auto' is {listed}; give precision='fp32', or one that all of them compute in"
                )

    def fill_gradients(self, parameters: list[Tensor]) -> list[Tensor]:
        """Returns the parameters with a gradient on any rank, with zeros where this rank has none. Collective."""
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=self.device)
        with self.ranks.status.waiting():
            dist.all_reduce(used, dist.ReduceOp.MAX)
            flags = used.tolist()
        found = [parameter for parameter, flag in zip(parameters, flags, strict=True) if flag]
        for parameter in found:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return found

    def disable_layer_drop(self, model: nn.Module) -> None:
        """Turns layerdrop off in a trained model, with a warning. For strategies that gather a block's weights from all
        ranks, each of which would skip different blocks. Called by `prepare`."""
        from chatgpt.nn.trunk import layer_drop_off

        if layer_drop_off(model):
            warnings.warn(
                f'{type(self).__name__}: layerdrop of the config is set to 0, for a rank that leaves a block out would '
                'be missing where its weights are gathered',
                stacklevel=6,  # the line that calls `prepare`
            )

    @torch.no_grad()
    def broadcast_weights(self, model: nn.Module, bucket_bytes: int = 0, own: Container[int] = ()) -> None:
        """Broadcasts rank 0's weights and buffers, in buckets of `bucket_bytes` or one tensor at a time, except those
        with an id in `own`."""
        tensors = [t.detach() for t in (*model.parameters(), *model.buffers()) if t.numel() and id(t) not in own]
        for bucket in buckets(tensors, bucket_bytes):
            flat = torch.cat([t.reshape(-1).to(self.device) for t in bucket])
            with self.ranks.status.waiting():
                dist.broadcast(flat.view(torch.uint8), src=0)  # as bytes: backends do not support all dtypes
            for tensor, values in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(values.view(tensor.shape))
