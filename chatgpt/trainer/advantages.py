"""Which estimator a run uses: fills advantages and returns of a phase's experience from its rewards, values and groups.

The formulas are in `chatgpt.functional.advantages`; here their inputs are laid out, and one setting chooses among them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from chatgpt.functional import advantages as estimators
from chatgpt.functional.masking import whiten
from chatgpt.trainer.config import PPOConfig
from chatgpt.types import Experience


def estimate_advantages(experiences: list[Experience], config: PPOConfig) -> None:
    """Write `advantages` and `returns` of every experience, in place. The list holds whole groups.

    Group-relative estimators compare the KL-penalised sums of rewards, Σ_t r[t] = score − β Σ_t kl[t] (Ahmadian et al. 2024).
    """
    if not experiences:
        return
    rewards = [e.rewards for e in experiences]
    values = [e.values for e in experiences]
    masks = [e.response_mask for e in experiences]
    name = config.advantage_estimator
    if name == 'gae':
        advantages, returns = estimators.gae(rewards, values, masks, gamma=config.gamma, lam=config.lam)
    elif name == 'a2c':
        advantages, returns = estimators.a2c(rewards, values, masks, gamma=config.gamma)
    elif name == 'reinforce++':
        advantages, returns = estimators.reinforce_pp(rewards, masks, gamma=config.gamma, whiten_all=False)
    elif name == 'gdpo':
        advantages, returns = _by_reward(experiences)
    else:
        groups = torch.tensor([e.group for e in experiences])
        totals = torch.stack([_total(e) for e in experiences])
        advantages, returns = _by_group(name, totals, groups, masks, config.gamma)
    for e, advantage, ret in zip(experiences, advantages, returns, strict=True):
        e.advantages, e.returns = advantage.float(), ret.float()


def _total(e: Experience) -> Tensor:
    """Σ_t r[t]. A response without a token that counts has no rewards; its score stands in its group's baseline all the same."""
    if not e.response_mask.any():
        return torch.tensor(e.shaped_score, dtype=torch.float64, device=e.rewards.device)
    return (e.rewards * e.response_mask).double().sum()


def _by_group(name: str, totals: Tensor, groups: Tensor, masks: list[Tensor], gamma: float) -> tuple[list[Tensor], list[Tensor]]:
    if name == 'reinforce++_baseline':
        return estimators.reinforce_pp_baseline(totals, groups, masks, gamma=gamma, whiten_all=False)
    estimator = {'grpo': estimators.grpo, 'dr_grpo': estimators.dr_grpo, 'rloo': estimators.rloo}[name]
    advantages = estimators.spread(estimator(totals, groups), masks)
    return advantages, estimators.spread(totals, masks)


def _by_reward(experiences: list[Experience]) -> tuple[list[Tensor], list[Tensor]]:
    """GDPO: every reward of a weighted list in its own scale; `whitened` ends it."""
    scores = torch.tensor([[score for _, score in e.weighted_scores] for e in experiences], dtype=torch.float64)
    weights = torch.tensor([weight for weight, _ in experiences[0].weighted_scores], dtype=torch.float64)
    masks = [e.response_mask for e in experiences]
    advantages = estimators.gdpo(scores, weights, torch.tensor([e.group for e in experiences]))
    return estimators.spread(advantages, masks), estimators.spread(scores @ weights, masks)


def whitened(experiences: list[Experience], config: PPOConfig) -> list[Experience]:
    """Copies whose advantages have mean 0 and variance 1 over all tokens that count, under GDPO over the responses, of the whole list."""
    if not experiences:
        return []
    if config.advantage_estimator == 'gdpo':
        return _normalised(experiences)
    mask = torch.cat([e.response_mask for e in experiences])
    flat = whiten(torch.cat([e.advantages for e in experiences]), mask)
    parts = flat.split([e.num_actions for e in experiences])
    return [replace(e, advantages=part) for e, part in zip(experiences, parts, strict=True)]


def _normalised(experiences: list[Experience]) -> list[Experience]:
    """One number per response; those of which no token counts do not enter."""
    own = [e for e in experiences if bool(e.response_mask.any())]
    if not own:
        return experiences
    numbers = estimators.normalised(torch.stack([e.advantages[e.response_mask][0] for e in own]))
    parts = iter(estimators.spread(numbers, [e.response_mask for e in own]))
    return [replace(e, advantages=next(parts)) if bool(e.response_mask.any()) else e for e in experiences]
