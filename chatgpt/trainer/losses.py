"""Losses of PPO's models over a micro-batch: `loss(model, batch) -> (total, metrics)`.

A total is a share of a sum: it is divided by the count of the whole train batch, all ranks and micro-batches together
(`Batch.totals`), never by that of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.batching import collate, token_columns
from chatgpt.functional.losses import (
    importance_weighted,
    importance_weights,
    next_token_loss,
    positive_example_loss,
    sequence_log_ratio,
)
from chatgpt.functional.masking import masked_sum
from chatgpt.functional.ppo import aggregate, aggregation_count, clipped_value_loss, kl_penalty, policy_stats
from chatgpt.functional.values import hl_gauss_loss
from chatgpt.trainer.algorithms import POLICY_LOSSES, PolicyInputs, clip_high
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.metrics import Highest, Lowest, Mean, Metrics
from chatgpt.types import Batch, Experience, Sequence

COLUMNS = ('old_logprobs', 'logprobs', 'ref_logprobs', 'advantages', 'values', 'returns')
"""fields of `Experience` that the losses read, each (N,); `index`, (B,), is added for callbacks"""

VALUE_COLUMNS = ('values', 'returns')
"""those that the value loss reads"""


def experience_totals(
    records: SequenceOf[Experience], config: PPOConfig, max_new_tokens: int | None
) -> dict[str, float]:
    """Returns the divisors of the losses of a train batch. `max_new_tokens` is the constant length of Dr. GRPO."""
    masks = [r.response_mask for r in records]
    rows = torch.cat([torch.full((len(m),), i, device=m.device) for i, m in enumerate(masks)])
    count = aggregation_count(torch.cat(masks), rows, len(masks), config.aggregation, max_new_tokens)
    totals: dict[str, float] = {'tokens': max(sum(int(m.sum()) for m in masks), 1), 'policy': max(count, 1)}
    if config.positive_coef:
        totals['correct'] = max(sum(int(r.response_mask.sum()) for r in records if is_correct(r)), 1)
    return totals


def is_correct(record: Experience) -> bool:
    """Returns an episode's success, or whether the score is at least 1, that of a right answer in
    `chatgpt.data.rewards`."""
    success = record.episode.success if record.episode is not None else None
    return record.score >= 1.0 if success is None else success


def collate_experience(
    records: SequenceOf[Any],
    totals: dict[str, float],
    *,
    packing: bool = True,
    names: tuple[str, ...] = COLUMNS,
) -> Batch:
    """Returns a `Batch` of experience with the columns of the losses, 0 at tokens that do not count: a value there that
    is not finite would reach the gradient through a product with 0.

    Args:
        records: `Experience`, or with `names=VALUE_COLUMNS` also `ValueTarget` records.
    """
    columns = token_columns(records, names)
    if records:
        mask = torch.cat([r.response_mask for r in records])
        columns = {name: torch.where(mask, column, 0.0) for name, column in columns.items()}
    if 'correct' in totals:
        counts = torch.tensor([r.num_actions for r in records], dtype=torch.int64)
        columns['correct'] = torch.tensor([is_correct(r) for r in records], dtype=torch.bool).repeat_interleave(counts)
    index = torch.tensor([r.index for r in records], dtype=torch.int64)
    return collate(records, columns={**columns, 'index': index}, totals=totals, pack=packing)


def sequence_totals(records: SequenceOf[Sequence]) -> dict[str, float]:
    """Returns the number of tokens that count."""
    return {'tokens': max(sum(int(s.response_mask.sum()) for s in records), 1)}


@dataclass(frozen=True)
class ActorLoss:
    """Policy loss + KL in the loss − entropy_coef · entropy + positive_coef · loss on correct responses.

    Args:
        forward: (model, batch) -> `PolicyOutput` with entropy; the policy may be a restriction of the model (NLPO).
        kl_coef: coefficient of the KL in the loss.
    """

    config: PPOConfig
    forward: Callable[[nn.Module, Batch], Any]
    kl_coef: float = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        out = self.forward(model, batch)
        return self.of(out.logprobs, out.entropy, batch)

    def of(self, logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        c, mask, columns = self.config, batch.action_mask, batch.columns
        rows, num_sequences = batch.action_rows, batch.num_sequences
        old, high, entry = columns['old_logprobs'], clip_high(c), POLICY_LOSSES.find(c.policy_loss)
        metrics: dict[str, Mean | Highest | Lowest] = {}
        losses = entry.fn(PolicyInputs(logprobs, old, columns['advantages'], mask, rows, num_sequences), c)
        if c.tis_cap:
            behaviour, bounds = columns['logprobs'], {'low': c.tis_floor, 'high': c.tis_cap}
            weights = importance_weights(old, behaviour, mask, rows, num_sequences, c.off_policy, **bounds)
            losses = losses * weights
            metrics['tis_weight'] = Mean(masked_sum(weights, mask), mask.sum())
            outside = (weights <= c.tis_floor) | (weights >= c.tis_cap)  # a masked weight is 0
            metrics['tis_outside_fraction'] = Mean(masked_sum(outside.float(), mask), mask.sum())
        bonus, tokens, divisor = masked_sum(entropy, mask), batch.totals['tokens'], batch.totals['policy']

        def share(per_token: Tensor) -> Tensor:
            return aggregate(per_token, mask, rows, num_sequences, c.aggregation)

        # the bonus is a mean over tokens, however the rest is aggregated
        total = (share(losses) - c.entropy_coef * (bonus * (divisor / tokens))) / divisor
        if c.kl_in == 'loss' and self.kl_coef:
            penalty = kl_penalty(logprobs, columns['ref_logprobs'], c.kl_loss_kind)
            if c.kl_importance:
                penalty = importance_weighted(penalty, logprobs, old)
            total = total + self.kl_coef * (share(penalty) / divisor)
            metrics['kl_loss'] = Mean(masked_sum(penalty, mask), mask.sum())
        if c.positive_coef:
            correct = columns['correct']
            positive = masked_sum(positive_example_loss(logprobs, correct), mask)
            total = total + c.positive_coef * (positive / batch.totals['correct'])
            metrics['positive_loss'] = Mean(positive.detach(), (mask & correct).sum(), of_some=True)
        low = 1.0 if entry.clip == 'upper' else c.eps_clip  # no lower bound
        seen = ratios = policy_stats(logprobs, old, mask, eps_low=low, eps_high=high)
        if entry.per_sequence:  # the clip acts on the ratio of the sequence
            shift = sequence_log_ratio(logprobs.detach(), old, mask, rows, num_sequences)
            ratios = policy_stats(old + shift, old, mask, eps_low=low, eps_high=high)
        metrics |= {
            'policy_loss': Mean(masked_sum(losses.detach(), mask), seen.num_tokens),
            'entropy': Mean(bonus, seen.num_tokens),
            'approx_kl': Mean(seen.approx_kl, seen.num_tokens),
            'approx_kl_k3': Mean(seen.approx_kl_k3, seen.num_tokens),
            'clip_fraction': Mean(ratios.clipped, seen.num_tokens),
            'ratio_mean': Mean(ratios.ratio, seen.num_tokens),
            'ratio_max': Highest(ratios.ratio_max),
            'ratio_min': Lowest(ratios.ratio_min),
        }
        return total, metrics


@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss: `critic_loss`, a mean over tokens.

    Args:
        config: a `CriticLossSettings`; with `clips` one with `value_clip`.
        clips: False: no `value_clip`.
    """

    config: Any
    clips: bool = True

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        if self.config.critic_loss != 'categorical':
            return self.of(model(batch), batch)
        values, logits = model(batch, with_logits=True)
        return self.of(values, batch, logits)

    def of(self, values: Tensor, batch: Batch, logits: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """Computes the loss of values, (N,); `logits`, (N, K), are the outputs of a categorical head."""
        c, mask, old, returns = self.config, batch.action_mask, batch.columns['values'], batch.columns['returns']
        clip, count, own = c.value_clip if self.clips else None, mask.sum(), c.of_critic_loss
        further: dict[str, Tensor] = {}
        if c.critic_loss == 'categorical':
            assert logits is not None
            losses = hl_gauss_loss(logits, returns, own.low, own.high, own.sigma)
            further['return_outside_fraction'] = (returns < own.low) | (returns > own.high)
        else:
            losses = clipped_value_loss(values, old, returns, clip, delta=getattr(own, 'delta', None))
            if clip is not None:
                further['value_clip_fraction'] = (values.detach() - old).abs() > clip
        loss = masked_sum(losses, mask)
        with torch.no_grad():
            metrics: dict[str, Mean | Highest | Lowest] = {
                'value_loss': Mean(loss, count),
                'value_mean': Mean(masked_sum(values, mask), count),
            }
            metrics |= {name: Mean(masked_sum(share.float(), mask), count) for name, share in further.items()}
        return loss / batch.totals['tokens'], metrics


@dataclass(frozen=True)
class SharedLoss:
    """Policy loss + value_coef · value loss, from one forward of a trunk with a value head."""

    actor: ActorLoss
    value: ValueLoss

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        out = self.actor.forward(model, batch)
        policy, policy_metrics = self.actor.of(out.logprobs, out.entropy, batch)
        value, value_metrics = self.value.of(out.values, batch, out.value_logits)
        return policy + self.actor.config.value_coef * value, {**policy_metrics, **value_metrics}


@dataclass(frozen=True)
class HeadLoss:
    """The value loss of an actor's value head alone: without gradients of the trunk."""

    value: ValueLoss

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        out = model(batch, values_only=True)
        return self.value.of(out.values, batch, out.value_logits)


@dataclass(frozen=True)
class PtxLoss:
    """ptx_coef · mean over tokens of the next-token loss on pretraining text.

    Ouyang et al. 2022, equation 2, use the expectation of log π(x) of whole texts, a sum over each text's tokens.
    """

    coef: float

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        mask = batch.action_mask
        total = masked_sum(next_token_loss(model(batch).logprobs), mask)
        return self.coef * total / batch.totals['tokens'], {'ptx_loss': Mean(total, mask.sum())}
