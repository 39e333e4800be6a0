"""Metrics and sample texts in Weights & Biases. Needs the optional package `wandb`."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from importlib.util import find_spec
from typing import Any

from chatgpt.trainer.callbacks.base import Callback, TrainerView, check_interval
from chatgpt.trainer.callbacks.samples import rows_of


class WandB(Callback):
    """Logs every metric of every learning phase with the phase as step, and a table of samples.

    A resumed run goes on in its W&B run.

    Args:
        project: the W&B project.
        samples_every: learning phases between tables of samples.
        num_rows: rows of a table; 0 logs none.
        **init: further arguments of `wandb.init`, such as name, entity, mode or tags.

    Raises:
        ImportError: the package is missing; names the command that installs it.
    """

    def __init__(self, project: str = 'chatgpt', *, samples_every: int = 10, num_rows: int = 4, **init: Any) -> None:
        if find_spec('wandb') is None:
            raise ImportError('WandB() needs the package wandb: pip install wandb')
        self.project = project
        self.samples_every = check_interval('samples_every', samples_every)
        self.num_rows = num_rows
        self.init = init
        self._run: Any = None
        self._run_id: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {'run_id': self._run_id} if self._run_id else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run_id = state['run_id']

    def on_fit_start(self, trainer: TrainerView) -> None:
        if not trainer.strategy.is_rank_0:
            return
        import wandb

        again = {'id': self._run_id, 'resume': 'allow'} if self._run_id else {}
        settings = {'project': self.project, 'config': trainer.config.to_dict(), 'dir': _folder(trainer)}
        self._run = wandb.init(**(settings | again | self.init))
        self._run_id = self._run.id

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        if self._run is None:
            return
        logged: dict[str, Any] = dict(metrics)
        if self.num_rows and trainer.last_experiences and (step == 1 or step % self.samples_every == 0):
            import wandb

            rows = rows_of(trainer.last_experiences, self.num_rows, trainer.tokenizer)
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

    def on_fit_end(self, trainer: TrainerView) -> None:
        self._finish(0)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        self._finish(1)

    def _finish(self, exit_code: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
            self._run = None


def _folder(trainer: TrainerView) -> str | None:
    return str(trainer.run_dir) if trainer.run_dir is not None else None
