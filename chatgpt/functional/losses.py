"""Losses of policies, values and reward models, their aggregation, and what is measured beside them.

Every loss is unreduced: one number per token (N,) or per sequence (B,). `aggregate` turns it into this micro-batch's
share of the loss of a whole train batch, by dividing a sum by a *global* count; adding the shares of all micro-batches
and ranks gives the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from chatgpt.functional.choices import Aggregation
from chatgpt.functional.kl import MAX_LOG_RATIO, kl_penalty
from chatgpt.functional.masking import masked_sum, masked_var, segment_count, segment_mean, segment_sum

_AGGREGATIONS = ('token', 'sequence', 'sequence_sum')


def aggregate(
    loss: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_sequences: int,
    mode: Aggregation = 'token',
    normalizer: float | Tensor = 1.0,
) -> Tensor:
    """This micro-batch's share of a loss.

        'token'         Σ_t loss / normalizer                  normalizer: tokens that count
        'sequence'      Σ_b mean_{t in b} loss / normalizer    normalizer: sequences
        'sequence_sum'  Σ_b Σ_{t in b} loss / normalizer       normalizer: sequences × a constant length

    Sources: 'token' is PPO's and DAPO's (Yu et al. 2025, section 3.3), 'sequence' GRPO's (Shao et al. 2024, equation
    3), 'sequence_sum' Dr. GRPO's (Liu et al. 2025, section 3).

    Args:
        loss: (N,) per token.
        mask: (N,) bool, True = counts.
        rows: (N,) int64, the sequence of each token.
        num_sequences: B of this micro-batch.
        normalizer: over the whole train batch, all ranks and micro-batches; `aggregation_count` gives a part's share of
            it.

    Returns:
        scalar; 0 where nothing counts. A sequence without tokens that count adds 0.
    """
    _check_mode(mode)
    if not isinstance(normalizer, Tensor) and not normalizer > 0:
        raise ValueError(f'normalizer={normalizer!r} must be positive: no token of the train batch counts')
    if mode == 'sequence':
        return segment_mean(loss, rows, num_sequences, mask=mask).sum() / normalizer
    return masked_sum(loss, mask) / normalizer


def aggregation_count(
    mask: Tensor, rows: Tensor, num_sequences: int, mode: Aggregation = 'token', constant_length: int | None = None
) -> int:
    """What a part of the train batch adds to `aggregate`'s normalizer: tokens, sequences, or sequences ×
    `constant_length`.

    Only tokens whose mask is True, and sequences with at least one of them, are counted.
    """
    _check_mode(mode)
    if mode == 'token':
        return int(mask.sum())
    sequences = int((segment_count(rows, num_sequences, mask=mask) > 0).sum())
    if mode == 'sequence':
        return sequences
    if constant_length is None or constant_length < 1:
        raise ValueError(
            f"mode 'sequence_sum' divides by a constant length of at least 1; got {constant_length!r}, give "
            'max_new_tokens'
        )
    return sequences * constant_length


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """max(−A ρ, −A clip(ρ, 1 − eps_low, 1 + eps_high)) with ρ = π / π_old = exp(logprobs − old_logprobs).

    Sources: Schulman et al. 2017, equation 7 (with the sign of a loss); eps_high ≠ eps_low is DAPO's clip-higher, Yu et
    al. 2025, section 3.1. With `dual_clip` c the loss of a negative advantage is at most −c A (Ye et al. 2020,
    "Mastering complex control in MOBA games with deep reinforcement learning").

    Args:
        logprobs: (N,) or any shape, of the policy that learns.
        old_logprobs: same shape, of the policy that collected; constants.
        advantages: same shape; constants.
        eps_high: None means eps_low.
        dual_clip: c > 1, or None.

    Returns:
        same shape. For one ratio per sequence see `gspo_policy_loss`.
    """
    return _clipped_surrogate(logprobs - old_logprobs, advantages, eps_low, eps_high, dual_clip)


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_sequences: int,
    *,
    eps_low: float = 3e-4,
    eps_high: float | None = 4e-4,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped loss with one ratio per sequence, s = exp(mean_t (logprobs − old_logprobs)), on each of its tokens.

    Source: GSPO, Zheng et al. 2025, "Group sequence policy optimization", equations 5 and 7; the paper's clip range is
    the default. Its objective is `aggregate` in mode 'sequence', with a sequence's advantage on all its tokens
    (`advantages.spread`).

    Args:
        logprobs, old_logprobs, advantages: (N,).
        mask: (N,) bool; only tokens that count enter the ratio.
        rows: (N,) int64, the sequence of each token.
        num_sequences: B.

    Returns:
        (N,).
    """
    log_ratio = sequence_log_ratio(logprobs, old_logprobs, mask, rows, num_sequences)
    return _clipped_surrogate(log_ratio, advantages, eps_low, eps_high, dual_clip)


def cispo_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, eps_high: float = 0.2) -> Tensor:
    """−A · sg(min(ρ, 1 + eps_high)) · log π with ρ = π / π_old: the weight is clipped, not the update, so every token
    keeps a gradient.

    Source: CISPO, MiniMax-M1, arXiv 2506.13585, section 3.1, equations 4 and 5. The paper's weight may have a lower
    bound as well, which its runs left out; so does this. Its objective is `aggregate` in mode 'token'.

    Args:
        logprobs: (N,) or any shape, of the policy that learns.
        old_logprobs: same shape, of the policy that collected; constants.
        advantages: same shape; constants.

    Returns:
        same shape.
    """
    if not eps_high >= 0:
        raise ValueError(f'eps_high={eps_high!r} must not be negative')
    return -advantages * _ratio(logprobs.detach() - old_logprobs).clamp_max(1 + eps_high) * logprobs


def sequence_log_ratio(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, rows: Tensor, num_sequences: int
) -> Tensor:
    """mean over a sequence's tokens of logprobs − old_logprobs, on each of its tokens: (N,). See `gspo_policy_loss`."""
    return segment_mean(logprobs - old_logprobs, rows, num_sequences, mask=mask)[rows]


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None) -> Tensor:
    """½ max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²); with clip=None ½ (V − R)².

    Source: OpenAI baselines' PPO; "The 37 implementation details of PPO", detail 9, and Ziegler et al.'s code for
    language models.

    Args:
        values: (N,) or any shape.
        old_values: same shape, when the experience was made; constants.
        returns: same shape; constants.
        clip: ε > 0, or None.
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error
    if not clip > 0:
        raise ValueError(f'value clip {clip!r} must be positive; None switches clipping off')
    near = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    return 0.5 * torch.maximum(error, (near - returns).square())


def next_token_loss(logprobs: Tensor) -> Tensor:
    """−log π(token): cross-entropy of given tokens, from their log-probs. Same shape."""
    return -logprobs


def pairwise_log_sigmoid_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float | None = None) -> Tensor:
    """−log σ(chosen − rejected − margin), per pair.

    Sources: Stiennon et al. 2020, section 3.4; Ouyang et al. 2022, equation 1 (Bradley-Terry); the margin is Llama 2's,
    Touvron et al. 2023, equation 2.

    Args:
        chosen, rejected: (B,) scores.
        margin: (B,) or a number, how much better the chosen one should be.
    """
    difference = chosen - rejected
    return -F.logsigmoid(difference if margin is None else difference - margin)


def pairwise_log_exp_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """log(1 + exp(rejected − chosen)), per pair: the log-exp form of the pairwise loss, equal to the log-sigmoid one.

    Source: Askell et al. 2021, "A general language assistant as a laboratory for alignment". Computed as logaddexp,
    which neither overflows nor rounds a large difference.
    """
    difference = rejected - chosen
    return torch.logaddexp(torch.zeros_like(difference), difference)


class RankedPairs(NamedTuple):
    better: Tensor
    """(P,) int64 positions"""
    worse: Tensor
    """(P,) int64 positions"""
    weights: Tensor
    """(P,) fp32, 1 / (pairs of the group): the weights of a prompt sum to 1"""


def ranked_pairs(groups: Tensor, ranks: Tensor) -> RankedPairs:
    """All pairs of answers to one prompt that differ in rank: C(K, 2) of K answers without ties.

    With s = scores, Σ weights · pairwise loss(s[better], s[worse]) / prompts is Ouyang et al. 2022, equation 1. All
    pairs of a prompt belong into one batch, or answers are seen several times per epoch and the model overfits (section
    3.5 there).

    Args:
        groups: (M,) int64, equal for answers to one prompt.
        ranks: (M,) lower is better; equal ranks make no pair.
    """
    better, worse = ((groups[:, None] == groups[None, :]) & (ranks[:, None] < ranks[None, :])).nonzero(as_tuple=True)
    _, index, counts = groups[better].unique(return_inverse=True, return_counts=True)
    return RankedPairs(better, worse, 1.0 / counts[index].to(torch.float32))


def importance_weighted(estimate: Tensor, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ρ · estimate with ρ = exp(logprobs − old_logprobs), per token; the gradient goes through both.

    KL estimators assume tokens drawn from the policy being trained; these came from π_old. The weight ρ removes that
    bias, and makes the gradient of ρ · k3 the gradient of the KL, which that of k3 alone is not. Source: DeepSeek-V3.2,
    arXiv 2512.02556, section 3.1, "Unbiased KL estimate"; TRL's `use_bias_correction_kl`.

    Args:
        estimate: (N,) or any shape, as `kl_penalty` gives it.
        logprobs: same shape, of the policy that learns.
        old_logprobs: same shape, of the policy that collected; constants.
    """
    return _ratio(logprobs - old_logprobs) * estimate


def truncated_importance_weights(logprobs: Tensor, behaviour_logprobs: Tensor, cap: float = 2.0) -> Tensor:
    """min(exp(logprobs − behaviour_logprobs), cap), a constant weight per token.

    For engines whose log-probs differ from the trainer's: `logprobs` are the trainer's for the very weights that
    generated (the old ones), `behaviour_logprobs` the engine's. Multiply the policy loss by it. Sources: Ionides 2008,
    "Truncated importance sampling"; for language models Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training".
    """
    if not cap > 0:
        raise ValueError(f'cap={cap!r} must be positive')
    return _ratio(logprobs - behaviour_logprobs).clamp_max(cap).detach()


class PolicyStats(NamedTuple):
    """Sums over the tokens that count, so that micro-batches and ranks add up; divide by `num_tokens`. fp64 scalars
    without gradient."""

    num_tokens: Tensor
    approx_kl: Tensor
    """k1 of KL(π_old || π): Σ −log ρ"""
    approx_kl_k3: Tensor
    """k3: Σ (ρ − 1) − log ρ"""
    clipped: Tensor
    """tokens whose ratio lies outside the clip range"""
    ratio: Tensor
    ratio_min: Tensor
    """+inf where nothing counts"""
    ratio_max: Tensor
    """−inf where nothing counts"""


@torch.no_grad()
def policy_stats(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, eps_low: float = 0.2, eps_high: float | None = None
) -> PolicyStats:
    """How far the policy has moved from the one that collected; ρ = exp(logprobs − old_logprobs), all (N,).

    Sources: "The 37 implementation details of PPO", detail 12 (clip fraction: |ρ − 1| beyond the range, approximate
    KL); Schulman 2020 for k1, k3.
    """
    new, old = logprobs.double(), old_logprobs.double()
    ratio = _ratio(new - old)
    high = eps_low if eps_high is None else eps_high
    outside = (ratio < 1 - eps_low) | (ratio > 1 + high)
    return PolicyStats(
        num_tokens=mask.sum().double(),
        approx_kl=masked_sum(old - new, mask),
        approx_kl_k3=masked_sum(kl_penalty(old, new, 'k3'), mask),
        clipped=(outside & mask).sum().double(),
        ratio=masked_sum(ratio, mask),
        ratio_min=torch.cat(
            [ratio.masked_fill(~mask, float('inf')).flatten(), ratio.new_full((1,), float('inf'))]
        ).min(),
        ratio_max=torch.cat(
            [ratio.masked_fill(~mask, -float('inf')).flatten(), ratio.new_full((1,), -float('inf'))]
        ).max(),
    )


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 − Var(R − V) / Var(R) over the tokens that count: 1 is perfect, 0 no better than a constant; 0 where R does not
    vary."""
    total = masked_var(returns.double(), mask, unbiased=False)
    rest = masked_var(returns.double() - values.double(), mask, unbiased=False)
    safe = torch.where(total > 0, total, torch.ones_like(total))
    return torch.where(total > 0, 1.0 - rest / safe, torch.zeros_like(total))


def sequence_logprobs(
    logprobs: Tensor, mask: Tensor, rows: Tensor, num_sequences: int, *, average: bool = False
) -> Tensor:
    """log π(response | prompt) of each sequence, (B,): the sum over its tokens that count, or their mean with
    `average`."""
    fold = segment_mean if average else segment_sum
    return fold(logprobs, rows, num_sequences, mask=mask)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float | None, dual_clip: float | None
) -> Tensor:
    high = eps_low if eps_high is None else eps_high
    if not 0 <= eps_low < 1 or not high >= 0:
        raise ValueError(
            f'clip range eps_low={eps_low!r}, eps_high={high!r} is not allowed; 0 <= eps_low < 1 and eps_high >= 0'
        )
    ratio = _ratio(log_ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - eps_low, 1 + high))
    if dual_clip is None:
        return loss
    if not dual_clip > 1:
        raise ValueError(f'dual_clip={dual_clip!r} must be greater than 1; None switches it off')
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def _check_mode(mode: str) -> None:
    if mode not in _AGGREGATIONS:
        raise ValueError(f'aggregation mode {mode!r} is not known; choose one of {list(_AGGREGATIONS)}')
