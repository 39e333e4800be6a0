"""The `accelerator` of a trainer, with what scripts touch of it: who this process is, the device, gathering."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chatgpt.trainer.strategies.base import Strategy


class Accelerator:
    """A view of a strategy under accelerate's names."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    @property
    def is_main_process(self) -> bool:
        return self.strategy.is_rank_0

    @property
    def is_local_main_process(self) -> bool:
        return self.strategy.local_rank == 0

    @property
    def process_index(self) -> int:
        return self.strategy.rank

    @property
    def local_process_index(self) -> int:
        return self.strategy.local_rank

    @property
    def num_processes(self) -> int:
        return self.strategy.world_size

    @property
    def device(self) -> torch.device:
        return self.strategy.device

    @property
    def mixed_precision(self) -> str:
        return {'fp32': 'no'}.get(self.strategy.precision, self.strategy.precision)

    def print(self, *values: Any, **options: Any) -> None:
        """On the main process."""
        if self.is_main_process:
            print(*values, **options)

    def wait_for_everyone(self) -> None:
        self.strategy.barrier()

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """The transformers model inside what a strategy wrapped."""
        bare = self.strategy.unwrap(model)
        return getattr(bare, 'model', bare)

    def gather(self, tensor: Tensor) -> Tensor:
        """Of all processes, along the first dimension."""
        parts = self.strategy.all_gather_object(tensor.cpu())
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts]).to(tensor.device)

    gather_for_metrics = gather
