"""Writes report.html into the run folder when the run ends, is stopped or fails, and prints a summary."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import ClassVar

from chatgpt.monitor.report import what_improved, write_report
from chatgpt.monitor.run_folder import RunFolder
from chatgpt.trainer.callbacks.base import Callback, TrainerView, say


class WriteReport(Callback):
    """Writes `run_dir/report.html` on rank 0, after the other callbacks, and prints what the run has improved and where
    the page is. Part of every trainer with a `run_dir`. A page that cannot be written is a warning.

    Args:
        show: False writes the page and prints nothing.
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
    """Returns the path relative to the working folder if it is inside, else as it is."""
    given = os.path.relpath(path)
    return str(path) if given.startswith('..') else given
