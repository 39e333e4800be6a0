"""Metrics and sample texts in Weights & Biases. Needs the optional package `wandb`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from chatgpt.trainer.callbacks.base import TrainerView, need_package
from chatgpt.trainer.callbacks.tracked_run import TrackedRun


class WandB(TrackedRun):
    """Logs every metric of every learning phase with the phase as step, and a table of samples.

    A resumed run goes on in its W&B run.

    Args:
        project: the W&B project; None: WANDB_PROJECT, or chatgpt.
        samples_every: learning phases between tables of samples.
        num_rows: rows of a table; 0 logs none.
        **init: further arguments of `wandb.init`, such as name, entity, mode or tags.

    Raises:
        ImportError: the package is missing; names the command that installs it.
    """

    def __init__(self, project: str | None = None, *, samples_every: int = 10, num_rows: int = 4, **init: Any) -> None:
        need_package('wandb', 'WandB()')
        super().__init__(samples_every=samples_every, num_rows=num_rows)
        self.project = project or os.environ.get('WANDB_PROJECT') or 'chatgpt'
        self.init = init
        self._run: Any = None

    def start(self, trainer: TrainerView, run_id: str | None) -> str:
        import wandb

        again = {'id': run_id, 'resume': 'allow'} if run_id else {}
        folder = str(trainer.run_dir) if trainer.run_dir is not None else None
        settings = {'project': self.project, 'config': trainer.config.to_dict(), 'dir': folder}
        self._run = wandb.init(**(settings | again | self.init))
        return self._run.id

    def log(self, metrics: Mapping[str, float], rows: SequenceOf[Mapping[str, Any]], step: int) -> None:
        logged: dict[str, Any] = dict(metrics)
        if rows:
            import wandb

            logged['samples'] = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log(logged, step=step)

    def on_log(
        self,
        trainer: TrainerView,
        stats: dict[str, float],
        batch: Mapping[str, SequenceOf[Any]],
        rewards: list[float],
        columns_to_log: list[str],
    ) -> None:
        """A table `game_log`, as TRL calls it, of every row and its reward."""
        columns = [c for c in columns_to_log if c in batch]
        if self._run is None or not columns:
            return
        import wandb

        rows = [list(row) for row in zip(*(batch[c] for c in columns), rewards, strict=True)]
        self._run.log({'game_log': wandb.Table(columns=[*columns, 'reward'], data=rows)}, step=trainer.phase)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._run = None
