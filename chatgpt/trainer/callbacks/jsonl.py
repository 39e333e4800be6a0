"""metrics.jsonl: one JSON object per learning phase, with `step` and every metric of the phase (docs/metrics.md).

A resumed run truncates the file to the step of its checkpoint. `chatgpt.monitor.run_folder.lines` writes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chatgpt.monitor.run_folder.lines import JsonLines, json_safe, read_jsonl
from chatgpt.trainer.callbacks.base import Callback, TrainerView
from chatgpt.trainer.callbacks.run_record import OTHER_FILES

__all__ = ['JsonLines', 'MetricsWriter', 'RunFile', 'RunFileWriter', 'json_safe', 'read_jsonl']


class RunFile:
    """A JsonLines file in the run folder, written by rank 0. The first write truncates it to the present step."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.file: JsonLines | None = None

    def begin(self, trainer: TrainerView, step: int) -> None:
        """Continues after `step`. Nothing is written without a run folder, or on other ranks."""
        self.file = None
        if trainer.run_dir is not None and trainer.strategy.is_rank_0:
            file = JsonLines(trainer.run_dir / self.filename)
            if step > 0 or self.filename not in OTHER_FILES:
                file.begin(step)
            else:  # another callback may have begun it
                file.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = file

    def write(self, trainer: TrainerView, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Appends records of `step`. A failed write, for example on a full disk, is a warning and does not end the
        run."""
        if trainer.run_dir is None or not trainer.strategy.is_rank_0:
            return
        try:
            if self.file is None:
                self.begin(trainer, step - 1)
            assert self.file is not None
            self.file.append({'step': step, **r} for r in records)
        except OSError as error:
            path = trainer.run_dir / self.filename
            warnings.warn(f'{path}: step {step} could not be written ({error.strerror or error})', stacklevel=2)

    def forget(self) -> None:
        """Begins again at the next write, when the run's step may have changed."""
        self.file = None


class RunFileWriter(Callback):
    """Base of callbacks that write a `RunFile`, which begins with the run, and again after a resume."""

    def __init__(self, filename: str) -> None:
        self._file = RunFile(filename)

    def on_fit_start(self, trainer: TrainerView) -> None:
        self._file.begin(trainer, trainer.phase)

    def on_resume(self, trainer: TrainerView, path: Path) -> None:
        self._file.forget()


class MetricsWriter(RunFileWriter):
    """Writes `run_dir/metrics.jsonl`. Part of every trainer with a `run_dir`."""

    def __init__(self, filename: str = 'metrics.jsonl') -> None:
        super().__init__(filename)
        self.filename = filename

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        self._file.write(trainer, step, [metrics])
