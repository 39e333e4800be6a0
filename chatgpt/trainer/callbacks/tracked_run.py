"""What the trackers that keep runs of their own have in common: one run of theirs per run of ours, on rank 0, from its
first phase to its end, found again by its id after a resume.

Left out: how each of them starts, logs and ends a run (`wandb`, `trackio`, `mlflow`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from chatgpt.trainer.callbacks.base import Callback, TrainerView, check_interval
from chatgpt.trainer.callbacks.samples import rows_of


class TrackedRun(Callback, ABC):
    """Logs every metric of every learning phase with the phase as step, and samples every `samples_every` phases.

    Args:
        samples_every: learning phases between tables of samples.
        num_rows: rows of a table; 0 logs none.
    """

    def __init__(self, *, samples_every: int = 10, num_rows: int = 4) -> None:
        self.samples_every = check_interval('samples_every', samples_every)
        self.num_rows = num_rows
        self._run_id: str | None = None
        self._is_open = False

    @abstractmethod
    def start(self, trainer: TrainerView, run_id: str | None) -> str:
        """Begin a run with the trainer's settings, or go on with that of `run_id`; its id."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], rows: SequenceOf[Mapping[str, Any]], step: int) -> None:
        """Metrics of a phase, and rows of samples in some phases; else none."""

    @abstractmethod
    def finish(self, *, failed: bool) -> None:
        """End the run."""

    def state_dict(self) -> dict[str, Any]:
        return {'run_id': self._run_id} if self._run_id else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run_id = state['run_id']

    def on_fit_start(self, trainer: TrainerView) -> None:
        if trainer.strategy.is_rank_0:
            self._run_id = self.start(trainer, self._run_id)
            self._is_open = True

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        if not self._is_open:
            return
        shown = self.num_rows and trainer.last_experiences and (step == 1 or step % self.samples_every == 0)
        self.log(metrics, rows_of(trainer.last_experiences, self.num_rows, trainer.tokenizer) if shown else [], step)

    def on_fit_end(self, trainer: TrainerView) -> None:
        self._end(failed=False)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        self._end(failed=True)

    def _end(self, *, failed: bool) -> None:
        if self._is_open:
            self._is_open = False
            self.finish(failed=failed)
