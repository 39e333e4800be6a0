"""Callbacks that stop a run if a metric leaves its bounds or no longer improves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from chatgpt.trainer.callbacks.base import Callback, TrainerView, check_interval, check_mode, metric_value, say


class _Patience(Callback):
    """Requests a stop after `patience` consecutive measurements of `metric` that are not good. Phases without a
    measurement do not count."""

    def __init__(self, metric: str, patience: int) -> None:
        self.metric = metric
        self.patience = check_interval('patience', patience)
        self.num_bad = 0

    @abstractmethod
    def is_good(self, value: float) -> bool:
        """Returns True if `value` is good; NaN is not."""

    @abstractmethod
    def why(self, value: float) -> str: ...

    def state_dict(self) -> dict[str, Any]:
        return {'num_bad': self.num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_bad = int(state['num_bad'])

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        value = metric_value(metrics, self.metric)
        if value is None and self.metric in ('rollout/kl_mean', 'rollout/kl_k3_mean'):  # of every phase, or of none
            raise ValueError(f'{self.metric} needs a reference, and this run measures no KL to one')
        if value is None:
            return
        self.num_bad = 0 if self.is_good(value) else self.num_bad + 1
        if self.num_bad >= self.patience:
            trainer.request_stop()
            if trainer.strategy.is_rank_0:
                say(f'stopping after phase {step}: {self.metric} {self.why(value)}')


class EarlyStopping(_Patience):
    """Requests a stop when `metric` is above (or below) a bound in `patience` consecutive phases.

    `EarlyStopping('rollout/kl_mean', above=15.0, patience=3)` stops a policy that diverges from the initial model;
    `EarlyStopping('rollout/score_mean', above=0.9)` one with a good score.

    Args:
        above, below: the bounds, at least one of them.
        patience: number of phases.
    """

    def __init__(
        self, metric: str, *, above: float | None = None, below: float | None = None, patience: int = 1
    ) -> None:
        if above is None and below is None:
            raise ValueError(f'EarlyStopping({metric!r}) has no bound: give above= or below=')
        if above is not None and below is not None and not below < above:
            raise ValueError(f'EarlyStopping({metric!r}): below={below} must be smaller than above={above}')
        super().__init__(metric, patience)
        self.above, self.below = above, below

    def is_good(self, value: float) -> bool:
        return (self.above is None or value <= self.above) and (self.below is None or value >= self.below)

    def why(self, value: float) -> str:
        bounds = [f'{word} {b:g}' for word, b in (('above', self.above), ('below', self.below)) if b is not None]
        return f'is {value:.4g}, {" or ".join(bounds)} in {self.num_bad} phases in a row'


class StopOnPlateau(_Patience):
    """Requests a stop when `metric` has not improved in `patience` consecutive measurements.

    `StopOnPlateau('sft/val_loss', mode='min', patience=3)`.

    Args:
        mode: 'min' or 'max', the better direction.
        patience: number of measurements.
        min_delta: smaller changes do not count as improvement.
    """

    def __init__(self, metric: str, *, mode: str = 'max', patience: int = 3, min_delta: float = 0.0) -> None:
        check_mode(mode)
        if min_delta < 0:
            raise ValueError(f'StopOnPlateau({metric!r}): min_delta={min_delta} must not be negative')
        super().__init__(metric, patience)
        self.sign, self.min_delta = 1.0 if mode == 'max' else -1.0, min_delta
        self.best: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {'best': self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.best = state['best']

    def is_good(self, value: float) -> bool:
        better = value == value and (self.best is None or self.sign * (value - self.best) > self.min_delta)
        self.best = value if better else self.best
        return better

    def why(self, value: float) -> str:
        best = 'never a number' if self.best is None else f'best {self.best:.4g}'
        return f'has not become better for {self.num_bad} times ({best})'
