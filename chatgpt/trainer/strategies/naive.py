"""`NaiveStrategy`: one process, one device. The numbers every other strategy is compared with."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from chatgpt.trainer.strategies.base import Strategy
from chatgpt.trainer.strategies.host_memory import keep_freed_memory
from chatgpt.trainer.strategies.precision import Precision

T = TypeVar('T')


class NaiveStrategy(Strategy):
    """One process: the first GPU when there is one, otherwise the CPU. `device='cpu'` stays off the GPU.

    >>> strategy = NaiveStrategy(seed=1, device='cpu')
    >>> strategy.world_size, strategy.device.type
    (1, 'cpu')
    """

    def __init__(self, seed: int = 42, precision: Precision = 'fp32', *, device: str | torch.device | None = None) -> None:
        super().__init__(seed, precision)
        self._device = torch.device(device or ('cuda:0' if torch.cuda.is_available() else 'cpu'))
        if self._device.type == 'cpu':
            keep_freed_memory()

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        return self._device

    def all_reduce(self, tensor: Tensor, op: str = 'sum') -> Tensor:
        if op not in ('sum', 'mean', 'max', 'min'):
            raise ValueError(f'all_reduce: op={op!r} is not one of sum, mean, max, min')
        return tensor.detach().clone()

    def all_gather_object(self, obj: T) -> list[T]:
        return [obj]

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        return obj
