"""Evaluations and checkpoints by optimizer steps, the best model, rollout files and statistics of trlX. trlX acts
between optimizer steps, these callbacks after the learning phase in which a step is reached."""

from __future__ import annotations

import json
import shutil
import time
import uuid
import warnings
from pathlib import Path
from typing import Any, ClassVar

from chatgpt.nn.records import fetched
from chatgpt.strategies.checkpoint import CheckpointError
from chatgpt.trainer import SaveError
from chatgpt.trainer.callbacks import Callback, Evaluator, SaveCheckpoint
from chatgpt_compat.statistics import TRLX, evaluated, named


class Statistics(Callback):
    """Adds metrics under trlX's names to those of a phase before they are logged."""

    order: ClassVar[int] = -5

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        metrics.update(evaluated(metrics) | named(TRLX, metrics, trainer.config))


class Steps:
    """A counter that finds the phases in which a multiple of `interval` optimizer steps is reached."""

    def __init__(self, interval: int) -> None:
        self.interval, self.seen = interval, 0

    def reached(self, num_updates: int) -> bool:
        before, self.seen = self.seen, num_updates
        return num_updates // self.interval > before // self.interval


class StepEvaluator(Evaluator):
    """Evaluates every `eval_interval` optimizer steps, and before the first and after the last."""

    def __init__(self, evaluate: Any, eval_interval: int, metric: str | None) -> None:
        super().__init__(evaluate, 1, metric=metric)
        self.steps = Steps(eval_interval)

    def on_resume(self, trainer: Any, path: Path) -> None:
        super().on_resume(trainer, path)
        self.steps.seen = trainer.num_updates

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if self.steps.reached(trainer.num_updates):
            super().on_phase_end(trainer, step, metrics)


class StopAtSteps(Callback):
    """Ends the run with the phase in which `total_steps` optimizer steps are reached."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if trainer.num_updates >= self.total_steps:
            trainer.request_stop()


class Checkpoints(SaveCheckpoint):
    """Writes trlX's folders: `checkpoint_<step>` every `checkpoint_interval` optimizer steps and at the end,
    `best_checkpoint` by the mean reward; each has `hf_model`, and with `save_optimizer` all that a resume needs."""

    order: ClassVar[int] = 100

    def __init__(self, train: Any, total_steps: int) -> None:
        super().__init__(train.checkpoint_dir, None)
        self.save_optimizer, self.save_best = train.save_optimizer, train.save_best
        self.steps, self.total_steps = Steps(train.checkpoint_interval), total_steps
        self.best = float('-inf')
        self.saved_at: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {'best': self.best if self.best > float('-inf') else None}

    def load_state_dict(self, state: Any) -> None:
        self.best = float('-inf') if state['best'] is None else state['best']

    def on_resume(self, trainer: Any, path: Path) -> None:
        self.steps.seen = trainer.num_updates

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if self.steps.reached(trainer.num_updates):
            self._write_step(trainer)
        self._note(trainer, metrics)

    def on_fit_end(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, Evaluator) and callback.last_step == trainer.phase:
                self._note(trainer, evaluated(callback.last))
        if self.saved_at != trainer.num_updates:
            self._write_step(trainer)

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        """Does nothing: the trainer has saved the last complete phase, and nothing is pruned."""

    def _note(self, trainer: Any, metrics: dict[str, float]) -> None:
        value = metrics.get('reward/mean', metrics.get('metrics/reward'))
        if self.save_best and value is not None and value > self.best:
            self.best = value
            self._write(trainer, self._root(trainer) / 'best_checkpoint')

    def _write_step(self, trainer: Any) -> None:
        digits = len(str(self.total_steps))
        self._write(trainer, self._root(trainer) / f'checkpoint_{trainer.num_updates:0{digits}d}')
        self.saved_at = trainer.num_updates

    def _write(self, trainer: Any, folder: Path) -> None:
        trainer.strategy.run_on_rank0(lambda: shutil.rmtree(folder, ignore_errors=True))
        try:
            if self.save_optimizer:
                trainer.save_checkpoint(folder)
            trainer.save_pretrained(folder / 'hf_model')
        except (CheckpointError, SaveError) as error:
            if trainer.strategy.is_rank_0:
                warnings.warn(f'{folder} was not written, the run goes on: {error}', stacklevel=2)


class RolloutFiles(Callback):
    """Writes every phase's rollouts as JSON under trlX's names into a new folder of the run in `folder`. Raises
    ValueError if `folder` does not exist."""

    def __init__(self, folder: str, config: dict[str, Any]) -> None:
        if not Path(folder).is_dir():
            raise ValueError(f'trlx: rollout_logging_dir={folder!r}: there is no such folder; make it first')
        self.folder, self.config = Path(folder, f'run-{uuid.uuid4()}'), config

    def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
        experiences = fetched(trainer.strategy, experiences)
        if not trainer.strategy.is_rank_0:
            return
        if not self.folder.is_dir():
            self.folder.mkdir()
            (self.folder / 'config.json').write_text(json.dumps(self.config, indent=2, default=str))
        ours = {'query_tensor': 'prompt_ids', 'response_tensor': 'response_ids', 'logprobs': 'old_logprobs'}
        ours |= {'values': 'values', 'rewards': 'rewards'}
        rows = [{theirs: getattr(e, name).tolist() for theirs, name in ours.items()} for e in experiences]
        (self.folder / f'epoch-{time.time()}.json').write_text(json.dumps(rows, indent=2))
