"""Makes experience from samples: scores, reference log-probs, values, rewards per token, advantages.

Each rank scores its own samples and runs the models over them, in micro-batches. The records stay there: every rank
gets the list of all, ordered by sample index, with the tensors of its own (`chatgpt.nn.records`). What spans sequences
is computed from numbers of each record, the same on every rank, so the result does not depend on the world size: score
scaling from scores, whitening from moments. Groups are whole on a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.batching import collate
from chatgpt.functional.choices import KLKind
from chatgpt.functional.losses import kl_full
from chatgpt.functional.masking import joined_moments, moments, whiten, whitening
from chatgpt.functional.ppo import kl_penalty, token_rewards
from chatgpt.nn.records import is_here, numbers, of_all_ranks
from chatgpt.nn.sweep import Communicator, cuts_of_own, read_back, sweep
from chatgpt.trainer.experience.reference import Reference
from chatgpt.trainer.experience.scorers import RewardValueError, Score, Scorer, WeightedScorer, combine, sequence_score
from chatgpt.trainer.experience.shaping import ScoreShaper
from chatgpt.types import Batch, Experience, Sample

LARGEST_REWARD = 1e12
"""sums of squares of smaller rewards, and their gradients, do not overflow in fp32"""


@dataclass(kw_only=True)
class ExperienceSettings:
    """Settings of `ExperienceMaker`; see `PPOConfig` for the meaning and the source of each."""

    temperature: float = 1.0
    kl_kind: KLKind = 'k1'
    recompute_logprobs: bool = False
    whiten_rewards: bool = False
    max_tokens_per_batch: int | None = None
    packing: bool = True


class ExperienceMaker:
    """Makes `Experience` records from `Sample` records.

    Args:
        strategy: communicates between ranks and moves batches to the device.
        actor: the prepared policy; runs if log-probs are recomputed or it carries the value head.
        critic: as prepared; None if there is none or the actor carries the value head.
        reference: see `Reference`; without one, the KL is 0.
        scorer: None if scores are passed with every batch.
        estimate: writes `advantages` and `returns` of the ordered list, which holds rewards, in place. A collective.
        actor_has_values: the actor carries a value head.
    """

    def __init__(
        self,
        strategy: Communicator,
        actor: nn.Module,
        critic: nn.Module | None,
        reference: Reference,
        scorer: Scorer | None,
        shaper: ScoreShaper,
        settings: ExperienceSettings,
        *,
        estimate: Callable[[list[Experience]], None],
        actor_has_values: bool = False,
    ) -> None:
        self.strategy, self.actor, self.critic, self.reference = strategy, actor, critic, reference
        self.scorer, self.shaper, self.settings = scorer, shaper, settings
        self.estimate, self.actor_has_values = estimate, actor_has_values

    def make(
        self,
        samples: list[Sample],
        *,
        kl_coef: float,
        scores: list[Score] | None = None,
        settings: ExperienceSettings | None = None,
    ) -> list[Experience]:
        """Returns the experience of **all** ranks, ordered by sample index, from this rank's `samples`; outlines of the
        other ranks' records.

        Args:
            kl_coef: β, the weight of the per-token KL in the reward.
            scores: of this rank's samples; None calls the scorer.
            settings: for this call, in place of the maker's own.
        """
        settings = settings or self.settings
        apart: list[list[tuple[float, Score]]] = [[]] * len(samples)
        if scores is None:
            if self.scorer is None:
                raise ValueError('there is no reward: pass reward_model to the trainer, or scores with each batch')
            if isinstance(self.scorer, WeightedScorer):
                apart = self.scorer.apart(samples, self.strategy)
                scores = [combine(parts, sample) for parts, sample in zip(apart, samples, strict=True)]
            else:
                scores = self.scorer.score(samples, self.strategy)
        local = [_start(sample, score, parts) for sample, score, parts in zip(samples, scores, apart, strict=True)]
        self._run_models(local, settings)
        experiences = of_all_ranks(self.strategy, local)
        self._fill_rewards(experiences, kl_coef)
        self.estimate(experiences)
        return experiences

    @torch.no_grad()
    def _run_models(self, experiences: list[Experience], s: ExperienceSettings) -> None:
        """Writes old log-probs, reference log-probs, KL and values into the records, on the CPU."""
        full_kl, reference = s.kl_kind == 'full', self.reference

        def forward(batch: Batch) -> tuple[Any, Any, Tensor | None]:
            options: dict[str, Any] = {'temperature': s.temperature, 'with_logits': full_kl}
            policy: Any = None
            compared: Any = None
            with self.strategy.autocast():  # the same dtypes as in learning
                if s.recompute_logprobs or self.actor_has_values or full_kl:
                    both = {'with_reference': True} if reference.comes_with_policy else {}
                    policy = self.actor(batch, **options, **both)
                    compared = policy.reference
                if compared is None and reference.exists:
                    compared = reference.forward(batch, **options)
            if self.critic is not None:
                return policy, compared, self.critic(batch)
            return policy, compared, policy.values if self.actor_has_values else None

        cuts = cuts_of_own(self.strategy, [e.num_tokens for e in experiences], s.max_tokens_per_batch)
        kept: list[tuple[str, list[Experience], Tensor]] = []
        with reference.onload():
            for positions, (policy, compared, values) in sweep(
                self.strategy, cuts, lambda at: collate([experiences[i] for i in at], pack=s.packing), forward
            ):
                found = {'values': values, 'ref_logprobs': None if compared is None else compared.logprobs}
                if policy is not None and s.recompute_logprobs:
                    found['old_logprobs'] = policy.logprobs
                if full_kl and compared is not None:
                    found['kl'] = kl_full(policy.logits / s.temperature, compared.logits / s.temperature)
                records = [experiences[i] for i in positions]
                kept += [(name, records, flat) for name, flat in found.items() if records and flat is not None]
                policy = compared = values = None  # frees logits before the next forward
        _write(kept)
        for e in experiences:
            if not reference.exists:
                e.ref_logprobs = e.old_logprobs.clone()
            if not full_kl:
                e.kl = kl_penalty(e.old_logprobs, e.ref_logprobs, s.kl_kind)

    def _fill_rewards(self, experiences: list[Experience], kl_coef: float) -> None:
        shaped = self.shaper([e.score for e in experiences], experiences)
        sizes = {e.index: abs(score) for e, score in zip(experiences, shaped, strict=True)}
        for e, score in zip(experiences, shaped, strict=True):
            e.shaped_score = score
            if not is_here(e):
                continue
            if e.token_scores is None:
                e.rewards = token_rewards(e.kl, kl_coef, score, e.response_mask)
            else:
                # `score` is the sum of the dense scores, so it must not be paid as well.
                dense, once = self.shaper.of_tokens(e.token_scores, e)
                e.rewards = token_rewards(e.kl, kl_coef, once, e.response_mask, token_scores=dense)
                sizes[e.index] = float(dense.abs().sum()) + abs(once)

        def row(e: Experience) -> Tensor:
            return torch.cat([torch.tensor([sizes[e.index]]).double(), moments(e.rewards, e.response_mask)])

        table = numbers(experiences, row, 4, self.strategy)
        for e, size in zip(experiences, table[:, 0].tolist(), strict=True):
            if not size <= LARGEST_REWARD:  # NaN too
                raise RewardValueError(
                    f'the score {e.score:g} of {e.called} is beyond {LARGEST_REWARD:g}, and squares of such rewards '
                    'overflow in fp32; give score_clip, or a reward of another scale'
                )
        if self.settings.whiten_rewards and experiences:
            over = joined_moments(table[:, 1:])
            factor = float(whitening(over)[1])
            for e in experiences:
                e.shaped_score *= factor
                if is_here(e):
                    e.rewards = whiten(e.rewards, e.response_mask, shift_mean=False, over=over)


def _start(sample: Sample, score: Score, parts: list[tuple[float, Score]]) -> Experience:
    """Returns the experience of a sample, with zeros in place of model outputs."""
    dense = score if isinstance(score, Tensor) else None
    zeros = torch.zeros(sample.num_actions)
    return Experience(
        **{f.name: getattr(sample, f.name) for f in fields(Sample)},
        score=sequence_score(score, sample),
        old_logprobs=sample.logprobs.clone(),
        ref_logprobs=zeros,
        values=zeros.clone(),
        kl=zeros.clone(),
        rewards=zeros.clone(),
        advantages=zeros.clone(),
        returns=zeros.clone(),
        token_scores=dense,
        weighted_scores=tuple((weight, sequence_score(part, sample)) for weight, part in parts),
    )


def _write(kept: list[tuple[str, list[Experience], Tensor]]) -> None:
    """Splits the flat (N,) results of micro-batches over their records: (name of the field, records, result)."""
    for (name, records, _), flat in zip(kept, read_back([flat for *_, flat in kept]), strict=True):
        for record, part in zip(records, flat.split([r.num_actions for r in records]), strict=True):
            setattr(record, name, part.clone())
