"""A callback that keeps what a trainer reports."""

from __future__ import annotations

from typing import Any

from chatgpt.trainer.callbacks import ProgressBar


class Log(ProgressBar):
    """Keeps the metrics of every phase, but for the seconds."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.phases: list[dict[str, float]] = []

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.phases.append({k: v for k, v in metrics.items() if not k.startswith('perf/')})
