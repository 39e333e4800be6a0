"""metrics.jsonl: one JSON object per learning phase, with `step` and every metric of the phase.

Each line is flushed and fsynced, so a killed run keeps all it has written. A resumed run cuts the file back to the step
of its checkpoint. JSON has no NaN and no infinity: a value that is not finite is written as null, which every reader of
JSON takes, and pandas reads as NaN. Left out: what the metrics mean (docs/metrics.md).
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chatgpt.trainer.callbacks.base import Callback, TrainerView


def json_safe(value: Any) -> Any:
    """The value with NaN and infinities replaced by None, and tensors and numpy numbers by Python's, at any depth."""
    if isinstance(value, Mapping):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, 'tolist'):
        return json_safe(value.tolist())
    return str(value)


class JsonLines:
    """A file of JSON objects, one a line, each with a `step` that never falls; only ever appended to and cut back."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the records and make them durable. On failure (a full disk) the file is cut back to what it was."""
        text = ''.join(json.dumps(json_safe(r), ensure_ascii=False, allow_nan=False) + '\n' for r in records)
        with open(self.path, 'ab') as file:
            before = file.tell()
            try:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, before)
                raise

    def begin(self, step: int) -> None:
        """Get the file ready to go on after `step`. A run from the beginning moves an earlier run's lines aside.

        They are kept as `<name>.previous.jsonl`, which the next such move replaces.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if step > 0:
            self.truncate_to(step)
        elif self.path.exists() and self.path.stat().st_size > 0:
            os.replace(self.path, self.path.with_name(f'{self.path.stem}.previous{self.path.suffix}'))

    def truncate_to(self, step: int) -> int:
        """Cut the file before its first line with a later step; a torn line, as a kill leaves it, goes too. Returns
        bytes cut."""
        if not self.path.exists():
            return 0
        keep = 0
        with open(self.path, 'r+b') as file:
            for line in file:
                if not line.endswith(b'\n') or not _has_step_up_to(line, step):
                    break
                keep += len(line)
            size = file.seek(0, os.SEEK_END)
            if keep < size:
                file.truncate(keep)
                file.flush()
                os.fsync(file.fileno())
        return size - keep


def _has_step_up_to(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)['step'] <= step
    except (ValueError, KeyError, TypeError):
        return False


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of such a file; a torn last line is left out."""
    lines = Path(path).read_bytes().split(b'\n')
    return [json.loads(line) for line in lines[:-1]]


class RunFile:
    """A JsonLines file in the trainer's run folder, written by rank 0 and opened where the run stands when first
    written to."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.file: JsonLines | None = None

    def begin(self, trainer: TrainerView, step: int) -> None:
        """Go on after `step`. Without a run folder, or on another rank, nothing will be written."""
        self.file = None
        if trainer.run_dir is not None and trainer.strategy.is_rank_0:
            self.file = JsonLines(trainer.run_dir / self.filename)
            self.file.begin(step)

    def write(self, trainer: TrainerView, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records of `step`. A write that fails is a warning: a full disk must not end a run for a line of its
        log."""
        if self.file is None:
            if trainer.run_dir is None or not trainer.strategy.is_rank_0:
                return
            self.begin(trainer, step - 1)
        assert self.file is not None
        try:
            self.file.append({'step': step, **r} for r in records)
        except OSError as error:
            warnings.warn(
                f'{self.file.path}: step {step} could not be written ({error.strerror or error})', stacklevel=2
            )

    def forget(self) -> None:
        """The run's step may have changed: begin anew at the next write."""
        self.file = None


class RunFileWriter(Callback):
    """Base of the callbacks that write a `RunFile`: it begins with the run, and anew after a resume."""

    def __init__(self, filename: str) -> None:
        self._file = RunFile(filename)

    def on_fit_start(self, trainer: TrainerView) -> None:
        self._file.begin(trainer, trainer.phase)

    def on_resume(self, trainer: TrainerView, path: Path) -> None:
        self._file.forget()


class MetricsWriter(RunFileWriter):
    """Writes `run_dir/metrics.jsonl`. A trainer with a `run_dir` has one without being asked."""

    def __init__(self, filename: str = 'metrics.jsonl') -> None:
        super().__init__(filename)

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        self._file.write(trainer, step, [metrics])
