"""Rewards of an environment as scores: the reward of a turn is at the turn's last token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from chatgpt.nn.sweep import Communicator
from chatgpt.trainer.experience.scorers import RewardValueError, Score
from chatgpt.types import Sample


class EnvironmentScorer:
    """Dense scores of episodes.

    A weighted list combines several rewards of an environment, and others:

        reward_model=[(1.0, EnvironmentScorer('correct')), (0.2, EnvironmentScorer('format')), (0.1, is_short)]

    Args:
        name: of the reward; a turn without it has 0. None takes the sum of a turn's rewards.
        among: known names; a turn with another is an error, which detects misspelt names. None takes any.
    """

    def __init__(self, name: str | None = None, among: tuple[str, ...] | None = None) -> None:
        self.name, self.among = name, among
        self.description = name or ''
        """for detecting a resume with another reward"""

    def score(self, samples: list[Sample], strategy: Communicator) -> list[Score]:
        """Returns (A,) fp32 of each sample.

        Raises:
            ValueError: a sample without an episode.
            RewardValueError: a reward with a name that is not in `among`.
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


ADDED_REWARDS = ('reward_fn', 'reward_model')
"""names in `reward_weights` of a reward in addition to those of an environment"""


def environment_rewards(weights: Mapping[str, float] | None = None, reward: Any = None) -> Any:
    """Returns the scorer of episodes: `reward`, or by default the sum of the environment's rewards; with `weights` a
    list of those named, including `reward` as 'reward_fn' or 'reward_model'.

    Raises:
        ValueError: no weights, one that is not a finite number, none for `reward`, or one for a missing reward.
    """
    if weights is None:
        return EnvironmentScorer() if reward is None else reward
    if not weights:
        raise ValueError(
            "reward_weights is empty; give each reward of the environment a weight, as in {'correct': 1.0}"
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f'reward_weights: the weight of {name!r} must be a finite number; got {weight!r}')
    beside = [name for name in ADDED_REWARDS if name in weights]
    if len(beside) != (reward is not None):
        raise ValueError(
            f'reward_weights={dict(weights)}: '
            + (
                "the reward beside the environment's needs one weight, by the name reward_fn or reward_model"
                if reward is not None
                else f'there is no {beside[0]}'
            )
        )
    among = tuple(name for name in weights if name not in ADDED_REWARDS)
    return [
        (float(weight), reward if name in ADDED_REWARDS else EnvironmentScorer(name, among))
        for name, weight in weights.items()
    ]


def check_reward_beside(environment: Any, weights: Mapping[str, float] | None, reward: Any) -> None:
    """Raises ValueError if a reward would silently replace those of the environment: one that is not a list, without
    `reward_weights`."""
    alone = weights is None and reward is not None and not isinstance(reward, (list, tuple))
    if alone and getattr(environment, 'gives_rewards', True):
        raise ValueError(
            'the environment gives rewards, and there is a reward beside them: say how they add up by reward_weights, '
            "as in {'reward': 1.0, 'reward_fn': 0.5}; {'reward_fn': 1.0} takes the function alone"
        )
    environment_rewards(weights, reward)
