"""Advantages of methods other than PPO: over the turns of an episode, from returns alone, and from the scores of
several responses to one prompt.

Lists and masks are as in `chatgpt.functional.ppo`. Group-relative estimators (`grpo`, `dr_grpo`, `rloo`, `gdpo`) return
one number per response, which `spread` copies to its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chatgpt.functional.masking import segment_count, segment_mean, segment_sum
from chatgpt.functional.ppo import Lists, check_lists, gae, token_rewards


def gae_over_turns(
    rewards: Lists,
    values: Lists,
    masks: Lists,
    turns: Lists,
    *,
    gamma: float = 1.0,
    lam: float | Sequence[float] = 0.95,
    value_lam: float | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalised advantage estimation with turns as steps; all tokens of a turn have the turn's advantage.

        δ_k = R_k + γ V(s_{k+1}) − V(s_k),   A_k = δ_k + γ λ A_{k+1},   G_k = A_k + V(s_k)
        A[t] = A_k,   R[t] = G_k − Σ_{u in turn k, u < t} r[u]          for each token t of turn k

    R_k is the sum of the turn's token rewards, the KL penalty included, and s_k the state before the turn's first
    token, after the observation that precedes it. V(s_k) is the only value of the turn that is read. γ and λ apply per
    turn; within a turn nothing is discounted. V and A after the last turn are 0. A turn without a token that counts is
    not a step.

    R[t] is the target of the critic: G_k at the turn's first token, and at each later one the part of G_k that is still
    to come, so that a value means the same at every token. If a turn's only reward is at its last token, all of its
    tokens have G_k.

    Sources: turns as steps, Turn-PPO, Li et al. 2025, arXiv 2512.17008, and ArCHer, Zhou et al. 2024, arXiv 2402.19446,
    with a critic of utterances; the upper level of VAGEN's bi-level GAE, Wang et al. 2025, arXiv 2510.16907. Targets on
    every token are AReaL's (`gae_timestep_unit: turn`), with G_k on all of them and the KL per token; VAGEN's code has
    targets at the ends of turns only.

    Args:
        rewards, values, masks: as in `gae`.
        turns: per sequence (A,) int64, the turn number of each token, not decreasing; read where the mask is True.
        lam, value_lam: as in `gae`.

    Returns:
        advantages and returns, per sequence (A,), 0 where the mask is False.
    """
    check_lists('values', rewards, values)
    check_lists('masks', rewards, masks)
    check_lists('turns', rewards, turns)
    rows = [_turn_rows(t[m]) for t, m in zip(turns, masks, strict=True)]
    # A sequence without tokens that count gets one turn that does not count either.
    totals = [segment_sum(r[m], row, _num_turns(row)) for r, m, row in zip(rewards, masks, rows, strict=True)]
    states = [v[m][_first(row)] if len(row) else v.new_zeros(1) for v, m, row in zip(values, masks, rows, strict=True)]
    counts = [torch.full_like(total, len(row) > 0, dtype=torch.bool) for total, row in zip(totals, rows, strict=True)]
    of_turns, targets = gae(totals, states, counts, gamma=gamma, lam=lam, value_lam=value_lam)
    advantages, returns = [], []
    for r, m, row, advantage, target in zip(rewards, masks, rows, of_turns, targets, strict=True):
        before = r[m].double().cumsum(0) - r[m]
        paid = before - before[_first(row)][row]
        advantages.append(torch.zeros_like(r).masked_scatter(m, advantage[row]))
        returns.append(torch.zeros_like(r).masked_scatter(m, (target[row] - paid).to(r.dtype)))
    return advantages, returns


def _turn_rows(numbers: Tensor) -> Tensor:
    """Renumbers turns, (N,) int64 and not decreasing, as 0, 1, ..."""
    if len(numbers) and bool((numbers.diff() < 0).any()):
        raise ValueError(f'turns must not fall from token to token; got {numbers.tolist()}')
    return numbers.unique_consecutive(return_inverse=True)[1]


def _num_turns(row: Tensor) -> int:
    return int(row[-1]) + 1 if len(row) else 1


def _first(row: Tensor) -> Tensor:
    """Returns the mask of the first token of each turn, (N,) bool."""
    return row.diff(prepend=row.new_full((1,), -1)) > 0


def length_lam(lengths: Sequence[int], alpha: float) -> list[float]:
    """Returns λ = max(0, 1 − 1 / (α l)) for sequences of l steps.

    The sum of the weights of the temporal differences, Σ λ^t ≈ 1 / (1 − λ) = α l, then grows with the length. Source:
    VAPO, Yue et al. 2025, arXiv 2504.05118, "Length-Adaptive GAE", for the policy's λ, with α = 0.05 for responses of
    thousands of tokens; the paper does not define λ for α l < 1.

    >>> length_lam([10, 100], 0.05)
    [0.0, 0.8]
    """
    return [max(1.0 - 1.0 / (alpha * length), 0.0) if length else 0.0 for length in lengths]


def monte_carlo_returns(rewards: Lists, masks: Lists, *, gamma: float = 1.0) -> list[Tensor]:
    """R[t] = r[t] + γ R[t+1] over the tokens that count, 0 after the last (Williams 1992; Sutton & Barto 2018, equation
    3.9)."""
    return gae(rewards, [torch.zeros_like(r) for r in rewards], masks, gamma=gamma, lam=1.0)[1]


def a2c(rewards: Lists, values: Lists, masks: Lists, *, gamma: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """A[t] = R[t] − V[t] with Monte-Carlo returns: advantage actor-critic.

    Source: Mnih et al. 2016, section 4 and algorithm S3. Equals `gae` with λ = 1. Returns advantages and returns.
    """
    check_lists('values', rewards, values)
    returns = monte_carlo_returns(rewards, masks, gamma=gamma)
    advantages = [
        torch.where(m, ret - v, torch.zeros_like(ret)) for ret, v, m in zip(returns, values, masks, strict=True)
    ]
    return advantages, returns


def grpo(scores: Tensor, groups: Tensor, *, eps: float = 1e-4) -> Tensor:
    """(score − group mean) / (group std + eps), one number per response.

    Source: DeepSeekMath, Shao et al. 2024, section 4.1.2 (outcome supervision). std is the unbiased one and eps 1e-4,
    as in TRL; the paper specifies neither. The only response of a group gets 0.

    Args:
        scores: (M,) floating point.
        groups: (M,) int64, equal for responses to one prompt, in any order.

    Returns:
        (M,) of scores' dtype.
    """
    centred, index, counts = _centred(scores, groups)
    squares = segment_sum(centred.square(), index, len(counts))
    std = (squares / (counts - 1).clamp_min(1)).sqrt()
    return (centred / (std[index] + eps)).to(scores.dtype)


def dr_grpo(scores: Tensor, groups: Tensor) -> Tensor:
    """score − group mean, (M,): GRPO without the division by the std.

    Source: "Understanding R1-Zero-like training", Liu et al. 2025, section 3. Its loss is not normalised by length
    either: `ppo.aggregate` with mode 'sequence_sum'. Arguments as in `grpo`.
    """
    return _centred(scores, groups)[0].to(scores.dtype)


def rloo(scores: Tensor, groups: Tensor) -> Tensor:
    """score − mean of the other scores in the group, (M,).

    Source: REINFORCE leave-one-out, Kool et al. 2019; for language models section 2 of "Back to Basics", Ahmadian et
    al. 2024. The paper's score is already KL-penalised: pass score − β · (sum of kl over the response). Arguments as in
    `grpo`.

    Raises:
        ValueError: a group with one response.
    """
    _, index, counts = _centred(scores, groups)
    wide = scores.double()
    if len(counts) and int(counts.min()) < 2:
        alone = int(groups[counts[index] == 1][0])
        raise ValueError(
            f'rloo: group {alone} has one response; leave-one-out needs num_samples_per_prompt of 2 or more'
        )
    total = segment_sum(wide, index, len(counts))
    others = (total[index] - wide) / (counts[index] - 1)
    return (wide - others).to(scores.dtype)


def gdpo(scores: Tensor, weights: Tensor, groups: Tensor, *, eps: float = 1e-4) -> Tensor:
    """Σ_k w_k (score_k − group mean) / (group std + eps), one number per response: rewards are normalised separately,
    then added.

    If the sum were normalised, the reward with the largest variance would dominate, and different combinations of
    rewards with equal sums would get equal advantages. Source: GDPO, Liu et al. 2026, "Group reward-Decoupled
    Normalization Policy Optimization", arXiv 2601.05242, section 3.1; its last step is `normalised`. std and eps as in
    `grpo`. The only response of a group gets 0.

    Args:
        scores: (M, K) floating point, of K rewards.
        weights: (K,).
        groups: (M,) int64, equal for responses to one prompt, in any order.

    Returns:
        (M,) of scores' dtype.
    """
    if scores.dim() != 2 or weights.shape != scores.shape[1:]:
        raise ValueError(
            f'scores must be (M, K) and weights (K,); got {tuple(scores.shape)} and {tuple(weights.shape)}'
        )
    parts = [
        weight * grpo(column, groups, eps=eps)
        for weight, column in zip(weights.double(), scores.double().T, strict=True)
    ]
    return torch.stack(parts).sum(0).to(scores.dtype)


def normalised(per_sequence: Tensor, *, eps: float = 1e-4) -> Tensor:
    """(x − mean) / (std + eps) over all responses, (M,): GDPO's last step (arXiv 2601.05242, section 3.1).

    The size of the advantages then does not depend on the number of rewards. std is the unbiased one; a single response
    gets 0.
    """
    wide = per_sequence.double()
    if len(wide) < 2:
        return torch.zeros_like(per_sequence)
    return ((wide - wide.mean()) / (wide.std() + eps)).to(per_sequence.dtype)


def spread(per_sequence: Tensor, masks: Lists) -> list[Tensor]:
    """Copies one number per response to its tokens: (M,) → per sequence (A,), 0 where the mask is False."""
    if len(per_sequence) != len(masks):
        raise ValueError(f'one number per sequence is needed; got {len(per_sequence)} for {len(masks)} masks')
    return [torch.where(m, number, torch.zeros_like(number)) for number, m in zip(per_sequence, masks, strict=True)]


def reinforce_pp(rewards: Lists, masks: Lists, *, gamma: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """REINFORCE++: advantages are the discounted returns of the KL-penalised token rewards; the caller whitens them
    over all tokens of the phase.

    Source: Hu 2025, "REINFORCE++", arXiv 2501.03262. No critic and no groups.

    Args:
        rewards: per sequence (A,), from `token_rewards`.
        masks: per sequence (A,) bool.

    Returns:
        advantages and returns, per sequence (A,).
    """
    returns = monte_carlo_returns(rewards, masks, gamma=gamma)
    return [r.clone() for r in returns], returns


def reinforce_pp_baseline(
    scores: Tensor, groups: Tensor, masks: Lists, *, gamma: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """REINFORCE++ with a baseline: subtracts the group mean from the score, then continues as `reinforce_pp`.

    Whitening uses the std of all tokens of the phase, not of the group. Source: Hu 2025, arXiv 2501.03262, the variant
    for several responses per prompt; there the KL is a separate loss, here it may also be in the score.

    Args:
        scores: (M,) one per response.
        groups: (M,) int64.
        masks: per sequence (A,) bool.

    Returns:
        advantages and returns, per sequence (A,).
    """
    centred = dr_grpo(scores, groups)
    if len(centred) != len(masks):
        raise ValueError(f'one score per sequence is needed; got {len(centred)} for {len(masks)} masks')
    no_kl = [centred.new_zeros(len(m)) for m in masks]
    rewards = [token_rewards(kl, 0.0, c, m) for kl, c, m in zip(no_kl, centred, masks, strict=True)]
    return reinforce_pp(rewards, masks, gamma=gamma)


def _centred(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns fp64 scores minus their group's mean, the group index of each (0, 1, ...), and the size of each group."""
    if scores.dim() != 1 or scores.shape != groups.shape:
        raise ValueError(
            f'scores and groups must be 1-D and of one length; got {tuple(scores.shape)} and {tuple(groups.shape)}'
        )
    wide = scores.double()
    index = groups.unique(return_inverse=True)[1]
    num_groups = int(index.max()) + 1 if len(index) else 0
    mean = segment_mean(wide, index, num_groups)
    return wide - mean[index], index, segment_count(index, num_groups)
