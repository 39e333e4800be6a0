"""Preference losses: the DPO family, KTO, ORPO, SimPO. One number per pair, or per response for KTO, unreduced.

Inputs are log-probs of whole responses, (B,): sums over their tokens, or means where stated
(`losses.sequence_logprobs` returns either). "Margin" is the difference of log-ratios that `dpo_margin` computes; the
implicit reward of a response is β (log π − log π_ref), so β · margin is chosen reward − rejected reward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo_margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """(log π(y_w) − log π_ref(y_w)) − (log π(y_l) − log π_ref(y_l)), from sums of log-probs, all (B,)."""
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def dpo_loss(margin: Tensor, *, beta: float = 0.1) -> Tensor:
    """−log σ(β margin). Source: Rafailov et al. 2023, equation 7."""
    _check_beta(beta)
    return -F.logsigmoid(beta * margin)


def ipo_loss(margin: Tensor, *, beta: float = 0.1) -> Tensor:
    """(margin − 1 / (2β))². Source: IPO, Azar et al. 2023, equation 17 (β is the paper's τ)."""
    _check_beta(beta)
    return (margin - 1.0 / (2.0 * beta)).square()


def cdpo_loss(margin: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """−(1 − ε) log σ(β margin) − ε log σ(−β margin): labels are flipped with probability ε.

    Source: conservative DPO, Mitchell 2023, "A note on DPO with noisy preferences". Minimal at σ(β margin) = 1 − ε.
    """
    _check_beta(beta)
    _check_smoothing(label_smoothing)
    z = beta * margin
    return -(1.0 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)


def robust_dpo_loss(margin: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """(−(1 − ε) log σ(β margin) + ε log σ(−β margin)) / (1 − 2ε).

    If labels are flipped with probability ε, its expectation is the DPO loss of the clean labels. Source: robust DPO,
    Chowdhury et al. 2024, "Provably robust DPO".
    """
    _check_beta(beta)
    _check_smoothing(label_smoothing)
    z = beta * margin
    return (-(1.0 - label_smoothing) * F.logsigmoid(z) + label_smoothing * F.logsigmoid(-z)) / (
        1.0 - 2.0 * label_smoothing
    )


def hinge_loss(margin: Tensor, *, beta: float = 0.1) -> Tensor:
    """max(0, 1 − β margin). Source: SLiC, Zhao et al. 2023, in the normalised form of RSO, Liu et al. 2023."""
    _check_beta(beta)
    return torch.relu(1.0 - beta * margin)


def kto_loss(
    log_ratios: Tensor,
    desirable_mask: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """λ_D (1 − σ(β (r − z0))) for a desirable response, λ_U (1 − σ(β (z0 − r))) for an undesirable one; r = log π − log
    π_ref.

    Source: KTO, Ethayarajh et al. 2024, section 4 (loss and value function).

    Args:
        log_ratios: (B,) r, from sums of log-probs.
        desirable_mask: (B,) bool, True = desirable.
        reference_point: z0 = max(0, mean of log π(y') − log π_ref(y')) over responses y' to other prompts of the batch,
            a constant that estimates KL(π || π_ref).
    """
    _check_beta(beta)
    if desirable_mask.dtype != torch.bool:
        raise ValueError(f'desirable_mask must be bool, True = desirable; got {desirable_mask.dtype}')
    z = beta * (log_ratios - reference_point)
    # 1 − σ(z) = σ(−z), without the cancellation.
    return torch.where(desirable_mask, desirable_weight * torch.sigmoid(-z), undesirable_weight * torch.sigmoid(z))


def orpo_loss(chosen_mean: Tensor, rejected_mean: Tensor, *, weight: float = 0.1) -> Tensor:
    """−log P(y_w) − weight · log σ(log odds(y_w) − log odds(y_l)), with odds = P / (1 − P).

    log P is the **mean** log-prob per token. No reference model. Source: ORPO, Hong et al. 2024, equations 4, 6 and 7
    (`weight` is the paper's λ).

    Args:
        chosen_mean, rejected_mean: (B,) mean log-probs, at most 0.
    """
    return -chosen_mean - weight * F.logsigmoid(_log_odds(chosen_mean) - _log_odds(rejected_mean))


def simpo_loss(chosen_mean: Tensor, rejected_mean: Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """−log σ(β log P(y_w) − β log P(y_l) − γ), with log P the **mean** log-prob per token. No reference model.

    Source: SimPO, Meng et al. 2024, equation 6.

    Args:
        chosen_mean, rejected_mean: (B,) mean log-probs.
        gamma: target reward margin.
    """
    _check_beta(beta)
    return -F.logsigmoid(beta * (chosen_mean - rejected_mean) - gamma)


def _log_odds(logp: Tensor) -> Tensor:
    """log(P / (1 − P)) from log P; 1 − P by expm1 near P = 1 and log1p far from it (Mächler 2012, log1mexp)."""
    # P = 1 has infinite odds; the clamp keeps loss and gradient finite.
    logp = logp.clamp_max(-torch.finfo(logp.dtype).eps)
    near_one = logp > -0.6931471805599453
    # where() passes the gradients of both branches, so each gets only inputs that are safe for it.
    close = torch.log(-torch.expm1(torch.where(near_one, logp, torch.full_like(logp, -0.5))))
    far = torch.log1p(-torch.exp(torch.where(near_one, torch.full_like(logp, -1.0), logp)))
    return logp - torch.where(near_one, close, far)


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f'beta={beta!r} must be positive')


def _check_smoothing(label_smoothing: float) -> None:
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f'label_smoothing={label_smoothing!r} must lie in [0, 0.5)')
