"""`TensorRanks`: ranks of several processes each, which hold a model together.

    process   0   1   2   3   4   5          a mesh of 3 ranks x 2 processes
    rank      0   0   1   1   2   2          share of the data, sampling and records
    index     0   1   0   1   0   1          part of the weights

Objects and sums are those of a rank's first process, so that all processes agree where they differ (times, signals).
Maxima and minima are over all processes, so that a flag that is set on any of them is seen.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from chatgpt.strategies.processes import ProcessGroup
from chatgpt.strategies.ranks import Ranks, check_world_size

T = TypeVar('T')


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """The processes that split a model's matrices, and this process's index among them."""

    group: Any
    index: int
    size: int

    def bounds(self, width: int) -> tuple[int, int]:
        """Returns [start, stop) of this process's part of `width` elements, see `part_of`."""
        return part_of(width, self.index, self.size)

    @property
    def capturable(self) -> bool:
        """True if CUDA graphs can hold its collectives."""
        return 'nccl' in dist.get_backend(self.group)

    def sum(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Returns the sum over the group in a new tensor, with the same bits on all."""
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op, group=self.group)
        return out

    def max(self, x: Tensor) -> Tensor:
        return self.sum(x, dist.ReduceOp.MAX)

    def joined(self, x: Tensor, width: int, dim: int = -1) -> Tensor:
        """Concatenates the parts of all processes along `dim`, to `width` elements."""
        own, lacks = x.detach(), -(-width // self.size) - x.shape[dim]
        if lacks:  # all_gather needs equal sizes
            own = torch.cat([own, own.new_zeros(*own.shape[:dim], lacks, *own.shape[dim % own.dim() + 1 :])], dim)
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts, dim).narrow(dim, 0, width)

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        return self


def part_of(width: int, index: int, size: int) -> tuple[int, int]:
    """Returns [start, stop) of part `index` of `size`, as in `torch.chunk`: the last may be shorter."""
    longest = -(-width // size)
    start = min(index * longest, width)
    return start, min(start + longest, width)


def _of_process(name: str) -> Any:
    """Returns a property that reads `processes`."""
    return property(lambda self: getattr(self.processes, name))


class TensorRanks(Ranks):
    """Ranks of `tensor_parallel` neighbouring processes each.

    Raises:
        ValueError: if the number of processes is not a multiple of it.
    """

    option: ClassVar[str] = 'tensor_parallel'

    def __init__(self, processes: ProcessGroup, tensor_parallel: int) -> None:
        check_world_size(processes.world_size, tensor_parallel, self.option)
        self._processes, self.tensor_parallel = processes, tensor_parallel
        shape = (processes.world_size // tensor_parallel, tensor_parallel)
        self.mesh: DeviceMesh = init_device_mesh(processes.device.type, shape, mesh_dim_names=('data', 'tensor'))
        """ranks x processes of a rank"""

    @property
    def processes(self) -> ProcessGroup:
        return self._processes

    @property
    def rank(self) -> int:
        return self._processes.rank // self.tensor_parallel

    @property
    def world_size(self) -> int:
        return self._processes.world_size // self.tensor_parallel

    @property
    def index(self) -> int:
        """Index of this process in its rank."""
        return self._processes.rank % self.tensor_parallel

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def is_rank_0(self) -> bool:
        return self._processes.rank == 0

    local_rank: Any = _of_process('local_rank')
    device: Any = _of_process('device')
    status: Any = _of_process('status')
    timeout_s: Any = _of_process('timeout_s')
    barrier: Any = _of_process('barrier')
    run_on_rank0: Any = _of_process('run_on_rank0')
    note_progress: Any = _of_process('note_progress')
    untimed: Any = _of_process('untimed')
    failure_guard: Any = _of_process('failure_guard')
    fails_together: Any = _of_process('fails_together')
    leave: Any = _of_process('leave')

    @property
    def group(self) -> TensorGroup:
        """The processes of this rank."""
        return TensorGroup(self.mesh.get_group('tensor'), self.index, self.tensor_parallel)

    def all_reduce(self, tensor: Tensor, op: str = 'sum') -> Tensor:
        if op not in ('sum', 'mean'):
            return self._processes.all_reduce(tensor, op)
        reduced = tensor.detach().to(self.device, copy=True).contiguous()
        with self.status.waiting():
            dist.all_reduce(reduced, group=self.mesh.get_group('data'))
            first = self.rank * self.tensor_parallel
            dist.broadcast(reduced, src=first, group=self.mesh.get_group('tensor'))
            if self.device.type == 'cuda':
                torch.cuda.current_stream(self.device).synchronize()
        return (reduced / self.world_size if op == 'mean' else reduced).to(tensor.device)

    def all_gather_object(self, obj: T) -> list[T]:
        gathered: list[Any] = [None] * self.world_size  # one process of each rank: the others have copies
        with self.status.waiting():
            dist.all_gather_object(gathered, obj, group=self.mesh.get_group('data'))
        return self.from_leader(gathered)

    def scatter_object(self, objs: SequenceOf[T]) -> T:
        group = self.mesh.get_group('data')
        own: Any = self._processes.scatter_object(objs, group) if self.leads else None
        return self.from_leader(own)

    def exchange(self, sent: SequenceOf[Tensor]) -> list[Tensor]:
        return self._processes.exchange(sent, self.mesh.get_group('data'))

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        return self._processes.broadcast_object(obj, src * self.tensor_parallel)

    def from_leader(self, obj: T) -> T:
        box = [obj]
        with self.status.waiting():
            first, group = self.rank * self.tensor_parallel, self.mesh.get_group('tensor')
            dist.broadcast_object_list(box, src=first, group=group, device=self.device)
        return box[0]
