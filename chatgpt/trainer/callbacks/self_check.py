"""A check that every PPO run makes of itself: right after a rollout, before any step, the policy is the one that
collected.

So on the first train batch of a phase the ratio π/π_old is 1 and the approximate KL is 0, up to rounding. More than
that means that something differs between collecting and learning, and every gradient of the run is computed against the
wrong policy.
"""

from __future__ import annotations

import warnings

import torch

from chatgpt.doctor.checks.ratio import CAUSES
from chatgpt.doctor.limits import limit
from chatgpt.trainer.callbacks.base import Callback, TrainerView

_EXACT = (limit('ratio_error'), limit('ratio_error'))

LIMITS: dict[torch.dtype, tuple[float, float]] = {torch.float32: _EXACT, torch.float64: _EXACT}
"""compute dtype → (limit of |ratio − 1|, limit of |approximate KL|)"""

HALF_LIMITS = (limit('ratio_error_half'), limit('ratio_kl_half'))
"""bf16 and fp16: decode and scoring differ in log-probability by .02 on average, .33 at most (small model); e^.33 − 1 =
.39"""


class RatioWarning(UserWarning):
    """The ratio right after a rollout is not 1."""


class RatioCheck(Callback):
    """Warns when `ppo/first_ratio_error` or `ppo/first_approx_kl` is larger than rounding explains; NaN counts as
    larger.

    The first offence warns with the likely causes, an offence ten times worse than the last warned of warns again, and
    the end of the run says how many phases offended.

    Args:
        max_ratio_error, max_approx_kl: limits; None takes those of the strategy's compute dtype.
    """

    def __init__(self, max_ratio_error: float | None = None, max_approx_kl: float | None = None) -> None:
        for name, value in (('max_ratio_error', max_ratio_error), ('max_approx_kl', max_approx_kl)):
            if value is not None and not value > 0:
                raise ValueError(f'{name}={value!r} must be positive')
        self.max_ratio_error = max_ratio_error
        self.max_approx_kl = max_approx_kl
        self.num_checked = 0
        self.num_offended = 0
        self._warned_at = 0.0

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        error, kl = metrics.get('ppo/first_ratio_error'), metrics.get('ppo/first_approx_kl')
        if error is None or kl is None or not trainer.strategy.is_rank_0:
            return
        default_error, default_kl = LIMITS.get(trainer.strategy.dtype, HALF_LIMITS)
        error_limit = self.max_ratio_error if self.max_ratio_error is not None else default_error
        kl_limit = self.max_approx_kl if self.max_approx_kl is not None else default_kl
        self.num_checked += 1
        if error <= error_limit and abs(kl) <= kl_limit:
            return
        self.num_offended += 1
        excess = max(error / error_limit, abs(kl) / kl_limit)
        if excess != excess:  # NaN
            excess = float('inf')
        if self._warned_at == 0.0 or excess > 10 * self._warned_at:
            self._warned_at = excess
            warnings.warn(
                f'phase {step}: on the first train batch after the rollout |ratio - 1| is {error:.2g} (expected: '
                f'{error_limit:g} at most) and the approximate KL {kl:.2g} (at most {kl_limit:g}). Likely causes: '
                f'{CAUSES}',
                RatioWarning,
                stacklevel=2,
            )

    def on_fit_end(self, trainer: TrainerView) -> None:
        if self.num_offended > 1:
            warnings.warn(
                f'the ratio right after a rollout was not 1 in {self.num_offended} of {self.num_checked} phases',
                RatioWarning,
                stacklevel=2,
            )
