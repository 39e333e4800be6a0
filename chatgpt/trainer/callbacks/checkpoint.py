"""Training checkpoints at intervals, and their removal."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import ClassVar

from chatgpt.strategies.checkpoint import CUT_SHORT, CheckpointError, prune, step_folder, step_of
from chatgpt.trainer.callbacks.base import Callback, Mode, TrainerView, check_interval, check_mode, metric_value
from chatgpt.trainer.callbacks.evaluation import Evaluator


class SaveCheckpoint(Callback):
    """Saves a checkpoint every `interval` learning phases or `minutes`, and at the end of the run.

    A failed save (a full disk) is a warning: the run continues, and earlier checkpoints stay. It runs after all other
    callbacks, so a checkpoint holds their states after the phase.

    Args:
        path: folder of the checkpoints, `path/step-00000012`; None means the trainer's `run_dir/checkpoints`. A
            path makes it the trainer's `checkpoint_dir`.
        interval: learning phases between checkpoints; None uses `minutes` alone.
        minutes: save after the phase in which the last checkpoint reaches this age, by the clock of rank 0; None uses
            `interval` alone. With neither, none is saved, and only those of an interrupted run are counted and removed.
        keep_last: number of newest checkpoints to keep, including those saved after a signal or an exception; None
            keeps all.
        keep_best: number to keep in addition, by the value of `metric` in their phase.
        background: write while the run goes on, from a copy in host memory. The checkpoint is complete at the end of a
            later phase, at the latest before the next one is written or the run ends, and the last one is not written
            in the background.
        metric, mode: the metric and its better direction; an `eval/` metric counts in phases that measured it, and at
            the end of the run.
    """

    order: ClassVar[int] = 100

    def __init__(
        self,
        path: str | Path | None = None,
        interval: int | None = 1,
        *,
        minutes: float | None = None,
        keep_last: int | None = None,
        keep_best: int = 0,
        background: bool = False,
        metric: str = 'rollout/score_mean',
        mode: Mode = 'max',
    ) -> None:
        self.path = Path(path).absolute() if path is not None else None
        self.interval = None if interval is None else check_interval('interval', interval)
        if minutes is not None and not minutes > 0:
            raise ValueError(f'minutes={minutes} must be positive, or None')
        if keep_last is not None:
            check_interval('keep_last', keep_last)
        if keep_best < 0:
            raise ValueError(f'keep_best={keep_best} must not be negative')
        if keep_best and keep_last is None:
            raise ValueError(
                f'keep_best={keep_best} means nothing while keep_last=None keeps all; give keep_last as well'
            )
        check_mode(mode)
        self.keep_last, self.keep_best, self.metric, self.mode = keep_last, keep_best, metric, mode
        self.minutes, self.background = minutes, background
        self._saved_at = time.monotonic()
        self._saved_phase: int | None = None
        self._score: float | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        self._root(trainer)
        self._saved_at = time.monotonic()
        self._saved_phase = trainer.phase  # phase 0 has nothing to save, and a resumed phase is saved already

    def on_checkpoint(self, trainer: TrainerView, path: Path) -> None:
        if path.parent != (self.path or trainer.checkpoint_dir) or (step_of(path) is None and path.name != CUT_SHORT):
            return  # another's
        if step_of(path) in (None, trainer.phase):
            self._saved_phase, self._saved_at = trainer.phase, time.monotonic()
        else:  # written in the background
            self._prune(trainer)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        self._prune(trainer)

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        if self.keep_best:
            self._score = trainer.phase_score = self._signed(metric_value(metrics, self.metric))
        due = (self.interval is not None and step % self.interval == 0) or self._is_due(trainer)
        self._finish(trainer, wait=due)
        if due:
            self._save(trainer, background=self.background and step != trainer.num_phases)

    def _is_due(self, trainer: TrainerView) -> bool:
        """Returns True if the minutes have passed. Clocks differ, so rank 0 decides: a save is a collective."""
        if self.minutes is None:
            return False
        late = trainer.strategy.is_rank_0 and time.monotonic() - self._saved_at >= 60 * self.minutes
        return late if trainer.strategy.processes.world_size == 1 else trainer.strategy.broadcast_object(late)

    def _finish(self, trainer: TrainerView, wait: bool) -> None:
        try:
            trainer.finish_saving(wait=wait)
        except CheckpointError as error:
            self._saved_phase = None
            if trainer.strategy.is_rank_0:
                warnings.warn(f'an earlier checkpoint was not written, the run goes on: {error}', stacklevel=2)

    def on_fit_end(self, trainer: TrainerView) -> None:
        self._finish(trainer, wait=True)
        late = self._scored_after(trainer) if self.keep_best and self._score is None else None
        if late is not None:
            self._score = late
        if self.interval is None and self.minutes is None:
            return self._prune(trainer)
        # after a signal the trainer has saved, and the state may be that of an interrupted phase
        again = late is not None and trainer.phase == trainer.num_phases
        if self._saved_phase != trainer.phase or again:
            self._save(trainer)
        else:
            self._prune(trainer)

    def _scored_after(self, trainer: TrainerView) -> float | None:
        """Returns the metric from an evaluation after the last phase, which no phase's metrics hold."""
        for callback in trainer.callbacks:
            if isinstance(callback, Evaluator) and callback.last_step == trainer.phase and self.metric in callback.last:
                return self._signed(callback.last[self.metric])
        return None

    def _signed(self, value: float | None) -> float | None:
        """Returns the metric such that higher is better; None for NaN, which has no place in an order."""
        return None if value is None or math.isnan(value) else -value if self.mode == 'min' else value

    def _root(self, trainer: TrainerView) -> Path:
        root = self.path if self.path is not None else trainer.checkpoint_dir
        if root is None:
            raise ValueError('SaveCheckpoint() has nowhere to write: give it a path, or the trainer a run_dir')
        return root

    def _save(self, trainer: TrainerView, background: bool = False) -> None:
        path = step_folder(self._root(trainer), trainer.phase)
        try:
            trainer.save_checkpoint(path, score=self._score, background=background)
        except CheckpointError as error:
            self._saved_at = time.monotonic()  # no attempt in every phase while the disk is full
            if trainer.strategy.is_rank_0:
                warnings.warn(f'phase {trainer.phase} was not saved, the run goes on: {error}', stacklevel=2)
            return
        self._saved_phase, self._saved_at = trainer.phase, time.monotonic()
        self._prune(trainer)

    def _prune(self, trainer: TrainerView) -> None:
        root = self._root(trainer)
        if trainer.strategy.is_rank_0:
            try:
                prune(root, keep_last=self.keep_last, keep_best=self.keep_best, up_to=trainer.phase)
            except OSError as error:
                warnings.warn(f'{root}: old checkpoints could not be removed ({error})', stacklevel=2)
