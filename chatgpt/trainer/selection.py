"""Selection of the experience of a phase: episodes of a failed environment, groups without a difference of scores
(dynamic sampling), responses cut at the length limit.

With environment_failures='mask' no token of a failed episode counts, and its rewards enter neither the baseline of its
group nor the statistics of scores: a reward from before the failure does not depend on the policy alone, and would
shift the advantages of the other episodes (github.com/NVIDIA-NeMo/RL/pull/4029). An overlong response is the policy's
own, so its score stays in the baseline. With 'penalise' the last token of the policy gets `failure_reward` in addition
to earlier rewards, for policies that can break an environment. An episode that failed in `reset` has no token to pay,
so it is left out either way.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from chatgpt.nn.records import numbers
from chatgpt.strategies.base import Strategy
from chatgpt.trainer.config import PPOConfig
from chatgpt.types import Experience, Sample, tensors_to

More = Callable[[int], list[Experience] | None]
"""collects and scores the given number of further timesteps; returns None if a stop is requested"""


class EpisodesFailed(RuntimeError):
    """All episodes of a phase failed."""


class NothingToLearn(RuntimeError):
    """Dynamic sampling found no group with different scores."""


def mask_failed(samples: SequenceOf[Sample]) -> None:
    """Masks all tokens of failed episodes, in place."""
    for sample in samples:
        if sample.failed:
            sample.response_mask = torch.zeros_like(sample.response_mask)


def compared(experiences: SequenceOf[Experience]) -> list[Experience]:
    """Returns the experiences that advantages are estimated from: all but failed episodes without a token that
    counts."""
    return [e for e in experiences if not e.left_out]


class Selection:
    """Selects the experience of a phase, all ranks together, before learning."""

    def __init__(self, config: PPOConfig, strategy: Strategy) -> None:
        self.config, self.strategy, self.warns = config, strategy, strategy.is_rank_0
        self.metrics: dict[str, float] = {}
        """`rollout/...` of the latest selection"""
        self._has_warned_of_failures = False

    def __call__(self, experiences: list[Experience], phase: int, more: More) -> list[Experience] | None:
        """Returns the experience for the phase after `phase` others; None if `more` returned None.

        Raises:
            EpisodesFailed: all episodes failed.
            NothingToLearn: with dynamic sampling, no group has different scores after the last round.
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

            def row(e: Experience) -> Tensor:
                age = (phase - e.token_versions).double()
                return torch.stack([age.mean(), age.max()])

            means, highest = numbers(experiences, row, 2, self.strategy).T.tolist()
            self.metrics['rollout/staleness_mean'] = sum(means) / len(means)
            self.metrics['rollout/staleness_max'] = max(highest)
        return experiences

    def _check_failed(self, experiences: SequenceOf[Experience], phase: int) -> None:
        """Raises EpisodesFailed if all failed; warns in the first phase with failures, which metrics only count."""
        failed = [e.episode for e in experiences if e.episode is not None and e.failed]
        if not failed:
            return
        counts = ', '.join(f'{count} {end}' for end, count in Counter(episode.end for episode in failed).most_common())
        first = failed[0].message
        if len(failed) == len(experiences):
            raise EpisodesFailed(f'all {len(failed)} episodes of phase {phase} failed ({counts}); the first: {first}')
        if self.warns and not self._has_warned_of_failures:
            warnings.warn(
                f'{len(failed)} of {len(experiences)} episodes of phase {phase} failed ({counts}); the first: {first}; '
                'later ones are counted in environment/failed_share',
                stacklevel=2,
            )
        self._has_warned_of_failures = True

    def _replace_uninformative(self, experiences: list[Experience], more: More) -> list[Experience] | None:
        """Dynamic sampling of DAPO: replaces groups of equal scores by groups of further prompts (Yu et al. 2025,
        section 3.2). Returns None if a stop is requested, since a phase of fewer groups would differ from that of an
        undisturbed run."""
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
        if len(kept) < wanted and self.warns:
            text = f'dynamic sampling gave up after {done} rounds with {len(kept)} of {wanted} groups'
            warnings.warn(text, stacklevel=2)
        self.metrics |= {'rollout/dynamic_rounds': float(done), 'rollout/informative_share': len(kept) / drawn}
        return [e for group in kept[:wanted] for e in group]

    def of_step(self, experiences: list[Experience]) -> dict[str, float]:
        """Filters responses of a caller of `step`; returns the metrics."""
        self.metrics = {}
        self._leave_out_overlong(experiences)
        return self.metrics

    def _leave_out_overlong(self, experiences: list[Experience]) -> None:
        """With `overlong_filter`, masks all tokens of responses cut at the length limit; their scores stay in the
        baselines of their groups."""
        if self.config.overlong_filter:
            cut = [e for e in experiences if not e.ended and not e.failed]
            for e in cut:
                e.response_mask = torch.zeros_like(e.response_mask)
            self.metrics['rollout/filtered_share'] = len(cut) / len(experiences)


class ReplayBuffer:
    """A buffer of experience between collect and learn: single sequences, unpadded, ordered by sample index. Every rank
    has the same list, so the batch order needs no communication, and holds the tensors of its own records
    (`chatgpt.nn.records`).

    Args:
        limit: maximum number of sequences; the oldest are dropped. 0 keeps all.
        device: of the tensors; 'cpu' saves accelerator memory.
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
    """Returns the groups of unequal scores, in order. `apart`: unequal in any reward, not only in their sum."""

    def of(e: Experience) -> Any:
        return e.weighted_scores if apart else e.score

    groups: dict[int, list[Experience]] = {}
    for e in experiences:
        groups.setdefault(e.group, []).append(e)
    return [members for members in groups.values() if len({of(e) for e in compared(members)}) > 1]
