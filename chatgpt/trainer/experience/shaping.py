"""Shaping of scores before they enter the reward: scaling by running moments, clipping, penalties.

The steps, each optional, in order: scale or normalise by running moments, clip to ±c, replace the score of a response
that did not end, subtract a length penalty. All are computed from the scores of all ranks, in sample order, so the
world size has no effect.

Dense scores (one per token) are shaped so that their sum equals the shaped sum: factors multiply every token; added or
replaced amounts are paid once, at the last token that counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from chatgpt.types import Sample

ScoreScaling = Literal['none', 'running', 'norm', 'ref']


@dataclass
class RunningMoments:
    """Running mean and unbiased variance (Chan, Golub & LeVeque 1979, parallel update)."""

    count: int = 0
    mean: float = 0.0
    sum_squares: float = 0.0
    """sum of squared deviations from the mean"""

    def update(self, values: SequenceOf[float]) -> None:
        if not values:
            return
        n = len(values)
        mean = math.fsum(values) / n
        squares = math.fsum((v - mean) ** 2 for v in values)
        delta, total = mean - self.mean, self.count + n
        self.sum_squares += squares + delta * delta * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    @property
    def are_equal(self) -> bool:
        """True if all values so far are equal, up to rounding: there is no scale to divide by."""
        return self.count < 2 or self.sum_squares <= 1e-12 * self.mean * self.mean * (self.count - 1)

    @property
    def std(self) -> float:
        return math.sqrt(self.sum_squares / (self.count - 1)) if self.count > 1 else 1.0

    def state_dict(self) -> dict[str, float]:
        return {'count': self.count, 'mean': self.mean, 'sum_squares': self.sum_squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.sum_squares = int(state['count']), state['mean'], state['sum_squares']


class ScoreShaper:
    """Maps raw scores to the ones that enter the reward.

    Args:
        scaling: 'running' divides by the running standard deviation, 'norm' also subtracts the running mean, 'ref'
            divides by the standard deviation of the first batch, 'none' keeps scores (trlX `scale_reward`, TRL
            `use_score_scaling` and `use_score_norm`). While all scores so far are equal nothing is divided, and 'ref'
            continues with the next batch.
        clip: maximum absolute value of scaled scores.
        missing_eos_score: replaces the score of a response cut at the length limit (−1 in arXiv 2403.17031).
        token_penalty: subtracted per response token that counts.
        overlong: (room, buffer): a penalty of up to 1 over the last `buffer` tokens before the limit (Yu et al. 2025,
            equation 13). `room` maps a prompt length to the limit of new tokens, as `SamplingParams.room` does.
        failure_reward: added to the shaped score of an episode with a failed environment, in place of the penalties of
            a response without an end.
    """

    def __init__(
        self,
        scaling: ScoreScaling = 'none',
        clip: float | None = None,
        missing_eos_score: float | None = None,
        token_penalty: float = 0.0,
        overlong: tuple[Callable[[int], int], int] | None = None,
        failure_reward: float = 0.0,
    ) -> None:
        self.scaling = scaling
        self.clip = clip
        self.missing_eos_score = missing_eos_score
        self.token_penalty = token_penalty
        self.overlong = overlong
        self.failure_reward = failure_reward
        self.moments = RunningMoments()

    def __call__(self, scores: SequenceOf[float], samples: SequenceOf[Sample]) -> list[float]:
        if self.scaling in ('running', 'norm') or (self.scaling == 'ref' and self.moments.are_equal):
            self.moments.update([score for score, sample in zip(scores, samples, strict=True) if not sample.left_out])
        return [self._shape(score, sample) for score, sample in zip(scores, samples, strict=True)]

    @property
    def is_idle(self) -> bool:
        """True if scores cannot be scaled yet because all so far are equal."""
        return self.scaling != 'none' and self.moments.are_equal

    def scale(self) -> tuple[float, float]:
        """Returns (shift, factor): the scaled score is (score - shift) * factor."""
        if self.scaling == 'none':
            return 0.0, 1.0
        shift = self.moments.mean if self.scaling == 'norm' else 0.0
        return shift, 1.0 if self.moments.are_equal else 1.0 / (self.moments.std + 1e-8)

    def of_tokens(self, token_scores: Tensor, sample: Sample) -> tuple[Tensor, float]:
        """Returns the shaped dense scores of a sample, (A,), and the amount added at the last token that counts."""
        import torch

        if self._is_missing_end(sample):
            return torch.zeros_like(token_scores), self._shape(0.0, sample)
        shift, factor = self.scale()
        scaled = (float(torch.where(sample.response_mask, token_scores, 0.0).sum()) - shift) * factor
        if self.clip is not None and abs(scaled) > self.clip:
            factor *= self.clip / abs(scaled)
        return token_scores * factor, -shift * factor - self._penalties(sample)

    def _shape(self, score: float, sample: Sample) -> float:
        shift, factor = self.scale()
        score = (score - shift) * factor
        if self.clip is not None:
            score = min(max(score, -self.clip), self.clip)
        if self._is_missing_end(sample):
            assert self.missing_eos_score is not None
            score = self.missing_eos_score
        return score - self._penalties(sample)

    def _is_missing_end(self, sample: Sample) -> bool:
        return self.missing_eos_score is not None and not sample.ended and not sample.failed

    def _penalties(self, sample: Sample) -> float:
        if sample.failed:
            return self.token_penalty * int(sample.response_mask.sum()) - self.failure_reward
        return self.token_penalty * int(sample.response_mask.sum()) + self._overlong_penalty(sample)

    def _overlong_penalty(self, sample: Sample) -> float:
        """Returns 0 up to room − buffer tokens, then rises linearly to 1 at the limit."""
        if self.overlong is None:
            return 0.0
        room, buffer = self.overlong
        limit = room(len(sample.prompt_ids))
        return min(max((sample.num_actions - (limit - buffer)) / buffer, 0.0), 1.0)
