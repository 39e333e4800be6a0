"""A callback that ends a run early, for tests of a resume."""

from __future__ import annotations

from typing import Any

from chatgpt.trainer.callbacks import Callback


class StopAfter(Callback):
    """Requests a stop at the end of a phase. save: writes a checkpoint before."""

    def __init__(self, phase: int, save: bool = False) -> None:
        self.phase, self.save = phase, save

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if step == self.phase:
            if self.save:
                trainer.save_checkpoint()
            trainer.request_stop()
