"""`Doctor` detects problems of a run, prints a line for each, and writes it into run_dir/findings.jsonl."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chatgpt.monitor.doctor import Diagnosis, Finding
from chatgpt.monitor.run_folder.lines import json_safe, read_jsonl
from chatgpt.trainer.callbacks.base import Callback, TrainerView, say
from chatgpt.trainer.callbacks.jsonl import MetricsWriter, RunFile
from chatgpt.trainer.callbacks.run_record import RunRecorder, describe

FILENAME = 'findings.jsonl'


class Doctor(Callback):
    """Checks the metrics of each phase, on rank 0. Part of every trainer.

    A finding is printed once, when it begins. After a resume, earlier findings are known from the checkpoint and the
    folder.

    Args:
        enabled: False checks, prints and writes nothing.
    """

    def __init__(self, enabled: bool = True, *, filename: str = FILENAME) -> None:
        self.enabled = enabled
        self._file = RunFile(filename)
        self._diagnosis: Diagnosis | None = None
        self._found: dict[str, int] = {}
        """findings of earlier starts of the run: key → phase"""
        self._printed: set[str | None] = set()
        """findings that a start beyond the checkpoint has printed: written again, but not printed"""

    @property
    def found(self) -> dict[str, int]:
        """All findings so far: key → phase in which it began."""
        return dict(self._diagnosis.found if self._diagnosis is not None else self._found)

    def state_dict(self) -> dict[str, Any]:
        return {'found': self.found} if self.found else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._found, self._diagnosis = dict(state['found']), None

    def on_fit_start(self, trainer: TrainerView) -> None:
        self._try(lambda: self._begin(trainer, trainer.phase), trainer, trainer.phase)

    def on_resume(self, trainer: TrainerView, path: Path) -> None:
        self._diagnosis = None
        self._file.forget()

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        self._try(lambda: self._see(trainer, step, metrics), trainer, step)

    def _try(self, look: Callable[[], None], trainer: TrainerView, step: int) -> None:
        """Calls `look` on rank 0; an exception is a warning, because a diagnosis must not end a run."""
        if not (self.enabled and trainer.strategy.is_rank_0):
            return
        try:
            look()
        except Exception as error:
            text = f'the doctor failed at phase {step}, and looks no further: {type(error).__name__}: {error}'
            warnings.warn(text, stacklevel=3)
            self.enabled = False

    def _see(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        if self._diagnosis is None:
            self._begin(trainer, step - 1)
        assert self._diagnosis is not None
        new = self._diagnosis.see({**json_safe(metrics), 'step': step})
        if new:
            self._file.write(trainer, step, [finding.row() for finding in new])
        for finding in new:
            self._print(trainer, finding)

    def _begin(self, trainer: TrainerView, before: int) -> None:
        """Prepares to continue after phase `before`."""
        record = next(
            (c.record for c in trainer.callbacks if isinstance(c, RunRecorder) and c.record is not None), None
        ) or describe(trainer)
        if self._diagnosis is not None and before > 0:  # a second `fit` of one trainer
            self._diagnosis.history.record = record
            return
        self._diagnosis = Diagnosis(record, found=self._found if before else ())
        self._diagnosis.found |= self._found if before else {}
        if before and trainer.run_dir is not None:
            self._printed = {row.get('finding') for row in _rows(trainer.run_dir / self._file.filename)}
            writer = next((c for c in trainer.callbacks if isinstance(c, MetricsWriter)), None)
            for row in _rows(trainer.run_dir / writer.filename) if writer is not None else ():
                if row['step'] <= before:
                    self._diagnosis.remember(row)
        self._file.begin(trainer, before)

    def _print(self, trainer: TrainerView, finding: Finding) -> None:
        if finding.key not in self._printed:
            say(finding.line())


def _rows(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path) if path.is_file() else []
