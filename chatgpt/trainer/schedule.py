"""Functions of counters: seeds, orders, train batches, the plan of a `fit`, learning rates. A resume needs the counters
and no generator state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from chatgpt.strategies.states import MACHINERY, plain

if TYPE_CHECKING:
    from chatgpt.trainer.config import PPOConfig


def seed_for(*key: int) -> int:
    """Returns a 63-bit seed for a tuple of integers, such as (seed, phase, epoch); near keys give unrelated seeds
    (splitmix64)."""
    word = 0xFFFFFFFFFFFFFFFF
    state = 0x9E3779B97F4A7C15
    for part in key:
        state = ((state ^ (part & word)) + 0x9E3779B97F4A7C15) & word
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & word
        state ^= state >> 31
    return state >> 1


def generator_for(*key: int) -> torch.Generator:
    """Returns a CPU generator seeded with `seed_for(*key)`."""
    return torch.Generator().manual_seed(seed_for(*key))


def permutation(num_items: int, *key: int) -> list[int]:
    """Returns a permutation that is a function of `key`, the same on every rank and device."""
    return torch.randperm(num_items, generator=generator_for(*key)).tolist()


def train_batches(num_items: int, batch_size: int, *, key: tuple[int, ...]) -> Iterator[list[int]]:
    """Yields the positions of each global train batch of an epoch; the last may be short. The order is a function of
    `key`."""
    order = permutation(num_items, *key)
    for start in range(0, num_items, batch_size):
        yield order[start : start + batch_size]


MANY_STEPS = 50
"""steps of a pass beyond which a short last one matters little"""


def uneven_steps(count: int, what: str, batch_size: int) -> str | None:
    """Returns a warning if no batch is ever full, or if the last step of a pass learns from a quarter of a batch or
    less: it has the weight of a whole one."""
    rest = count % batch_size
    if count < batch_size:
        return (
            f'train_batch_size={batch_size} is more than the {count} {what}: no batch is ever full, and each pass is '
            f'one step on all {count}'
        )
    if count > MANY_STEPS * batch_size or not 0 < rest <= batch_size / 4:
        return None
    return (
        f'{count} {what} in batches of train_batch_size={batch_size}: the last step of each pass learns from {rest} '
        f'alone, and counts as much as one of {batch_size}'
    )


@dataclass
class FitPlan:
    """The timesteps of a `fit`, divided into learning phases and into episodes."""

    total: int = 0
    per_phase: int = 1
    per_episode: int | None = None
    """None if the caller collects, without episodes"""
    start: int = 0
    """timesteps collected before it"""

    @classmethod
    def of(cls, **sizes: int) -> FitPlan:
        """Makes a plan from the arguments of `PPOTrainer.fit`. Raises ValueError for a size below 1."""
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f'{name}={value} must be at least 1')
        length = sizes['max_timesteps']
        return cls(sizes['num_episodes'] * length, sizes['update_timesteps'], length)

    def __post_init__(self) -> None:
        ends = [*range(0, self.total, self.per_phase), self.total]
        self.ends = ends[1:] if self.total else []

    def phases(self, timestep: int) -> list[int]:
        """Returns the timesteps of each remaining learning phase; the last may be short."""
        done = timestep - self.start
        ends = [done, *(end for end in self.ends if end > done)]
        return [end - start for start, end in zip(ends, ends[1:], strict=False)]

    def episode(self, timestep: int) -> tuple[int, bool, bool]:
        """Returns the episode of a timestep, and whether the timestep is its first and its last."""
        if self.per_episode is None:
            return 0, False, False
        number, at = divmod(timestep - self.start, self.per_episode)
        return number, at == 0, at == self.per_episode - 1

    def num_updates(self, c: PPOConfig, first_phase: int = 0) -> int:
        """Returns the actor's optimizer steps of all phases. first_phase: number of learning phases before them."""
        return c.max_epochs * _num_batches(c, self._held(c)[_waiting(c, first_phase) :], c.train_batch_size)

    def num_critic_updates(self, c: PPOConfig, first_phase: int = 0) -> int:
        """Returns the optimizer steps of a critic with passes of its own, which in the warm-up are over all rollouts so
        far."""
        held, waiting = self._held(c), _waiting(c, first_phase)
        counts = [*accumulate(held[:waiting]), *held[waiting:]]
        return (c.critic_epochs or c.max_epochs) * _num_batches(
            c, counts, c.critic_train_batch_size or c.train_batch_size
        )

    def warnings(self, c: PPOConfig, first_phase: int = 0) -> Iterator[str | None]:
        if self.per_phase > self.total:
            yield (
                f'update_timesteps={self.per_phase} is more than the {self.total} timesteps of this run '
                '(num_episodes x max_timesteps): there is one learning phase, at the end'
            )
        if self.ends and _waiting(c, first_phase) >= len(self.ends):
            yield (
                f'critic_warmup_phases={c.critic_warmup_phases} takes all {len(self.ends)} learning phases of this '
                'run: the actor does not learn'
            )
        if not c.sample_replay_buffer:
            yield uneven_steps(self._held(c)[0], 'samples of a learning phase', c.train_batch_size)

    def _held(self, c: PPOConfig) -> list[int]:
        """Returns the number of sequences of each phase."""
        counts = [n * c.experience_batch_size * c.num_samples_per_prompt for n in self.phases(self.start)]
        return [min(count, c.buffer_limit or count) for count in counts]


def _waiting(c: PPOConfig, first_phase: int) -> int:
    """Returns the number of phases from `first_phase` on in which the actor waits."""
    return max(c.critic_warmup_phases - first_phase, 0)


def _num_batches(c: PPOConfig, counts: SequenceOf[int], batch_size: int) -> int:
    """Returns the train batches of one pass of each phase, with these numbers of sequences."""
    return len(counts) if c.sample_replay_buffer else sum(-(-count // batch_size) for count in counts)


def lr_factor(
    schedule: str, step: int, *, total_steps: int | None, warmup_steps: int = 0, end_factor: float = 0.0
) -> float:
    """Returns the factor on the base learning rate for optimizer step number `step` (0 for the first).

    Warm-up: (step + 1) / warmup_steps. Then with progress p = (step − warmup) / (total − warmup): constant 1; linear 1
    − p (decay to 0, arXiv 2403.17031); cosine ½(1 + cos πp) (Loshchilov & Hutter 2017). With an end factor e a decay d
    becomes e + (1 − e) d. After `total_steps` the last value holds.

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
"""of Adam and related optimizers, which divide a gradient by its size. Most weights of a language model are within 0.1
of 0, and neighbouring fp32 numbers of that size are 1e-9 apart"""


class LearningRate:
    """Sets the learning rate of an optimizer's groups to base x factor, with the base of each group.

    Args:
        decay_steps: end of the decay, in place of the end of the run.
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
        """Returns a warning if the named model would learn nothing at this rate, or diverge in its first steps."""
        if max(self.base) == 0.0:
            return f'the learning rate of the {name} is 0, so it learns nothing'
        rate = next((rate for rate in self.base if rate and not LOWEST_RATE <= rate <= HIGHEST_RATE), None)
        if rate is None or 'betas' not in self.optimizer.param_groups[0]:
            return None
        what = 'is lost in rounding' if rate < LOWEST_RATE else 'replaces the weights'
        return (
            f'the learning rate of the {name} is {rate:g}, far from any in use: a step of '
            f'{type(self.optimizer).__name__} moves a weight by about that much, which {what}; language models take '
            '1e-6 to 1e-3'
        )

    def take_base(self) -> None:
        """Makes the current rates of the groups their base."""
        self.base = [group['lr'] for group in self.optimizer.param_groups]

    def set_base(self) -> float:
        """Applies the base rates, without the schedule; returns that of the last group, of a value head."""
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group['lr'] = base
        return float(self.base[-1])

    def set(self, step: int, total_steps: int | None) -> float:
        """Applies the schedule to this step; returns the first group's learning rate."""
        end = total_steps if self.decay_steps is None else self.decay_steps
        factor = lr_factor(
            self.schedule, step, total_steps=end, warmup_steps=self.warmup_steps, end_factor=self.end_factor
        )
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group['lr'] = base * factor
        return float(self.optimizer.param_groups[0]['lr'])


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's settings of a parameter group, without the learning rate, which the schedule changes."""
    values = {
        name: plain(value) for name, value in group.items() if name not in {*MACHINERY, 'lr', 'initial_lr', 'step'}
    }
    return {name: value for name, value in values.items() if value is not NotImplemented}


def describe_groups(optimizer: Optimizer, rates: SequenceOf[float]) -> dict[str, Any]:
    """Returns the optimizer's hyperparameters; one in which its groups differ is a list of the groups' values. `rates`
    are the base learning rates."""
    groups = [{'lr': lr} | hyperparameters(group) for group, lr in zip(optimizer.param_groups, rates, strict=True)]
    values = {name: [group.get(name) for group in groups] for name in dict.fromkeys(chain.from_iterable(groups))}
    return {name: own if any(value != own[0] for value in own) else own[0] for name, own in values.items()}
