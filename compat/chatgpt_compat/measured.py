"""A loss of ours with further metrics of its forward, for the statistics that other systems have and this library does
not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.trainer.metrics import Mean
from chatgpt.types import Batch


@dataclass(frozen=True)
class Measured:
    """`loss(model, batch)` times `factor`, and what `measure(output of the model, batch)` gives: (N,) numbers by name,
    whose means over the tokens that count are the metrics."""

    loss: Any
    measure: Callable[[Any, Batch], dict[str, Tensor]]
    factor: float = 1.0

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda module, given, output: seen.append(output))
        try:
            total, metrics = self.loss(model, batch)
        finally:
            hook.remove()
        with torch.no_grad():
            mask, tokens = batch.action_mask, self.measure(seen[-1], batch)
            means = {name: Mean(torch.where(mask, x, 0.0).sum(), mask.sum()) for name, x in tokens.items()}
        return total if self.factor == 1.0 else self.factor * total, {**metrics, **means}
