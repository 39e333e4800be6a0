"""The processes that hold one model's matrices together, and what passes between them while they compute.

Left out: autograd, and who is in a group (`chatgpt.trainer.strategies.tensor_ranks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """A process group, and which part of every cut tensor this process has."""

    group: Any
    index: int
    size: int

    def bounds(self, width: int) -> tuple[int, int]:
        """[start, stop) of this process's part of `width` numbers, cut as `torch.chunk` does: the last may be
        shorter."""
        return part_of(width, self.index, self.size)

    def sum(self, x: Tensor) -> Tensor:
        """A new tensor, equal to the bit on all."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op, group=self.group)
        return out

    def joined(self, x: Tensor, width: int, dim: int = -1) -> Tensor:
        """The parts of all behind one another along `dim`, `width` numbers long."""
        own, lacks = x.detach(), -(-width // self.size) - x.shape[dim]
        if lacks:  # all send equally much
            own = torch.cat([own, own.new_zeros(*own.shape[:dim], lacks, *own.shape[dim % own.dim() + 1 :])], dim)
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts, dim).narrow(dim, 0, width)

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        return self


def part_of(width: int, index: int, size: int) -> tuple[int, int]:
    """[start, stop) of part `index` of `size`, as `torch.chunk` cuts."""
    longest = -(-width // size)
    start = min(index * longest, width)
    return start, min(start + longest, width)
