"""report.html in the run folder when a run ends, is stopped or fails. Left out: the page itself (`chatgpt.report`)."""

from __future__ import annotations

import warnings
from typing import ClassVar

from chatgpt.trainer.callbacks.base import Callback, TrainerView


class WriteReport(Callback):
    """Writes `run_dir/report.html`, on rank 0, after the others have written what it shows. A trainer with a `run_dir`
    has one without being asked. A page that cannot be written is a warning."""

    order: ClassVar[int] = 1000

    def on_fit_end(self, trainer: TrainerView) -> None:
        self._write(trainer)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        self._write(trainer)

    @staticmethod
    def _write(trainer: TrainerView) -> None:
        if trainer.run_dir is None or not trainer.strategy.is_rank_0:
            return
        from chatgpt.report import write_report

        try:
            write_report(trainer.run_dir)
        except Exception as error:
            warnings.warn(f'no report: {type(error).__name__}: {error}', stacklevel=2)
