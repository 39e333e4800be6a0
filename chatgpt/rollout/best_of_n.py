"""Best-of-n sampling: several responses per prompt, of which the best by score are returned.

The KL divergence of best-of-n from the policy is at most log n − (n − 1)/n nats (Stiennon et al. 2020, appendix G.3;
Beirami et al. 2024 show that it is a bound).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import RolloutEngine
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.types import Prompt, Sample


class Candidate(NamedTuple):
    sample: Sample
    score: float


def kl_bound(n: int) -> float:
    """Returns the upper bound of KL(best of n || policy) in nats: log n − (n − 1)/n."""
    if n < 1:
        raise ValueError(f'n={n} must be at least 1')
    return math.log(n) - (n - 1) / n


class BestOfN:
    """Generates `sample_size` responses to each prompt and returns the `n_candidates` best.

    Args:
        engine: has begun with a policy before this object is called.
        score: function of the samples that returns one number per sample, or (A,) scores of its tokens, which are
            summed over `response_mask`; for example `lambda samples: scorer.score(samples, strategy)`.
        sample_size, n_candidates: names and defaults are TRL's.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        score: Callable[[list[Sample]], SequenceOf[float | Tensor]],
        *,
        sample_size: int = 4,
        n_candidates: int = 1,
    ) -> None:
        if not 1 <= n_candidates <= sample_size:
            raise ValueError(f'n_candidates={n_candidates} must lie between 1 and sample_size={sample_size}')
        self.engine, self.score = engine, score
        self.sample_size, self.n_candidates = sample_size, n_candidates

    def __call__(
        self,
        prompts: SequenceOf[Prompt],
        sampling: SamplingParams,
        *,
        seed: int,
        first_index: int = 0,
        decode: Callable[[Sample], None] | None = None,
    ) -> list[list[Candidate]]:
        """Returns the best candidates of each prompt, best first. Ties keep the order of sampling; episodes in which
        the environment failed come last.

        `decode` fills the texts of a sample before it is scored. Raises ValueError for greedy decoding with several
        responses per prompt, and for scores that are not finite.
        """
        n = self.sample_size
        if n > 1 and not sampling.do_sample:
            raise ValueError(f'best of {n}: greedy decoding gives {n} times the same response; set do_sample')
        repeated = [prompt for prompt in prompts for _ in range(n)]
        indices = range(first_index, first_index + len(repeated))
        groups = [first_index + i // n for i in range(len(repeated))]
        call = Call.of(repeated, sampling, seed=seed, indices=indices, groups=groups)
        samples = self.engine.generate(call) if repeated else []
        for sample in samples if decode is not None else ():
            assert decode is not None
            decode(sample)
        given = list(self.score(samples))
        scores = [_total(score, sample) for score, sample in zip(given, samples, strict=False)]
        if len(given) != len(samples) or not all(math.isfinite(s) for s in scores):
            raise ValueError(
                f'best of {n}: the score gave {len(given)} numbers for {len(samples)} samples, all of which must be '
                'finite'
            )
        candidates = [Candidate(sample, score) for sample, score in zip(samples, scores, strict=True)]
        of_prompt = [candidates[i : i + n] for i in range(0, len(candidates), n)]
        return [sorted(group, key=lambda c: (c.sample.failed, -c.score))[: self.n_candidates] for group in of_prompt]


def _total(score: float | Tensor, sample: Sample) -> float:
    if not isinstance(score, Tensor) or score.dim() == 0:
        return float(score)
    return float(torch.where(sample.response_mask, score, 0.0).sum())
