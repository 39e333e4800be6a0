"""What one process holds of a model under tensor parallelism, and computes with it: a module on the meta device is cut
as `FSDPStrategy` cuts it, by the model's plan, and then counted and traced as any other.

What passes between the processes has its shapes and no numbers. Left out: the plan itself
(`chatgpt.strategies.tensor_parallel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.strategies.tensor_parallel import check_model, parallelize
from chatgpt.strategies.tensor_ranks import TensorGroup


@dataclass(frozen=True, eq=False)
class AloneGroup(TensorGroup):
    """A group whose other processes are not there: the first one's memory, whatever the numbers."""

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        return x.detach().clone(memory_format=torch.contiguous_format)

    def joined(self, x: Tensor, width: int, dim: int = -1) -> Tensor:
        own = x.detach().contiguous()
        return torch.cat([torch.empty_like(own) for _ in range(self.size)], dim).narrow(dim, 0, width)


def keep_part(module: nn.Module, tensor_parallel: int) -> None:
    """Leave of `module`, on the meta device, what the first process of a rank holds.

    Raises:
        ValueError: a model that cannot be cut so.
    """
    if tensor_parallel > 1:
        parallelize(module, AloneGroup(None, 0, tensor_parallel), None, check_model(module, tensor_parallel))


def can_be_cut(module: nn.Module, tensor_parallel: int) -> bool:
    try:
        check_model(module, tensor_parallel)
    except ValueError:
        return False
    return True
