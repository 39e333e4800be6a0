"""The default callbacks of a run."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from chatgpt.strategies.checkpoint import CHECKPOINT_MINUTES
from chatgpt.trainer.callbacks.base import Callback
from chatgpt.trainer.callbacks.checkpoint import SaveCheckpoint
from chatgpt.trainer.callbacks.doctor import Doctor
from chatgpt.trainer.callbacks.jsonl import MetricsWriter
from chatgpt.trainer.callbacks.progress import ProgressBar
from chatgpt.trainer.callbacks.report import WriteReport
from chatgpt.trainer.callbacks.run_record import RunEnd, RunRecorder


def with_defaults(given: SequenceOf[Callback], run_dir: Path | None) -> list[Callback]:
    """Returns the given callbacks and the defaults of other kinds: progress and `Doctor`; with a `run_dir` also
    metrics.jsonl, run.json, report.html, and a checkpoint every `CHECKPOINT_MINUTES` and at the end, the last two
    kept."""
    wanted: list[type[Callback]] = [ProgressBar, Doctor]
    if run_dir is not None:
        wanted += [MetricsWriter, RunRecorder, RunEnd, WriteReport, SaveCheckpoint]
    special: dict[type[Callback], Callable[[], Callback]] = {
        SaveCheckpoint: lambda: SaveCheckpoint(interval=None, minutes=CHECKPOINT_MINUTES, keep_last=2)
    }
    added = [special.get(kind, kind)() for kind in wanted if not any(isinstance(c, kind) for c in given)]
    first = [c for c in added if isinstance(c, MetricsWriter)]  # others log a phase after its metrics
    return [*first, *given, *(c for c in added if c not in first)]
