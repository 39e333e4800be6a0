"""`NaiveStrategy`: one process, one device. The numbers every other strategy is compared with."""

from __future__ import annotations

from typing import Any

import torch

from chatgpt.trainer.strategies.base import Strategy
from chatgpt.trainer.strategies.exact import Reproducible
from chatgpt.trainer.strategies.precision import Precision
from chatgpt.trainer.strategies.ranks import OneProcess


class NaiveStrategy(Strategy):
    """One process: the first GPU when there is one, otherwise the CPU. `device='cpu'` stays off the GPU.

    >>> strategy = NaiveStrategy(seed=1, device='cpu')
    >>> strategy.world_size, strategy.device.type
    (1, 'cpu')
    """

    def __init__(
        self,
        seed: int = 42,
        precision: Precision = 'auto',
        *,
        device: str | torch.device | None = None,
        deterministic: bool = False,
        reproducible: Reproducible = None,
        atoms: int = 8,
    ) -> None:
        options: Any = {'deterministic': deterministic, 'reproducible': reproducible, 'atoms': atoms}
        super().__init__(seed, precision, ranks=OneProcess(device), **options)
