"""Losses of policy methods other than PPO and of reward models, importance weights, and the log-prob of a sequence.

Losses are unreduced: one number per token (N,) or per sequence (B,); see `chatgpt.functional.ppo.aggregate`.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from chatgpt.functional.choices import OffPolicy
from chatgpt.functional.masking import segment_mean, segment_sum
from chatgpt.functional.ppo import clipped_surrogate, ratio_of


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

    Source: GSPO, Zheng et al. 2025, "Group sequence policy optimization", equations 5 and 7; the default clip range is
    the paper's. Its objective is `aggregate` in mode 'sequence', with a sequence's advantage on all its tokens
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
    return clipped_surrogate(log_ratio, advantages, eps_low, eps_high, dual_clip)


def gspo_token_policy_loss(
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
    """`gspo_policy_loss` with the ratio sg(s) · π / sg(π) of each token: the value of the sequence's ratio s, and the
    gradient of the token's own log-prob alone, so advantages may differ within a response.

    Source: GSPO-token, Zheng et al. 2025, section 4.3. With one advantage per sequence the mean over its tokens
    has the gradient of `gspo_policy_loss`. Arguments and result are the same.
    """
    log_ratio = sequence_log_ratio(logprobs.detach(), old_logprobs, mask, rows, num_sequences)
    return clipped_surrogate(log_ratio + logprobs - logprobs.detach(), advantages, eps_low, eps_high, dual_clip)


def cispo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, eps_high: float = 0.2, eps_low: float = 1.0
) -> Tensor:
    """−A · sg(clip(ρ, 1 − eps_low, 1 + eps_high)) · log π with ρ = π / π_old: the weight is clipped, not the update, so
    every token keeps a gradient.

    Source: CISPO, MiniMax-M1, arXiv 2506.13585, section 3.1, equations 4 and 5; its runs have no lower bound. Its
    objective is `aggregate` in mode 'token'.

    Args:
        logprobs: (N,) or any shape, of the current policy.
        old_logprobs: same shape, of the policy that collected; constants.
        advantages: same shape; constants.
        eps_low: in [0, 1]; 1 is without a lower bound.

    Returns:
        same shape.
    """
    if not eps_high >= 0 or not 0 <= eps_low <= 1:
        raise ValueError(f'eps_high={eps_high!r} must not be negative, and eps_low={eps_low!r} must be in [0, 1]')
    return -advantages * ratio_of(logprobs.detach() - old_logprobs).clamp(1 - eps_low, 1 + eps_high) * logprobs


def sequence_log_ratio(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, rows: Tensor, num_sequences: int
) -> Tensor:
    """Returns the mean of logprobs − old_logprobs of each sequence, on each of its tokens: (N,). See
    `gspo_policy_loss`."""
    return segment_mean(logprobs - old_logprobs, rows, num_sequences, mask=mask)[rows]


def next_token_loss(logprobs: Tensor) -> Tensor:
    """−log π(token): cross-entropy of given tokens, from their log-probs. Same shape."""
    return -logprobs


def positive_example_loss(logprobs: Tensor, correct: Tensor) -> Tensor:
    """−log π(token) of the tokens of correct responses, 0 of others.

    Source: VAPO, Yue et al. 2025, arXiv 2504.05118, section 4.3, "Positive Example LM Loss". Its objective is the sum
    over the tokens of correct responses in a train batch, divided by their number.

    Args:
        logprobs: (N,), of the current policy.
        correct: (N,) bool, True at the tokens of correct responses.

    Returns:
        (N,).
    """
    return torch.where(correct, next_token_loss(logprobs), 0.0)


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


def right_order(margin: Tensor, mask: Tensor) -> Tensor:
    """Returns the number of pairs with a positive margin. Those with a margin of 0 count 1/2.

    Args:
        margin: (B,) the score that should be higher, minus the other.
        mask: (B,) True for pairs, False for padding.
    """
    return ((margin.sign() + 1) / 2 * mask).sum()


def pairwise_log_exp_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """log(1 + exp(rejected − chosen)), per pair: the log-exp form of the pairwise loss, equal to the log-sigmoid one.

    Source: Askell et al. 2021, "A general language assistant as a laboratory for alignment". Computed as logaddexp,
    which does not overflow.
    """
    difference = rejected - chosen
    return torch.logaddexp(torch.zeros_like(difference), difference)


class RankedPairs(NamedTuple):
    better: Tensor
    """(P,) int64 positions"""
    worse: Tensor
    """(P,) int64 positions"""
    weights: Tensor
    """(P,) fp32, 1 / (pairs of the group), so that the weights of a prompt sum to 1"""


def ranked_pairs(groups: Tensor, ranks: Tensor) -> RankedPairs:
    """Returns all pairs of responses to one prompt that differ in rank: C(K, 2) for K responses without ties.

    With s = scores, Σ weights · pairwise loss(s[better], s[worse]) / prompts is Ouyang et al. 2022, equation 1. All
    pairs of a prompt belong in one batch: otherwise the model sees responses several times per epoch and overfits
    (section 3.5 there).

    Args:
        groups: (M,) int64, equal for responses to one prompt.
        ranks: (M,) lower is better; equal ranks make no pair.
    """
    better, worse = ((groups[:, None] == groups[None, :]) & (ranks[:, None] < ranks[None, :])).nonzero(as_tuple=True)
    _, index, counts = groups[better].unique(return_inverse=True, return_counts=True)
    return RankedPairs(better, worse, 1.0 / counts[index].to(torch.float32))


def importance_weighted(estimate: Tensor, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """ρ · estimate with ρ = exp(logprobs − old_logprobs), per token; both factors have a gradient.

    KL estimators assume tokens sampled from the current policy, but these are from π_old. The weight ρ removes that
    bias. The expected gradient of ρ · k3 is the gradient of the KL, which that of k3 alone is not. Source:
    DeepSeek-V3.2, arXiv 2512.02556, section 3.1, "Unbiased KL estimate"; TRL's `use_bias_correction_kl`.

    Args:
        estimate: (N,) or any shape, from `kl_penalty`.
        logprobs: same shape, of the current policy.
        old_logprobs: same shape, of the policy that collected; constants.
    """
    return ratio_of(logprobs - old_logprobs) * estimate


def importance_weights(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_sequences: int,
    correction: OffPolicy = 'token_truncate',
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Weights w = exp(logprobs − behaviour_logprobs) of the policy loss, without gradient, bounded to [low, high].

        'token_...'      w of each token: a lower variance, biased, since the tokens before it are not weighted
        'sequence_...'   the product of w over the tokens of the response that count, on each of them
        '..._truncate'   clip(w, low, high)
        '..._mask'       w where low <= w <= high, else 0, so that the token or response teaches nothing

    With the proximal policy's log-probs, recomputed at the start of a phase, and those of the engine that generated,
    the product with `clipped_policy_loss` is decoupled PPO: Hilton et al. 2021, "Batch size-invariance for policy
    optimization"; AReaL, Fu et al. 2025, arXiv 2505.24298. Token masks with both bounds are IcePop's, arXiv 2510.18855;
    sequence masks with an upper one MIS, Liu, Li et al. 2025, "When speed kills stability"; 'token_truncate' with
    low=0 is for engines that compute other log-probs than the trainer from the same weights: Ionides 2008, "Truncated
    importance sampling"; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".

    Args:
        logprobs, behaviour_logprobs: (N,).
        mask: (N,) bool; only tokens that count enter a product.
        rows: (N,) int64, the sequence of each token.
        num_sequences: B.
        low, high: 0 <= low < high.

    Returns:
        (N,).
    """
    if correction not in get_args(OffPolicy):
        raise ValueError(f'correction {correction!r} is not known; choose one of {list(get_args(OffPolicy))}')
    if not 0 <= low < high:
        raise ValueError(f'low={low!r}, high={high!r} are not allowed; 0 <= low < high')
    log_ratio = (logprobs - behaviour_logprobs).detach()
    if correction.startswith('sequence'):
        log_ratio = segment_sum(log_ratio, rows, num_sequences, mask=mask)[rows]
    weights = ratio_of(log_ratio)
    if correction.endswith('truncate'):
        return weights.clamp(low, high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def sequence_logprobs(
    logprobs: Tensor, mask: Tensor, rows: Tensor, num_sequences: int, *, average: bool = False
) -> Tensor:
    """Returns log π(response | prompt) of each sequence, (B,): the sum over its tokens that count, or with `average`
    their mean."""
    fold = segment_mean if average else segment_sum
    return fold(logprobs, rows, num_sequences, mask=mask)


def kl_full(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Σ_v q(v) (log q(v) − log p(v)): the exact KL(policy || reference) at each token.

    Args:
        logits: (..., V) of the policy, already divided by the temperature, any float dtype.
        ref_logits: (..., V) of the reference, likewise.

    Returns:
        (...) fp32 (fp64 for fp64 logits). Logits of −inf of the policy add 0; those of the reference alone are treated
        as the lowest finite log-prob.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    lowest = torch.finfo(dtype).min
    logq = torch.log_softmax(logits.to(dtype), dim=-1)
    logp = torch.log_softmax(ref_logits.to(dtype), dim=-1)
    return (logq.exp() * (logq.clamp_min(lowest) - logp.clamp_min(lowest))).sum(dim=-1)
