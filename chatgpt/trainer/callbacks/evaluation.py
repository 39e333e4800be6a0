"""Evaluation before, during and after training, with the best value so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from chatgpt.trainer.callbacks.base import Mode, TrainerView, check_interval, check_mode, say
from chatgpt.trainer.callbacks.jsonl import RunFileWriter, read_jsonl


class Evaluator(RunFileWriter):
    """Calls `evaluate(trainer)` on every rank, prints the result and logs it as `eval/<name>`.

    Results of a learning phase are added to its metrics; all results, including that before training (step 0), are
    lines of `run_dir/eval.jsonl`. To keep the best checkpoint, give `SaveCheckpoint` the metric's name and the same
    interval.

    Args:
        evaluate: trainer → {name: number}, the same on every rank.
        interval: learning phases between evaluations.
        before, after: evaluate before the first phase, and after the last unless it was evaluated.
        metric: name, with or without `eval/`; its best value is logged as `<metric>_best`.
        mode: 'max' if larger is better, 'min' if smaller.
    """

    order: ClassVar[int] = -10

    def __init__(
        self,
        evaluate: Callable[[TrainerView], Mapping[str, float]],
        interval: int = 10,
        *,
        before: bool = True,
        after: bool = True,
        metric: str | None = None,
        mode: Mode = 'max',
        filename: str = 'eval.jsonl',
    ) -> None:
        if not callable(evaluate):
            raise ValueError(f'evaluate must be a function of the trainer; got {type(evaluate).__name__}')
        check_mode(mode)
        super().__init__(filename)
        self.evaluate = evaluate
        self.interval = check_interval('interval', interval)
        self.before, self.after, self.mode = before, after, mode
        self.metric = _named(metric) if metric is not None else None
        self.best: float | None = None
        self.best_step: int | None = None
        self.last: dict[str, float] = {}
        self.last_step: int | None = None
        """phase of `last`, the latest results"""
        self._names: list[str] = []
        """names of the results before a resume"""

    def state_dict(self) -> dict[str, Any]:
        state = {'best': self.best, 'best_step': self.best_step, 'last_step': self.last_step}
        return state | {'names': sorted(self.last) or self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.last_step = state['best'], state['best_step'], state['last_step']
        self._names = state.get('names', [])

    def on_fit_start(self, trainer: TrainerView) -> None:
        super().on_fit_start(trainer)
        if self.before and trainer.phase == 0:
            self._report(trainer, 0, self._run(trainer, 0))
        if trainer.phase and self.after and self.last_step != trainer.phase and (row := self._written(trainer)):
            self.last, self.last_step = row, trainer.phase

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        if step % self.interval == 0:
            metrics.update(result := self._run(trainer, step))
            self._report(trainer, step, result)

    def on_fit_end(self, trainer: TrainerView) -> None:
        if self.after and self.last_step != trainer.phase:
            self._report(trainer, trainer.phase, self._run(trainer, trainer.phase))

    def _written(self, trainer: TrainerView) -> dict[str, float]:
        """Returns the results after the present phase that the file has, empty if there are none: those after the end
        of a run, which its last checkpoint may precede."""
        path = trainer.run_dir / self._file.filename if trainer.run_dir is not None else None
        found = dict[str, float]()
        if path is not None and self._names and trainer.strategy.is_rank_0 and path.is_file():
            rows = [row for row in read_jsonl(path) if row['step'] == trainer.phase and row.keys() >= {*self._names}]
            found = {name: rows[-1][name] for name in self._names} if rows else found
        return found if trainer.strategy.processes.world_size == 1 else trainer.strategy.broadcast_object(found)

    def _run(self, trainer: TrainerView, step: int) -> dict[str, float]:
        given = self.evaluate(trainer)
        if not isinstance(given, Mapping):
            raise ValueError(f'evaluate must return a dict of numbers; got {type(given).__name__}')
        result = {_named(name): float(value) for name, value in given.items()}
        if self.metric is not None:
            if self.metric not in result:
                raise ValueError(
                    f'evaluate returned no {self.metric!r}; it returned {", ".join(sorted(result)) or "nothing"}'
                )
            self._note(result[self.metric], step)
            if self.best is not None:
                result[f'{self.metric}_best'] = self.best
        self._file.write(trainer, step, [result])
        self.last, self.last_step = result, step
        return result

    def _note(self, value: float, step: int) -> None:
        if math.isnan(value):
            return
        if self.best is None or (value > self.best if self.mode == 'max' else value < self.best):
            self.best, self.best_step = value, step

    @staticmethod
    def _report(trainer: TrainerView, step: int, result: Mapping[str, float]) -> None:
        """Prints the results at once, since bars and phase lines show other numbers."""
        if trainer.strategy.is_rank_0:
            when = f'after phase {step}' if step else 'before training'
            say(f'evaluation {when}  ' + '  '.join(f'{name} {value:z.4g}' for name, value in result.items()))


def _named(name: str) -> str:
    return name if name.startswith('eval/') else f'eval/{name}'
