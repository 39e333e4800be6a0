"""An environment's own rewards as scores: the reward of a turn stands at the turn's last token, so a reward at the end
is one at the last token of the last turn."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from chatgpt.experience.scorers import RewardValueError, Score, WeightedScorer
from chatgpt.sweep import Communicator
from chatgpt.types import Sample


class EnvironmentScorer:
    """Dense scores of episodes.

    One for each reward makes a weighted list, in which rewards of an environment stand beside any other:

        reward_model=[(1.0, EnvironmentScorer('correct')), (0.2, EnvironmentScorer('format')), (0.1, is_short)]

    Args:
        name: of the reward that counts; a turn without it has 0. None takes the sum of all that a turn has.
        among: the names that are known; a turn with another is an error, which a misspelt name would else hide. None
            takes any.
    """

    def __init__(self, name: str | None = None, among: tuple[str, ...] | None = None) -> None:
        self.name, self.among = name, among
        self.description = name or ''
        """for telling whether a resumed run goes on with another"""

    def score(self, samples: list[Sample], strategy: Communicator) -> list[Score]:
        """(A,) fp32 of each sample.

        Raises:
            ValueError: a sample without an episode.
            RewardValueError: a reward whose name is not `among` the known ones.
        """
        return [self._dense(sample) for sample in samples]

    def _dense(self, sample: Sample) -> torch.Tensor:
        if sample.episode is None:
            raise ValueError(
                'rewards of an environment need samples of an environment; pass environment= to the trainer'
            )
        scores = torch.zeros(sample.num_actions)
        for turn in sample.episode.turns:
            unknown = [] if self.among is None else [name for name in turn.rewards if name not in self.among]
            if unknown:
                raise RewardValueError(
                    f'the environment gave a reward {unknown[0]!r}, which reward_weights={list(self.among or ())} does '
                    'not have; give it a weight (0 leaves it out)'
                )
            scores[turn.stop - 1] = (
                sum(turn.rewards.values()) if self.name is None else turn.rewards.get(self.name, 0.0)
            )
        return scores


def environment_scorer(weights: Mapping[str, float] | None = None) -> EnvironmentScorer | WeightedScorer:
    """The scores of an environment's rewards: the sum of all, or with `weights` a weighted list of those named.

    Raises:
        ValueError: no weight at all, or one that is no finite number.
    """
    if weights is None:
        return EnvironmentScorer()
    if not weights:
        raise ValueError(
            "reward_weights is empty; give each reward of the environment a weight, as in {'correct': 1.0}"
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f'reward_weights: the weight of {name!r} must be a finite number; got {weight!r}')
    among = tuple(weights)
    return WeightedScorer([(float(weight), EnvironmentScorer(name, among)) for name, weight in weights.items()])
