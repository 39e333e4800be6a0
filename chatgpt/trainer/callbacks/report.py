"""report.html in the run folder when the run ends, is stopped or fails, and the last words of a run."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import ClassVar

from chatgpt.monitor.report import what_improved, write_report
from chatgpt.monitor.run_folder import RunFolder
from chatgpt.trainer.callbacks.base import Callback, TrainerView, say


class WriteReport(Callback):
    """Writes `run_dir/report.html`, on rank 0, after the others have written what it shows, and says in two lines what
    the run has improved and where the page is. A trainer with a `run_dir` has one without being asked. A page that
    cannot be written is a warning.

    Args:
        show: False writes the page and says nothing.
    """

    order: ClassVar[int] = 1000

    def __init__(self, show: bool = True) -> None:
        self.show = show

    def on_fit_end(self, trainer: TrainerView) -> None:
        self._write(trainer)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: TrainerView) -> None:
        folder = trainer.run_dir
        if folder is None or not trainer.strategy.is_rank_0:
            return
        try:
            path = write_report(folder)
            if self.show:
                say(f'{what_improved(RunFolder(folder))}\nreport: {shortest(path)}')
        except Exception as error:
            warnings.warn(f'no report: {type(error).__name__}: {error}', stacklevel=2)


def shortest(path: Path) -> str:
    """As seen from the working folder, where it is below that."""
    given = os.path.relpath(path)
    return str(path) if given.startswith('..') else given
