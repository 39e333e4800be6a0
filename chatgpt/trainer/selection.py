"""Which experience of a phase is learned from: episodes whose environment failed, groups that teach nothing (dynamic
sampling), responses that ran out of room.

A failed episode with environment_failures='mask' has no token that counts, and its rewards enter no baseline of its
group and no statistics of scores. An overlong response is the policy's own doing, so its score stays in its group's
baseline; what an environment gave before it broke says nothing of the policy, and would push the advantages of its
siblings (github.com/NVIDIA-NeMo/RL/pull/4029). With 'penalise' the last token of the policy is paid `failure_reward`
on top of what the environment gave before, for policies that can break an environment themselves. An episode that
failed in `reset` has no token to pay: it is left out either way.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from chatgpt.strategies.base import Strategy
from chatgpt.trainer.config import PPOConfig
from chatgpt.types import Experience, Sample, tensors_to

More = Callable[[int], list[Experience] | None]
"""collects and scores so many further timesteps; None when a stop was asked for on the way"""


class EpisodesFailed(RuntimeError):
    """Not one episode of a phase was played as the environment's contract says."""


class NothingToLearn(RuntimeError):
    """Dynamic sampling found no group whose scores differ."""


def mask_failed(samples: SequenceOf[Sample]) -> None:
    """From now on no token of an episode that failed counts."""
    for sample in samples:
        if sample.failed:
            sample.response_mask = torch.zeros_like(sample.response_mask)


def compared(experiences: SequenceOf[Experience]) -> list[Experience]:
    """Without failed episodes none of whose tokens counts: what advantages are estimated from."""
    return [e for e in experiences if not e.left_out]


class Selection:
    """Chooses among the experience of a phase, all ranks together, before it is learned from."""

    def __init__(self, config: PPOConfig, strategy: Strategy) -> None:
        self.config, self.tells = config, strategy.is_rank_0
        self.metrics: dict[str, float] = {}
        """`rollout/...`: what was chosen in the latest phase"""
        self._has_told_of_failures = False

    def __call__(self, experiences: list[Experience], phase: int, more: More) -> list[Experience] | None:
        """What is learned from in the phase after `phase` others; None where `more` gave none.

        Raises:
            EpisodesFailed: all episodes failed.
            NothingToLearn: with dynamic sampling, not one group has different scores after the last round.
        """
        c = self.config
        self.metrics = {}
        self._check_failed(experiences, phase + 1)
        if c.dynamic_sampling_rounds:
            chosen = self._replace_uninformative(experiences, more)
            if chosen is None:
                return None
            experiences = chosen
        self._leave_out_overlong(experiences)
        if c.max_staleness:
            ages = [phase - e.version for e in experiences]
            self.metrics['rollout/staleness_mean'] = sum(ages) / len(ages)
            self.metrics['rollout/staleness_max'] = float(max(ages))
        return experiences

    def _check_failed(self, experiences: SequenceOf[Experience], phase: int) -> None:
        """Raises EpisodesFailed where all failed; the first phase with failures gives a warning, as metrics only count
        them."""
        failed = [e.episode for e in experiences if e.episode is not None and e.failed]
        if not failed:
            return
        counts = ', '.join(f'{count} {end}' for end, count in Counter(episode.end for episode in failed).most_common())
        first = failed[0].message
        if len(failed) == len(experiences):
            raise EpisodesFailed(f'all {len(failed)} episodes of phase {phase} failed ({counts}); the first: {first}')
        if self.tells and not self._has_told_of_failures:
            warnings.warn(
                f'{len(failed)} of {len(experiences)} episodes of phase {phase} failed ({counts}); the first: {first}; '
                'later ones are counted in environment/failed_share',
                stacklevel=2,
            )
        self._has_told_of_failures = True

    def _replace_uninformative(self, experiences: list[Experience], more: More) -> list[Experience] | None:
        """DAPO's dynamic sampling: as many groups whose scores differ, drawing further prompts for the others (Yu et
        al. 2025, section 3.2). None when a stop was asked for on the way, since a phase of fewer groups would not be
        the one that an undisturbed run has."""
        c, apart = self.config, self.config.estimator.rewards_apart
        wanted = drawn = len({e.group for e in experiences})
        done, kept = 0, informative_groups(experiences, apart=apart)
        while len(kept) < wanted and done < c.dynamic_sampling_rounds:
            done += 1
            missing = -(-(wanted - len(kept)) // c.experience_batch_size)
            further = more(missing)
            if further is None:
                return None
            drawn += missing * c.experience_batch_size
            kept += informative_groups(further, apart=apart)
        if not kept:
            raise NothingToLearn(
                f'dynamic sampling: after {done} further round{"s" * (done != 1)} all {drawn} groups have equal scores '
                'within; the task is too easy or too hard for this policy, or num_samples_per_prompt too small'
            )
        if len(kept) < wanted and self.tells:
            told = f'dynamic sampling gave up after {done} rounds with {len(kept)} of {wanted} groups'
            warnings.warn(told, stacklevel=2)
        self.metrics |= {'rollout/dynamic_rounds': float(done), 'rollout/informative_share': len(kept) / drawn}
        return [e for group in kept[:wanted] for e in group]

    def of_step(self, experiences: list[Experience]) -> dict[str, float]:
        """Of responses that the caller of `step` brings; `metrics`."""
        self.metrics = {}
        self._leave_out_overlong(experiences)
        return self.metrics

    def _leave_out_overlong(self, experiences: list[Experience]) -> None:
        """With `overlong_filter`, no token of a response that ran out of room counts; its score stays in its group's
        baseline."""
        if self.config.overlong_filter:
            cut = [e for e in experiences if not e.ended and not e.failed]
            for e in cut:
                e.response_mask = torch.zeros_like(e.response_mask)
            self.metrics['rollout/filtered_share'] = len(cut) / len(experiences)


class ReplayBuffer:
    """Where experience waits between collect and learn: single sequences, unpadded, in the order of their sample index.
    Every rank holds the same, so batch order needs no communication.

    Args:
        limit: keep at most this many sequences, dropping the oldest; 0 keeps all.
        device: where the tensors wait; 'cpu' keeps them out of the accelerator's memory.
    """

    def __init__(self, limit: int = 0, device: torch.device | str = 'cpu') -> None:
        self.limit, self.device = limit, torch.device(device)
        self._items: list[Experience] = []

    def append(self, experiences: Iterable[Experience]) -> None:
        self._items.extend(tensors_to(e, self.device) for e in experiences)
        if self.limit:
            del self._items[: -self.limit]

    def clear(self) -> None:
        self._items.clear()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Experience]:
        return iter(self._items)


def informative_groups(experiences: list[Experience], *, apart: bool = False) -> list[list[Experience]]:
    """The groups whose scores are not all equal, in order. `apart`: equal in each reward, not in their sum."""

    def of(e: Experience) -> Any:
        return e.weighted_scores if apart else e.score

    groups: dict[int, list[Experience]] = {}
    for e in experiences:
        groups.setdefault(e.group, []).append(e)
    return [members for members in groups.values() if len({of(e) for e in compared(members)}) > 1]
