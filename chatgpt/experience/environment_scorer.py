"""An environment's own rewards as scores: the reward of a turn stands at the turn's last token. Left out: several named
rewards apart, which are a weighted list of these."""

from __future__ import annotations

import torch

from chatgpt.experience.scorers import Score
from chatgpt.sweep import Communicator
from chatgpt.types import Sample


class EnvironmentScorer:
    """Dense scores of episodes.

    Args:
        name: of the reward that counts; None takes the sum of all.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def score(self, samples: list[Sample], strategy: Communicator) -> list[Score]:
        return [self._dense(sample) for sample in samples]

    def _dense(self, sample: Sample) -> torch.Tensor:
        if sample.episode is None:
            raise ValueError(
                'rewards of an environment need samples of an environment; pass environment= to the trainer'
            )
        scores = torch.zeros(sample.num_actions)
        for turn in sample.episode.turns:
            scores[turn.stop - 1] = (
                sum(turn.rewards.values()) if self.name is None else turn.rewards.get(self.name, 0.0)
            )
        return scores
