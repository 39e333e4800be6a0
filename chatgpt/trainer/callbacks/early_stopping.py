"""Stopping a run whose metric has left its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatgpt.trainer.callbacks.base import Callback, TrainerView, check_interval, metric_value, say


class EarlyStopping(Callback):
    """Asks the run to stop when `metric` is above (or below) a bound in `patience` phases in a row. NaN is out of
    bounds.

    `EarlyStopping('rollout/kl_mean', above=15.0, patience=3)` stops a policy that runs away;
    `EarlyStopping('rollout/score_mean', above=0.9)` one that has arrived. Phases that did not measure an `eval/` metric
    do not count.

    Args:
        above, below: the bounds, at least one of them.
        patience: phases in a row.
    """

    def __init__(
        self, metric: str, *, above: float | None = None, below: float | None = None, patience: int = 1
    ) -> None:
        if above is None and below is None:
            raise ValueError(f'EarlyStopping({metric!r}) has no bound: give above= or below=')
        if above is not None and below is not None and not below < above:
            raise ValueError(f'EarlyStopping({metric!r}): below={below} must be smaller than above={above}')
        self.metric, self.above, self.below = metric, above, below
        self.patience = check_interval('patience', patience)
        self.num_crossed = 0

    def state_dict(self) -> dict[str, Any]:
        return {'num_crossed': self.num_crossed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_crossed = int(state['num_crossed'])

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        value = metric_value(metrics, self.metric)
        if value is None:
            return
        within = (self.above is None or value <= self.above) and (self.below is None or value >= self.below)
        self.num_crossed = 0 if within else self.num_crossed + 1  # NaN is never within
        if self.num_crossed >= self.patience:
            bounds = [f'{word} {b:g}' for word, b in (('above', self.above), ('below', self.below)) if b is not None]
            why = f'{self.metric} is {value:.4g}, {" or ".join(bounds)} in {self.num_crossed} phases in a row'
            _stop(trainer, step, why)


class StopOnPlateau(Callback):
    """Asks the run to stop when `metric` has not become better in `patience` measurements in a row. NaN is not better.

    `StopOnPlateau('sft/val_loss', mode='min', patience=3)`. Phases that did not measure it do not count.

    Args:
        mode: 'min' or 'max', what is better.
        patience: measurements in a row.
        min_delta: a change smaller than this is none.
    """

    def __init__(self, metric: str, *, mode: str = 'max', patience: int = 3, min_delta: float = 0.0) -> None:
        if mode not in ('min', 'max'):
            raise ValueError(f"StopOnPlateau({metric!r}): mode={mode!r} must be 'min' or 'max'")
        if min_delta < 0:
            raise ValueError(f'StopOnPlateau({metric!r}): min_delta={min_delta} must not be negative')
        self.metric, self.sign, self.min_delta = metric, 1.0 if mode == 'max' else -1.0, min_delta
        self.patience = check_interval('patience', patience)
        self.best: float | None = None
        self.num_without = 0

    def state_dict(self) -> dict[str, Any]:
        return {'best': self.best, 'num_without': self.num_without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state['best']
        self.num_without = int(state['num_without'])

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        value = metric_value(metrics, self.metric)
        if value is None:
            return
        if value == value and (self.best is None or self.sign * (value - self.best) > self.min_delta):
            self.best, self.num_without = value, 0
            return
        self.num_without += 1
        if self.num_without >= self.patience:
            best = 'never a number' if self.best is None else f'best {self.best:.4g}'
            _stop(trainer, step, f'{self.metric} has not become better for {self.num_without} times ({best})')


def _stop(trainer: TrainerView, step: int, why: str) -> None:
    trainer.request_stop()
    if trainer.strategy.is_rank_0:
        say(f'stopping after phase {step}: {why}')
