"""`NaiveStrategy`: one process, one device; the reference for the numbers of the other strategies."""

from __future__ import annotations

from typing import Any

import torch

from chatgpt.strategies.base import Strategy
from chatgpt.strategies.precision import Precision
from chatgpt.strategies.ranks import OneProcess


class NaiveStrategy(Strategy):
    """One process on the first GPU, or on the CPU without a GPU or with `device='cpu'`.

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
        **numerics: Any,
    ) -> None:
        super().__init__(seed, precision, ranks=OneProcess(device), **numerics)
