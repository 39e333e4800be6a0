"""Losses and `models.utils` of ColossalAI's `chatgpt`: padded (B, A) tensors with an action mask.

Formulas that are wrong there are corrected here; docs/coming_from/colossalai.md shows both numbers.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from chatgpt.functional.logprobs import logprobs_of
from chatgpt.functional.losses import pairwise_log_exp_loss, pairwise_log_sigmoid_loss
from chatgpt.functional.ppo import clipped_policy_loss, clipped_value_loss, kl_penalty


def masked_mean(tensor: Tensor, mask: Tensor, dim: int = 1) -> Tensor:
    """Returns the mean over entries with a mask of True; 0 if there are none."""
    mask = mask.to(tensor.dtype)
    return (tensor * mask).sum(dim=dim) / mask.sum(dim=dim).clamp_min(1e-8)


def _mean(loss: Tensor, action_mask: Tensor | None) -> Tensor:
    """Averages over the actions of each sequence, then over sequences."""
    return (loss if action_mask is None else masked_mean(loss, action_mask)).mean()


class PolicyLoss(nn.Module):
    """The clipped surrogate of PPO, averaged over the actions of each sequence, then over sequences."""

    def __init__(self, clip_eps: float = 0.2) -> None:
        super().__init__()
        self.clip_eps = clip_eps

    def forward(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, action_mask: Tensor | None = None
    ) -> Tensor:
        """log_probs, old_log_probs (B, A); advantages (B, A) or (B, 1); action_mask (B, A) bool."""
        advantages = advantages.expand_as(log_probs)
        return _mean(clipped_policy_loss(log_probs, old_log_probs, advantages, eps_low=self.clip_eps), action_mask)


class ValueLoss(nn.Module):
    """max((V − R)², (V clipped to V_old ± ε − R)²), without the ½ of the trainers; masked, unlike in ColossalAI."""

    def __init__(self, clip_eps: float = 0.4) -> None:
        super().__init__()
        self.clip_eps = clip_eps

    def forward(self, values: Tensor, old_values: Tensor, reward: Tensor, action_mask: Tensor | None = None) -> Tensor:
        """values, old_values, reward (B,) or (B, A); the mask applies to (B, A) only."""
        loss = 2 * clipped_value_loss(values, old_values, reward, self.clip_eps)
        return _mean(loss, action_mask if loss.dim() > 1 else None)


class GPTLMLoss(nn.Module):
    """Cross-entropy of the next token; labels of −100 do not count."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits (B, S, V), labels (B, S)."""
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class PPOPtxActorLoss(nn.Module):
    """Policy loss plus `pretrain_coef` times the next-token loss on pretraining text."""

    def __init__(
        self, policy_clip_eps: float = 0.2, pretrain_coef: float = 0.0, pretrain_loss_fn: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.pretrain_coef = pretrain_coef
        self.policy_loss_fn = PolicyLoss(policy_clip_eps)
        self.pretrain_loss_fn = pretrain_loss_fn or GPTLMLoss()

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        lm_logits: Tensor,
        lm_input_ids: Tensor,
        action_mask: Tensor | None = None,
    ) -> Tensor:
        policy = self.policy_loss_fn(log_probs, old_log_probs, advantages, action_mask)
        return policy + self.pretrain_coef * self.pretrain_loss_fn(lm_logits, lm_input_ids)


class LogSigLoss(nn.Module):
    """−log σ(chosen − rejected), averaged; finite where ColossalAI's is log(0)."""

    def forward(self, chosen_reward: Tensor, reject_reward: Tensor) -> Tensor:
        return pairwise_log_sigmoid_loss(chosen_reward, reject_reward).mean()


class LogExpLoss(nn.Module):
    """log(1 + exp(rejected − chosen)), averaged; finite where ColossalAI's overflows."""

    def forward(self, chosen_reward: Tensor, reject_reward: Tensor) -> Tensor:
        return pairwise_log_exp_loss(chosen_reward, reject_reward).mean()


PairWiseLoss = LogSigLoss
"""its name in February 2023"""


# ---------------------------------------------------------------------- models.utils


def compute_approx_kl(log_probs: Tensor, log_probs_base: Tensor, action_mask: Tensor | None = None) -> Tensor:
    """Returns the mean over a sequence's actions of k3 of (log π − log π_ref), shape (B,).

    ColossalAI exponentiates log π − log π_ref, which is k3 of the other direction and, for tokens sampled from π, no
    estimate of KL(π || π_ref). The trainers here use `chatgpt.functional.ppo.kl_penalty`.
    """
    kl = kl_penalty(log_probs_base, log_probs, 'k3')  # k3 has log r = second − first
    return kl.mean(dim=1) if action_mask is None else masked_mean(kl, action_mask)


def compute_reward(
    r: Tensor | float, kl_coef: float, log_probs: Tensor, log_probs_base: Tensor, action_mask: Tensor | None = None
) -> Tensor | float:
    """Returns score − kl_coef · KL of the sequence, shape (B,)."""
    return r if kl_coef <= 0 else r - kl_coef * compute_approx_kl(log_probs, log_probs_base, action_mask)


def log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-probs of labels (...) under logits (..., V), shape (...), fp32."""
    return logprobs_of(logits.flatten(0, -2), labels.flatten()).view(labels.shape)


def normalize(tensor: Tensor, dim: int = 0, eps: float = 1e-8) -> Tensor:
    """Normalizes to mean 0 and variance 1 along a dimension; the variance divides by n and is at least eps."""
    centred = tensor - tensor.mean(dim, keepdim=True)
    return centred * centred.square().mean(dim, keepdim=True).clamp_min(eps).rsqrt()


def masked_normalize(tensor: Tensor, mask: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Normalizes over entries with a mask of True; others become 0. ColossalAI counts masked entries as −mean."""
    centred = (tensor - masked_mean(tensor, mask, dim).unsqueeze(dim)) * mask
    return centred * masked_mean(centred.square(), mask, dim).unsqueeze(dim).clamp_min(eps).rsqrt()
