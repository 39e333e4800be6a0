"""The losses of PPO's two models over one micro-batch, and what is measured while computing them.

A loss here is this rank's share of a sum: divided by the number of tokens of the whole train batch, all ranks and micro-batches
together (`num_tokens`), never by what happens to lie in this micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.functional.kl import kl_penalty
from chatgpt.functional.losses import (
    aggregate,
    aggregation_count,
    cispo_policy_loss,
    clipped_policy_loss,
    clipped_value_loss,
    gspo_policy_loss,
    importance_weighted,
    next_token_loss,
    policy_stats,
    sequence_log_ratio,
    truncated_importance_weights,
)
from chatgpt.functional.masking import masked_sum
from chatgpt.nn.nlpo import masked_output
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.learning import BatchStats, flat
from chatgpt.types import Batch, Experience, Sequence


class PPOLoss:
    """Losses of actor, critic, or both on one trunk. `num_tokens` is set for every train batch before its first forward."""

    def __init__(
        self, actor: nn.Module, critic: nn.Module | None, config: PPOConfig, temperature: float, max_new_tokens: int | None = None
    ) -> None:
        self.actor_model = actor
        self.critic_model = critic
        self.config = config
        self.temperature = temperature
        self.mask_model: nn.Module | None = None
        """NLPO's"""
        self.max_new_tokens = max_new_tokens
        """the constant length of Dr. GRPO"""
        self.kl_coef = 0.0
        """of the KL in the loss; set for every learning phase"""
        self.num_tokens = 1
        self.normalizer = 1
        """what the policy loss is divided by; the number of tokens under 'token'"""
        self.num_ptx_tokens = 1

    def begin(self, records: list[Experience]) -> None:
        """Count what the losses of a train batch are divided by."""
        self.num_tokens = max(sum(int(r.response_mask.sum()) for r in records), 1)
        self.normalizer = self.num_tokens
        if self.config.aggregation != 'token':
            masks = [r.response_mask for r in records]
            rows = torch.cat([torch.full((len(m),), i) for i, m in enumerate(masks)])
            count = aggregation_count(torch.cat(masks), rows, len(masks), self.config.aggregation, self.max_new_tokens)
            self.normalizer = max(count, 1)

    def actor(self, batch: Batch, records: list[Experience], stats: BatchStats) -> Tensor:
        """Policy loss + KL in the loss − entropy_coef · entropy."""
        out = self._output(batch)
        return self._policy(out.logprobs, out.entropy, batch, records, stats)

    def _output(self, batch: Batch) -> Any:
        top_p = self.config.nlpo_top_p
        if top_p is not None:
            return masked_output(self.actor_model, self.mask_model, batch, top_p=top_p, temperature=self.temperature)
        return self.actor_model(batch, temperature=self.temperature, with_entropy=True)

    def critic(self, batch: Batch, records: list[Experience], stats: BatchStats) -> Tensor:
        """Clipped value loss."""
        assert self.critic_model is not None
        return self._value(self.critic_model(batch), batch, records, stats)

    def shared(self, batch: Batch, records: list[Experience], stats: BatchStats) -> Tensor:
        """Both from one forward of a trunk with a value head: policy loss + value_coef · value loss."""
        out = self._output(batch)
        policy = self._policy(out.logprobs, out.entropy, batch, records, stats)
        return policy + self.config.value_coef * self._value(out.values, batch, records, stats)

    def ptx(self, batch: Batch, records: list[Sequence], stats: BatchStats) -> Tensor:
        """ptx_coef · mean over tokens of the next-token loss on pretraining text.

        Ouyang et al. 2022, equation 2, have the expectation of log π(x) of whole texts, a sum over each text's tokens.
        """
        logprobs = self.actor_model(batch).logprobs
        mask = batch.action_mask
        total = masked_sum(next_token_loss(logprobs), mask)
        stats.mean('ptx_loss', total, mask.sum())
        return self.config.ptx_coef * total / self.num_ptx_tokens

    def _policy(self, logprobs: Tensor, entropy: Tensor, batch: Batch, records: list[Experience], stats: BatchStats) -> Tensor:
        c, mask = self.config, batch.action_mask
        # A filler row has ratio 1 and advantage 0, and its mask is False.
        old = flat(records, 'old_logprobs', batch) if records else logprobs.detach()
        advantages = flat(records, 'advantages', batch)
        high = c.eps_clip if c.eps_clip_high is None else c.eps_clip_high
        losses = self._token_losses(logprobs, old, advantages, batch, high)
        if c.tis_cap is not None:
            behaviour = flat(records, 'logprobs', batch) if records else old
            weights = truncated_importance_weights(old, behaviour, c.tis_cap)
            losses = losses * weights
            stats.mean('tis_weight', masked_sum(weights, mask), mask.sum())
        loss = masked_sum(losses, mask)
        if c.aggregation == 'token':
            share = loss / self.num_tokens
        else:
            share = aggregate(losses, mask, batch.action_rows, batch.num_sequences, c.aggregation, self.normalizer)
        if c.kl_in == 'loss' and self.kl_coef:
            reference = flat(records, 'ref_logprobs', batch) if records else old
            penalty = kl_penalty(logprobs, reference, c.kl_loss_kind)
            if c.kl_importance:
                penalty = importance_weighted(penalty, logprobs, old)
            share = share + self.kl_coef * aggregate(
                penalty, mask, batch.action_rows, batch.num_sequences, c.aggregation, self.normalizer
            )
            stats.mean('kl_loss', masked_sum(penalty, mask), mask.sum())
        bonus = masked_sum(entropy, mask)
        low = 1.0 if c.policy_loss == 'cispo' else c.eps_clip  # CISPO's weight has no lower bound
        seen = ratios = policy_stats(logprobs, old, mask, eps_low=low, eps_high=high)
        if c.policy_loss == 'gspo':  # what is clipped is the ratio of the sequence
            shift = sequence_log_ratio(logprobs.detach(), old, mask, batch.action_rows, batch.num_sequences)
            ratios = policy_stats(old + shift, old, mask, eps_low=c.eps_clip, eps_high=high)
        stats.mean('policy_loss', loss, seen.num_tokens)
        stats.mean('entropy', bonus, seen.num_tokens)
        stats.mean('approx_kl', seen.approx_kl, seen.num_tokens)
        stats.mean('approx_kl_k3', seen.approx_kl_k3, seen.num_tokens)
        stats.mean('clip_fraction', ratios.clipped, seen.num_tokens)
        stats.mean('ratio_mean', ratios.ratio, seen.num_tokens)
        stats.maximum('ratio_max', ratios.ratio_max)
        stats.minimum('ratio_min', ratios.ratio_min)
        if c.aggregation == 'token' and c.kl_in == 'reward':
            return (loss - c.entropy_coef * bonus) / self.num_tokens
        return share - c.entropy_coef * bonus / self.num_tokens

    def _token_losses(self, logprobs: Tensor, old: Tensor, advantages: Tensor, batch: Batch, high: float) -> Tensor:
        c = self.config
        if c.policy_loss == 'reinforce':
            return -advantages * logprobs
        if c.policy_loss == 'cispo':
            return cispo_policy_loss(logprobs, old, advantages, eps_high=high)
        if c.policy_loss == 'gspo':
            return gspo_policy_loss(
                logprobs, old, advantages, batch.action_mask, batch.action_rows, batch.num_sequences, eps_low=c.eps_clip, eps_high=high,
                dual_clip=c.dual_clip,
            )  # fmt: skip
        return clipped_policy_loss(logprobs, old, advantages, eps_low=c.eps_clip, eps_high=high, dual_clip=c.dual_clip)

    def _value(self, values: Tensor, batch: Batch, records: list[Experience], stats: BatchStats) -> Tensor:
        mask = batch.action_mask
        old, returns = flat(records, 'values', batch), flat(records, 'returns', batch)
        clip = self.config.value_clip
        loss = masked_sum(clipped_value_loss(values, old, returns, clip), mask)
        with torch.no_grad():
            count = mask.sum()
            stats.mean('value_loss', loss, count)
            stats.mean('value_mean', masked_sum(values, mask), count)
            if clip is not None:
                stats.mean('value_clip_fraction', masked_sum(((values - old).abs() > clip).float(), mask), count)
        return loss / self.num_tokens
