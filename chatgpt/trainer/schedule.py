"""Learning-rate schedules as pure functions of the number of optimizer steps taken.

State is a counter, which the trainer owns, so nothing here needs to be checkpointed and any optimizer with param groups
works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from torch.optim import Optimizer

from chatgpt.strategies.states import MACHINERY, plain


def lr_factor(
    schedule: str, step: int, *, total_steps: int | None, warmup_steps: int = 0, end_factor: float = 0.0
) -> float:
    """Factor on the base learning rate for the optimizer step number `step` (0 for the first).

    Warm-up: (step + 1) / warmup_steps. Then with progress p = (step − warmup) / (total − warmup): constant 1; linear 1
    − p (decay to 0, arXiv 2403.17031); cosine ½(1 + cos πp) (Loshchilov & Hutter 2017). With an end factor e a decay d
    becomes e + (1 − e) d. Past `total_steps` the last value holds.

    Raises:
        ValueError: a decaying schedule without `total_steps`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == 'constant':
        return 1.0
    if not total_steps:
        raise ValueError(
            f'lr_schedule={schedule!r} needs the total number of steps; use fit(), or lr_schedule="constant"'
        )
    progress = min(max((step - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0), 1.0)
    if schedule == 'linear':
        return end_factor + (1.0 - end_factor) * (1.0 - progress)
    if schedule == 'cosine':
        return end_factor + (1.0 - end_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f'lr_schedule={schedule!r} is not known; choose constant, linear or cosine')


LOWEST_RATE, HIGHEST_RATE = 1e-9, 0.1
"""of Adam and its relatives, which divide a gradient by its size. Most weights of a language model lie within 0.1 of 0,
and neighbours of such numbers in fp32 are 1e-9 apart"""


class LearningRate:
    """Sets the learning rate of an optimizer's groups to base x factor; remembers each group's base.

    Args:
        decay_steps: where the decay ends, in place of the end of the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: str,
        warmup_steps: int,
        *,
        end_factor: float = 0.0,
        decay_steps: int | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.warmup_steps = warmup_steps
        self.end_factor, self.decay_steps = end_factor, decay_steps
        self.base = [group.get('initial_lr', group['lr']) for group in optimizer.param_groups]

    def out_of_range(self, name: str) -> str | None:
        """The warning about a rate at which the model of that name does not learn, or diverges in its first steps."""
        rate, adaptive = max(self.base), 'betas' in self.optimizer.param_groups[0]
        if rate == 0.0:
            return f'the learning rate of the {name} is 0, so it learns nothing'
        if not adaptive or LOWEST_RATE <= rate <= HIGHEST_RATE:
            return None
        what = 'is lost in rounding' if rate < LOWEST_RATE else 'replaces the weights'
        return (
            f'the learning rate of the {name} is {rate:g}, far from any in use: a step of '
            f'{type(self.optimizer).__name__} moves a weight by about that much, which {what}; language models take '
            '1e-6 to 1e-3'
        )

    def take_base(self) -> None:
        """What the groups have now is their base from here on."""
        self.base = [group['lr'] for group in self.optimizer.param_groups]

    def set(self, step: int, total_steps: int | None) -> float:
        """Apply the schedule for this step; returns the first group's learning rate."""
        end = total_steps if self.decay_steps is None else self.decay_steps
        factor = lr_factor(
            self.schedule, step, total_steps=end, warmup_steps=self.warmup_steps, end_factor=self.end_factor
        )
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group['lr'] = base * factor
        return float(self.optimizer.param_groups[0]['lr'])


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What the user chose for a parameter group, but for the learning rate, which the schedule moves."""
    values = {
        name: plain(value) for name, value in group.items() if name not in {*MACHINERY, 'lr', 'initial_lr', 'step'}
    }
    return {name: value for name, value in values.items() if value is not NotImplemented}


def describe_groups(optimizer: Optimizer, rates: SequenceOf[float]) -> dict[str, Any]:
    """Hyperparameters of an optimizer with one group, or of each by number; `rates` are the base learning rates."""
    groups = [{'lr': lr} | hyperparameters(group) for group, lr in zip(optimizer.param_groups, rates, strict=True)]
    return groups[0] if len(groups) == 1 else {str(number): group for number, group in enumerate(groups)}
