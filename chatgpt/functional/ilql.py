"""Implicit language Q-learning (ILQL): losses of Q heads, V head and policy, unreduced, (N,), and the logits to decode
with.

Sources: Snell et al. 2022, "Offline RL for natural language generation with implicit language Q learning", sections 4
and 5; for the expectile IQL, Kostrikov et al. 2021, equation 5; for the conservative term CQL, Kumar et al. 2020.

V is the value of the state before an action, Q the value of an action in a state. The full loss is

    Σ_heads td_loss + expectile_value_loss + cql_scale · Σ_heads cql_loss + awac_scale · awac_loss

with Q of the actions taken, target Qs from slowly moving copies of the heads, and rewards that are standardised over
the data set and placed on the last token that counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def next_values(values: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """Returns V before the successor of each action, the next action of its sequence that counts; 0 after the last one,
    and where the mask is False.

    Args:
        values: (N,) V of the state before each action.
        mask: (N,) bool, True = counts.
        rows: (N,) int64, the sequence of each action; a sequence's actions are contiguous and in order.

    Returns:
        (N,). Differentiable; `td_loss` takes it as a constant.
    """
    # The next counted position after each, or N. `nonzero` would make the host wait for the size of its result.
    num = len(mask)
    if num == 0:
        return torch.zeros_like(values)
    counted = torch.where(mask, torch.arange(num, device=mask.device), num)
    from_here = counted.flip(0).cummin(0).values.flip(0)
    after = torch.cat([from_here[1:], from_here.new_full((1,), num)])
    exists = mask & (after < num)
    after = after.clamp_max(num - 1)
    return torch.where(exists & (rows == rows[after]), values[after], torch.zeros_like(values))


def min_q(qs: Sequence[Tensor]) -> Tensor:
    """Returns the elementwise minimum over heads, against overestimation (clipped double Q, Fujimoto et al. 2018)."""
    if not qs:
        raise ValueError('min_q needs the values of at least one Q head')
    result = qs[0]
    for q in qs[1:]:
        result = torch.minimum(result, q)
    return result


def td_loss(q: Tensor, rewards: Tensor, successor_values: Tensor, *, gamma: float = 0.99) -> Tensor:
    """(Q(s, a) − (r + γ V(s')))², with the target as a constant.

    Args:
        q: (N,) of one head, for the actions taken.
        rewards: (N,).
        successor_values: (N,) from `next_values`.
    """
    return (q - (rewards + gamma * successor_values).detach()).square()


def expectile_value_loss(values: Tensor, target_q: Tensor, *, tau: float = 0.7) -> Tensor:
    """|τ − 1(u < 0)| u² with u = target Q − V.

    V becomes the τ-expectile of Q over the data's actions: the mean at τ = 0.5, near the maximum as τ → 1.

    Args:
        values: (N,).
        target_q: (N,) minimum of the target Q heads for the actions taken; a constant.
        tau: in (0, 1).
    """
    if not 0.0 < tau < 1.0:
        raise ValueError(f'tau={tau!r} must lie between 0 and 1')
    u = target_q.detach() - values
    weight = torch.where(u < 0, torch.full_like(u, 1.0 - tau), torch.full_like(u, tau))
    return weight * u.square()


def cql_loss(q_all: Tensor, ids: Tensor) -> Tensor:
    """log Σ_v exp Q(s, v) − Q(s, a): cross-entropy of the action taken under softmax(Q), which keeps Q of unseen tokens
    low.

    Equals `-logprobs.chunked_logprobs(hidden, q_head, ids)[0]`, which needs no (N, V) tensor.

    Args:
        q_all: (N, V) of one head.
        ids: (N,) int64.
    """
    wide = q_all.to(torch.promote_types(q_all.dtype, torch.float32))
    return wide.logsumexp(dim=-1) - wide.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def awac_loss(
    logprobs: Tensor, target_q: Tensor, values: Tensor, *, beta: float = 0.0, max_weight: float | None = None
) -> Tensor:
    """−exp(β (Q − V)) log π(a), with the weight as a constant: next-token loss, weighted by advantage (AWAC, Nair et
    al. 2020).

    Args:
        logprobs: (N,) of the policy for the actions taken.
        target_q: (N,) minimum of the target Q heads for the actions taken.
        values: (N,).
        beta: 0 gives plain next-token loss.
        max_weight: upper bound of the weight; None for no bound.
    """
    weight = torch.exp(beta * (target_q - values).detach())
    if max_weight is not None:
        weight = weight.clamp_max(max_weight)
    return -weight * logprobs


def ilql_logits(logits: Tensor, target_q: Tensor, values: Tensor, *, beta: float = 1.0) -> Tensor:
    """log softmax(logits) + β (min target Q − V): the logits that ILQL decodes from, before top-k and temperature.

    Args:
        logits: (..., V) of the policy.
        target_q: (..., V) minimum over the target Q heads.
        values: (...) V of the state.

    Returns:
        (..., V) fp32.
    """
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    return logp + beta * (target_q - values.unsqueeze(-1))
