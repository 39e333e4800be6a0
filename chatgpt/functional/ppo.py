"""Formulas of PPO: token rewards and GAE, clipped losses and their aggregation, KL estimators and coefficients, and
statistics of the policy and the values.

Advantages: lists of one 1-D tensor per sequence, each of its own length A. Only elementwise operations act across
sequences, so a sequence's results do not depend on the others in the list, to the bit. A token with mask False (tool
output inside a response) is not a step: the successor of a token is the next one that counts. Rewards and values at
such tokens are never read; advantages and returns there are 0.

Losses: unreduced, one number per token, (N,). `aggregate` divides their sum by a *global* count, which gives this
micro-batch's share of the loss of a whole train batch.

KL: tokens are sampled from the policy q, and the result estimates KL(q || p) = E_q[log q − log p] to the reference p.
With r = p / q, log r = ref_logprobs − logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from chatgpt.functional.choices import Aggregation, KLKind
from chatgpt.functional.masking import masked_sum, masked_var, segment_count, segment_mean

Lists = Sequence[Tensor]


MAX_LOG_RATIO = 20.0
"""log-ratios are clamped to this before exp: far outside any clip range, and an infinite ratio makes a masked gradient
NaN"""


# ------------------------------------------------------------------ rewards and advantages


def token_rewards(
    kl: Tensor, beta: float, score: float | Tensor, mask: Tensor, *, token_scores: Tensor | None = None
) -> Tensor:
    """reward[t] = −beta · kl[t] (+ token_scores[t]); the score is added at the last token that counts.

    Source: Ziegler et al. 2019, equation 2 (the score minus β log(π / ρ)), per token as in Stiennon et al. 2020 and
    "The N implementation details of RLHF with PPO". All (A,); the mask is bool, True = counts.

    Returns:
        (A,) of kl's dtype, 0 where the mask is False.
    """
    check_lists('mask', [kl], [mask])
    rewards = -beta * kl
    if token_scores is not None:
        check_lists('token_scores', [kl], [token_scores])
        rewards = rewards + token_scores.to(rewards)
    rewards = torch.where(mask, rewards, torch.zeros_like(rewards))
    counted = mask.nonzero()
    if len(counted):
        rewards[counted[-1, 0]] += score
    return rewards


def gae(
    rewards: Lists,
    values: Lists,
    masks: Lists,
    *,
    gamma: float = 1.0,
    lam: float | Sequence[float] = 0.95,
    value_lam: float | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalised advantage estimation.

        δ[t] = r[t] + γ V[t+1] − V[t],   A[t] = δ[t] + γ λ A[t+1],   R[t] = A[t] + V[t]

    V and A after the last token that counts are 0. Source: Schulman et al. 2016, equation 16; returns as in
    "The 37 implementation details of PPO", detail 5.

    With `value_lam` the returns, the targets of the critic, use that λ, and the advantages `lam`: a λ of 1 gives the
    critic unbiased targets, while a smaller one gives the policy a lower variance. Source: VC-PPO, Yuan et al. 2025,
    arXiv 2503.01491, "Decoupled-GAE".

    Args:
        rewards, values, masks: per sequence (A,); values of the state before each token; bool, True = counts.
        lam: λ, one for all or one per sequence (`length_lam`).
        value_lam: λ of the returns; None for `lam`.

    Returns:
        advantages and returns, per sequence (A,).
    """
    check_lists('values', rewards, values)
    check_lists('masks', rewards, masks)
    if not rewards:
        return [], []
    r, v, m = (pad_sequence(list(each)) for each in (rewards, values, masks))  # (longest A, B): a step is one row
    advantages = _discounted_deltas(r, v, m, gamma, lam)
    targets = advantages if value_lam is None else _discounted_deltas(r, v, m, gamma, value_lam)
    returns = torch.where(m, targets + v, torch.zeros_like(v))

    def cut(padded: Tensor) -> list[Tensor]:
        return [padded[: len(x), i].clone() for i, x in enumerate(rewards)]

    return cut(advantages), cut(returns)


def _discounted_deltas(r: Tensor, v: Tensor, m: Tensor, gamma: float, lam: float | Sequence[float]) -> Tensor:
    """Returns A[t] = δ[t] + γ λ A[t+1] from rewards, values and mask of shape (longest A, B)."""
    if not isinstance(lam, (int, float)) and len(lam) != r.shape[1]:
        raise ValueError(f'lam has {len(lam)} numbers for {r.shape[1]} sequences')
    decay = gamma * lam if isinstance(lam, (int, float)) else r.new_tensor([gamma * each for each in lam])
    advantages = torch.zeros_like(r)
    next_value, next_advantage = torch.zeros_like(r[0]), torch.zeros_like(r[0])
    for t in reversed(range(len(r))):
        delta = r[t] + gamma * next_value - v[t]
        advantage = delta + decay * next_advantage
        advantages[t] = torch.where(m[t], advantage, advantages[t])
        next_value = torch.where(m[t], v[t], next_value)
        next_advantage = torch.where(m[t], advantage, next_advantage)
    return advantages


def check_lists(name: str, reference: Lists, given: Lists) -> None:
    """Raises ValueError if the lists differ in length or in a shape, or a mask is not bool."""
    if len(reference) != len(given):
        raise ValueError(f'{name} has {len(given)} sequences, {len(reference)} were expected')
    for i, (a, b) in enumerate(zip(reference, given, strict=True)):
        if a.dim() != 1 or a.shape != b.shape:
            raise ValueError(f'{name}[{i}] must be 1-D with shape {tuple(a.shape)}; got {tuple(b.shape)}')
        if 'mask' in name and b.dtype != torch.bool:
            raise ValueError(f'{name}[{i}] must be bool, True = counts; got {b.dtype}')


# ------------------------------------------------------------------ losses


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
        logprobs: (N,) or any shape, of the current policy.
        old_logprobs, advantages: same shape, constants; `old_logprobs` of the policy that collected.
        eps_high: None means eps_low.
        dual_clip: c > 1, or None.
    """
    return clipped_surrogate(logprobs - old_logprobs, advantages, eps_low, eps_high, dual_clip)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float | None, dual_clip: float | None
) -> Tensor:
    high = eps_low if eps_high is None else eps_high
    if not 0 <= eps_low < 1 or not high >= 0:
        raise ValueError(
            f'clip range eps_low={eps_low!r}, eps_high={high!r} is not allowed; 0 <= eps_low < 1 and eps_high >= 0'
        )
    ratio = ratio_of(log_ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - eps_low, 1 + high))
    if dual_clip is None:
        return loss
    if not dual_clip > 1:
        raise ValueError(f'dual_clip={dual_clip!r} must be greater than 1; None switches it off')
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def ratio_of(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None, *, delta: float | None = None
) -> Tensor:
    """max(h(V − R), h(clip(V, V_old − ε, V_old + ε) − R)); with clip=None h(V − R). h(e) is ½ e², or with `delta` δ
    Huber's: ½ e² where |e| ≤ δ, else δ (|e| − ½ δ).

    Source: OpenAI baselines' PPO; "The 37 implementation details of PPO", detail 9, and Ziegler et al.'s code for
    language models. Huber 1964, "Robust estimation of a location parameter".

    Args:
        values: (N,) or any shape.
        old_values, returns: same shape, constants; values from collecting.
        clip: ε > 0, or None.
        delta: δ > 0, or None for the square.
    """
    error = _error(values - returns, delta)
    if clip is None:
        return error
    if not clip > 0:
        raise ValueError(f'value clip {clip!r} must be positive; None switches clipping off')
    near = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    return torch.maximum(error, _error(near - returns, delta))


def _error(difference: Tensor, delta: float | None) -> Tensor:
    if delta is None:
        return 0.5 * difference.square()
    size = difference.abs()
    return torch.where(size <= delta, 0.5 * difference.square(), delta * (size - 0.5 * delta))


def aggregate(
    loss: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_sequences: int,
    mode: Aggregation = 'token',
    normalizer: float | Tensor = 1.0,
) -> Tensor:
    """Returns this micro-batch's share of a loss.

        'token'         Σ_t loss / normalizer                  normalizer: tokens that count
        'sequence'      Σ_b mean_{t in b} loss / normalizer    normalizer: sequences
        'sequence_sum'  Σ_b Σ_{t in b} loss / normalizer       normalizer: sequences × a constant length

    Sources: 'token' is PPO's and DAPO's (Yu et al. 2025, section 3.3), 'sequence' GRPO's (Shao et al. 2024, equation
    3), 'sequence_sum' Dr. GRPO's (Liu et al. 2025, section 3).

    Args:
        loss, mask, rows: (N,) per token: its loss, whether it counts, its sequence (int64).
        num_sequences: B of this micro-batch.
        normalizer: of the whole train batch, all ranks and micro-batches: a sum of `aggregation_count`.

    Returns:
        scalar; 0 if nothing counts. A sequence without tokens that count adds 0.
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
    """Returns the share of `aggregate`'s normalizer of a part of the train batch: tokens, sequences, or sequences ×
    `constant_length`. Only tokens with mask True, and sequences with at least one of them, are counted.
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


def _check_mode(mode: str) -> None:
    if mode not in get_args(Aggregation):
        raise ValueError(f'aggregation mode {mode!r} is not known; choose one of {list(get_args(Aggregation))}')


# ------------------------------------------------------------------ KL


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = 'k1') -> Tensor:
    """Estimates KL(policy || reference) from a token sampled from the policy, with log r = ref_logprobs − logprobs.

        k1 = −log r             unbiased; may be negative
        k2 = ½ (log r)²         biased, never negative
        k3 = (r − 1) − log r    unbiased, never negative; log r is clamped to MAX_LOG_RATIO
        abs = |log r|

    Source: Schulman 2020, "Approximating KL divergence"; TRL calls k2 'mse'. As a loss on tokens sampled from the
    policy, the expected gradient of k1 is 0 and that of k2 is the gradient of the KL; k3, the choice of GRPO (Shao et
    al. 2024, equation 4), agrees with it to first order in log r.

    Raises:
        ValueError: an unknown kind, or 'full', which needs all logits and is `losses.kl_full`.
    """
    if kind == 'full':
        raise ValueError("kl kind 'full' sums over the vocabulary and needs logits; call kl_full(logits, ref_logits)")
    if kind not in get_args(KLKind):
        raise ValueError(f'kl kind {kind!r} is not known; choose one of {list(get_args(KLKind))}')
    log_r = ref_logprobs - logprobs
    if kind == 'k1':
        return -log_r
    if kind == 'k2':
        return 0.5 * log_r.square()
    if kind == 'k3':
        log_r = log_r.clamp_max(MAX_LOG_RATIO)
        # expm1, because r − 1 cancels for r near 1.
        return torch.expm1(log_r) - log_r
    return log_r.abs()


class FixedKLController:
    """A constant KL coefficient."""

    kind = 'fixed'

    def __init__(self, coef: float) -> None:
        if coef < 0:
            raise ValueError(f'kl coefficient {coef!r} must not be negative')
        self.value = float(coef)

    def update(self, kl: float, num_samples: int) -> None:
        """Updates the coefficient after `num_samples` responses, of all ranks, with this mean KL per response."""

    def state_dict(self) -> dict[str, Any]:
        return {'kind': self.kind, 'value': self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: a constant coefficient is that of the settings, whatever the saved one was."""


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that keeps the KL near a target.

        value ← value · max(1 + clip(kl / target − 1, −0.2, 0.2) · num_samples / horizon, 0.1)

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.2, whose factor has no
    lower bound: with more than 5 horizons of samples it would be negative.

    Args:
        target: mean KL per response, in nats.
        horizon: in samples; the larger, the slower the coefficient moves.
    """

    kind = 'adaptive'

    def __init__(self, init_coef: float, target: float, horizon: float) -> None:
        for name, number in (('init_coef', init_coef), ('target', target), ('horizon', horizon)):
            if not number > 0:
                raise ValueError(f'{name}={number!r} of an adaptive KL controller must be positive')
        super().__init__(init_coef)
        self.init_coef, self.target, self.horizon = float(init_coef), float(target), float(horizon)

    def update(self, kl: float, num_samples: int) -> None:
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= max(1.0 + error * num_samples / self.horizon, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {'init_coef': self.init_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the saved value, unless it is of a constant or began with another coefficient."""
        if state.get('kind') == self.kind and state.get('init_coef', self.init_coef) == self.init_coef:
            self.value = float(state['value'])


# ------------------------------------------------------------------ statistics


class PolicyStats(NamedTuple):
    """Sums over the tokens that count, to divide by `num_tokens`: fp64 scalars without gradient."""

    num_tokens: Tensor
    approx_kl: Tensor
    """k1 of KL(π_old || π): Σ −log ρ"""
    approx_kl_k3: Tensor
    """k3: Σ (ρ − 1) − log ρ"""
    clipped: Tensor
    """tokens with a ratio outside the clip range"""
    ratio: Tensor
    ratio_min: Tensor
    """+inf if nothing counts"""
    ratio_max: Tensor
    """−inf if nothing counts"""


@torch.no_grad()
def policy_stats(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, eps_low: float = 0.2, eps_high: float | None = None
) -> PolicyStats:
    """Returns how far the policy is from the one that collected; ρ = exp(logprobs − old_logprobs), all (N,).

    Sources: "The 37 implementation details of PPO", detail 12 (clip fraction: |ρ − 1| beyond the range, approximate
    KL); Schulman 2020 for k1, k3.
    """
    new, old = logprobs.double(), old_logprobs.double()
    ratio = ratio_of(new - old)
    high = eps_low if eps_high is None else eps_high
    outside = (ratio < 1 - eps_low) | (ratio > 1 + high)
    return PolicyStats(
        num_tokens=mask.sum().double(),
        approx_kl=masked_sum(old - new, mask),
        approx_kl_k3=masked_sum(kl_penalty(old, new, 'k3'), mask),
        clipped=(outside & mask).sum().double(),
        ratio=masked_sum(ratio, mask),
        ratio_min=-_greatest(-ratio, mask),
        ratio_max=_greatest(ratio, mask),
    )


def _greatest(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the maximum over the tokens that count, −inf if nothing counts."""
    lowest = x.new_full((1,), -float('inf'))
    return torch.cat([x.masked_fill(~mask, -float('inf')).flatten(), lowest]).max()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 − Var(R − V) / Var(R) over the tokens that count: 1 is perfect, 0 no better than a constant; 0 if R is
    constant."""
    total = masked_var(returns.double(), mask, unbiased=False)
    return explained(total, masked_var(returns.double() - values.double(), mask, unbiased=False))


def explained(total: Tensor, rest: Tensor) -> Tensor:
    """1 − rest / total, from Var(R) and Var(R − V), or from both times the number of tokens; 0 where `total` is 0."""
    return torch.where(total > 0, 1.0 - rest / torch.where(total > 0, total, 1.0), 0.0)
