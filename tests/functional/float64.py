"""Short constructors of small tensors."""

from __future__ import annotations

import torch

F64 = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def bools(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def all_count(lists: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ones_like(x, dtype=torch.bool) for x in lists]
