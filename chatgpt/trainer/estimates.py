"""Functions of the tables in `algorithms`: advantage estimators and policy losses. They lay out the inputs of the
formulas in `chatgpt.functional`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from chatgpt.functional import advantages as estimators
from chatgpt.functional import ppo as maths
from chatgpt.functional.losses import cispo_policy_loss, gspo_policy_loss, gspo_token_policy_loss
from chatgpt.functional.masking import joined_moments, moments, whiten
from chatgpt.nn.records import is_here, numbers
from chatgpt.nn.sweep import Communicator
from chatgpt.trainer.algorithms import Estimates, PolicyInputs, clip_high
from chatgpt.trainer.config import PPOConfig
from chatgpt.types import Experience

# ------------------------------------------------------------------ advantages


def whiten_tokens(experiences: list[Experience], strategy: Communicator | None = None) -> list[Experience]:
    """Returns copies with advantages of mean 0 and variance 1 over all tokens that count in the whole list. A
    collective; without a strategy this rank has all records."""
    over = joined_moments(numbers(experiences, lambda e: moments(e.advantages, e.response_mask), 3, strategy))
    return [
        replace(e, advantages=whiten(e.advantages, e.response_mask, over=over)) if is_here(e) else e
        for e in experiences
    ]


def whiten_responses(experiences: list[Experience], strategy: Communicator | None = None) -> list[Experience]:
    """Returns copies with advantages, one number per response, whitened over responses that have a token that counts.
    A collective; without a strategy this rank has all records."""
    at = [i for i, e in enumerate(experiences) if bool(e.response_mask.any())]
    firsts = numbers([experiences[i] for i in at], lambda e: e.advantages[e.response_mask][:1], 1, strategy)[:, 0]
    found = list(experiences)
    for i, number in zip(at, estimators.normalised(firsts.float()), strict=True):
        e = experiences[i]
        if is_here(e):
            found[i] = replace(e, advantages=torch.where(e.response_mask, number.to(e.advantages), 0.0))
    return found


def gae(experiences: list[Experience], s: PPOConfig) -> Estimates:
    rewards, values, masks = _rewards_values_masks(experiences)
    turns = [turn_numbers(e) for e in experiences] if s.gae_over == 'turn' else None
    lam: float | list[float] = s.lam
    if s.lam_length is not None:
        of_turns = [t[m].unique() for t, m in zip(turns, masks, strict=True)] if turns is not None else None
        lengths = [int(m.sum()) for m in masks] if of_turns is None else [len(each) for each in of_turns]
        lam = estimators.length_lam(lengths, s.lam_length)
    if turns is None:
        return maths.gae(rewards, values, masks, gamma=s.gamma, lam=lam, value_lam=s.value_lam)
    return estimators.gae_over_turns(rewards, values, masks, turns, gamma=s.gamma, lam=lam, value_lam=s.value_lam)


def turn_numbers(e: Experience) -> Tensor:
    """Returns the turn of each token of a response, counted from 0, or −1 outside of turns; (A,) int64.

    Without an episode each run of tokens that count is a turn, so an ordinary response has one.
    """
    if e.episode is None:
        starts = e.response_mask & ~torch.cat([e.response_mask.new_zeros(1), e.response_mask[:-1]])
        return torch.where(e.response_mask, starts.long().cumsum(0) - 1, -1)
    numbers = torch.full_like(e.response_ids, -1)
    for k, turn in enumerate(e.episode.turns):
        numbers[turn.start : turn.stop] = k
    return numbers


def a2c(experiences: list[Experience], s: PPOConfig) -> Estimates:
    return estimators.a2c(*_rewards_values_masks(experiences), gamma=s.gamma)


def reinforce_pp(experiences: list[Experience], s: PPOConfig) -> Estimates:
    rewards, _, masks = _rewards_values_masks(experiences)
    return estimators.reinforce_pp(rewards, masks, gamma=s.gamma)


def reinforce_pp_baseline(experiences: list[Experience], s: PPOConfig) -> Estimates:
    totals, groups, masks = _totals_groups_masks(experiences)
    return estimators.reinforce_pp_baseline(totals, groups, masks, gamma=s.gamma)


def _per_response(
    estimator: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[list[Experience], PPOConfig], Estimates]:
    """Makes an estimator from a function that returns one number per response, spread over its tokens."""

    def fn(experiences: list[Experience], s: PPOConfig) -> Estimates:
        totals, groups, masks = _totals_groups_masks(experiences)
        return estimators.spread(estimator(totals, groups), masks), estimators.spread(totals, masks)

    return fn


def gdpo(experiences: list[Experience], s: PPOConfig) -> Estimates:
    scores = torch.tensor([[score for _, score in e.weighted_scores] for e in experiences], dtype=torch.float64)
    weights = torch.tensor([weight for weight, _ in experiences[0].weighted_scores], dtype=torch.float64)
    masks = [e.response_mask for e in experiences]
    advantages = estimators.gdpo(scores, weights, torch.tensor([e.group for e in experiences]))
    return estimators.spread(advantages, masks), estimators.spread(scores @ weights, masks)


def _rewards_values_masks(experiences: list[Experience]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return [e.rewards for e in experiences], [e.values for e in experiences], [e.response_mask for e in experiences]


def _totals_groups_masks(experiences: list[Experience]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the KL-penalised sums of rewards that group-relative estimators compare, Σ_t r[t] = score − β Σ_t kl[t]
    (Ahmadian et al. 2024), with groups and masks."""
    totals = torch.stack([_total(e) for e in experiences])
    return totals, torch.tensor([e.group for e in experiences]), [e.response_mask for e in experiences]


def _total(e: Experience) -> Tensor:
    """Returns Σ_t r[t]. A response without a token that counts has no rewards; its score still enters the baseline of
    its group."""
    if not e.response_mask.any():
        return torch.tensor(e.shaped_score, dtype=torch.float64, device=e.rewards.device)
    return torch.where(e.response_mask, e.rewards, 0.0).double().sum()


def _rloo(totals: Tensor, groups: Tensor) -> Tensor:
    """`rloo`, and 0 for the only response of a group, all others of which failed."""
    _, at, counts = groups.unique(return_inverse=True, return_counts=True)
    compared, advantages = counts[at] > 1, torch.zeros_like(totals)
    advantages[compared] = estimators.rloo(totals[compared], groups[compared])
    return advantages


grpo, dr_grpo, rloo = map(_per_response, (estimators.grpo, estimators.dr_grpo, _rloo))


# ------------------------------------------------------------------ losses of the policy


def ppo(x: PolicyInputs, s: PPOConfig) -> Tensor:
    return maths.clipped_policy_loss(
        x.logprobs, x.old_logprobs, x.advantages, eps_low=s.eps_clip, eps_high=clip_high(s), dual_clip=s.dual_clip
    )


def gspo(x: PolicyInputs, s: PPOConfig) -> Tensor:
    return gspo_policy_loss(*x, eps_low=s.eps_clip, eps_high=clip_high(s), dual_clip=s.dual_clip)


def gspo_token(x: PolicyInputs, s: PPOConfig) -> Tensor:
    return gspo_token_policy_loss(*x, eps_low=s.eps_clip, eps_high=clip_high(s), dual_clip=s.dual_clip)


def cispo(x: PolicyInputs, s: PPOConfig) -> Tensor:
    own = s.of_loss
    return cispo_policy_loss(x.logprobs, x.old_logprobs, x.advantages, eps_high=clip_high(s), eps_low=own.eps_low)


def reinforce(x: PolicyInputs, s: PPOConfig) -> Tensor:
    return -x.advantages * x.logprobs
