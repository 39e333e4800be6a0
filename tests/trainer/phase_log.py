"""A callback that keeps what a trainer reports, and a sequence of given tokens."""

from __future__ import annotations

from typing import Any

import torch

from chatgpt.trainer.callbacks import ProgressBar
from chatgpt.types import Sequence


class Log(ProgressBar):
    """Keeps the metrics of every phase, but for the seconds."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.phases: list[dict[str, float]] = []

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.phases.append({k: v for k, v in metrics.items() if not k.startswith('perf/')})


def sequence(prompt: list[int], response: list[int], mask: list[int] | None = None) -> Sequence:
    flags = torch.tensor(mask or [1] * len(response), dtype=torch.bool)
    ids = torch.tensor(prompt, dtype=torch.int64), torch.tensor(response, dtype=torch.int64)
    return Sequence(prompt_ids=ids[0], response_ids=ids[1], response_mask=flags)
