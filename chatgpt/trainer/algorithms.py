"""What an online method is made of, as two tables: how advantages are estimated, and the loss of a token of the policy.

A method of the literature is an entry of each and a few settings (docs/algorithms). A user's own stands beside them:

    ESTIMATORS['mine'] = Estimator(fn=lambda experiences, settings: (advantages, returns))
    POLICY_LOSSES['mine'] = PolicyLoss(fn=lambda inputs, settings: -inputs.advantages * inputs.logprobs)

and is then known by its name to `PPOConfig`, config files and flags; `--advantage_estimator my_file.py:mine` needs no
line more. The formulas are in `chatgpt.functional`; here their inputs are laid out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from chatgpt.functional import advantages as estimators
from chatgpt.functional.losses import Aggregation, cispo_policy_loss, clipped_policy_loss, gspo_policy_loss
from chatgpt.functional.masking import whiten
from chatgpt.registry import Registry
from chatgpt.types import Experience

Estimates = tuple[list[Tensor], list[Tensor]]
"""advantages and returns, each (A,) per experience"""

GAE_SETTINGS = ('gae_over', 'value_lam', 'lam_length')
"""which not every estimator with values has a meaning for"""


class AlgorithmSettings(Protocol):
    """The fields of `PPOConfig` that entries read."""

    gamma: float
    lam: float
    lam_length: float | None
    value_lam: float | None
    gae_over: Literal['token', 'turn']
    eps_clip: float
    eps_clip_high: float | None
    dual_clip: float | None


# ------------------------------------------------------------------ advantages


def whiten_tokens(experiences: list[Experience]) -> list[Experience]:
    """Copies whose advantages have mean 0 and variance 1 over all tokens that count, of the whole list together."""
    if not experiences:
        return []
    mask = torch.cat([e.response_mask for e in experiences])
    flat = whiten(torch.cat([e.advantages for e in experiences]), mask)
    parts = flat.split([e.num_actions for e in experiences])
    return [replace(e, advantages=part) for e, part in zip(experiences, parts, strict=True)]


def whiten_responses(experiences: list[Experience]) -> list[Experience]:
    """The same over responses, each of one number; those of which no token counts do not enter."""
    own = [e for e in experiences if bool(e.response_mask.any())]
    if not own:
        return experiences
    numbers = estimators.normalised(torch.stack([e.advantages[e.response_mask][0] for e in own]))
    parts = iter(estimators.spread(numbers, [e.response_mask for e in own]))
    return [replace(e, advantages=next(parts)) if bool(e.response_mask.any()) else e for e in experiences]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """How advantages and returns follow from rewards, values and groups.

    Args:
        fn: (experiences of a phase, whole groups, ordered by sample index; settings) -> `Estimates`. Rewards hold score
            and KL.
        needs_values: there must be a critic, or an actor with a value head.
        needs_groups: responses to one prompt are compared, so there must be several.
        rewards_apart: reads each of several rewards (`Experience.weighted_scores`) and never their sum.
        follows: which of the settings `GAE_SETTINGS` `fn` reads; the others are refused.
        whitens: advantages are whitened over a learning phase unless `whiten_advantages` says otherwise.
        whiten: how: over all tokens that count, or otherwise. Returns copies.
        aggregation: of the policy loss, where neither `loss_aggregation` nor the policy loss says otherwise.
    """

    fn: Callable[[list[Experience], AlgorithmSettings], Estimates]
    needs_values: bool = False
    needs_groups: bool = False
    rewards_apart: bool = False
    follows: tuple[str, ...] = ()
    whitens: bool = True
    whiten: Callable[[list[Experience]], list[Experience]] = whiten_tokens
    aggregation: Aggregation = 'token'


def _gae(experiences: list[Experience], s: AlgorithmSettings) -> Estimates:
    rewards, values, masks = _rewards_values_masks(experiences)
    turns = [turn_numbers(e) for e in experiences] if s.gae_over == 'turn' else None
    lam: float | list[float] = s.lam
    if s.lam_length is not None:
        of_turns = [t[m].unique() for t, m in zip(turns, masks, strict=True)] if turns is not None else None
        lengths = [int(m.sum()) for m in masks] if of_turns is None else [len(each) for each in of_turns]
        lam = estimators.length_lam(lengths, s.lam_length)
    if turns is None:
        return estimators.gae(rewards, values, masks, gamma=s.gamma, lam=lam, value_lam=s.value_lam)
    return estimators.gae_over_turns(rewards, values, masks, turns, gamma=s.gamma, lam=lam, value_lam=s.value_lam)


def turn_numbers(e: Experience) -> Tensor:
    """(A,) int64: the turn of each token of a response, counted from 0; −1 at those of none.

    Without an episode each run of tokens that count is a turn, so an ordinary response is one.
    """
    if e.episode is None:
        starts = e.response_mask & ~torch.cat([e.response_mask.new_zeros(1), e.response_mask[:-1]])
        return torch.where(e.response_mask, starts.long().cumsum(0) - 1, -1)
    numbers = torch.full_like(e.response_ids, -1)
    for k, turn in enumerate(e.episode.turns):
        numbers[turn.start : turn.stop] = k
    return numbers


def _a2c(experiences: list[Experience], s: AlgorithmSettings) -> Estimates:
    return estimators.a2c(*_rewards_values_masks(experiences), gamma=s.gamma)


def _reinforce_pp(experiences: list[Experience], s: AlgorithmSettings) -> Estimates:
    rewards, _, masks = _rewards_values_masks(experiences)
    return estimators.reinforce_pp(rewards, masks, gamma=s.gamma)


def _reinforce_pp_baseline(experiences: list[Experience], s: AlgorithmSettings) -> Estimates:
    totals, groups, masks = _totals_groups_masks(experiences)
    return estimators.reinforce_pp_baseline(totals, groups, masks, gamma=s.gamma)


def _per_response(
    estimator: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[list[Experience], AlgorithmSettings], Estimates]:
    """An estimator of one number per response, spread over its tokens."""

    def fn(experiences: list[Experience], s: AlgorithmSettings) -> Estimates:
        totals, groups, masks = _totals_groups_masks(experiences)
        return estimators.spread(estimator(totals, groups), masks), estimators.spread(totals, masks)

    return fn


def _gdpo(experiences: list[Experience], s: AlgorithmSettings) -> Estimates:
    scores = torch.tensor([[score for _, score in e.weighted_scores] for e in experiences], dtype=torch.float64)
    weights = torch.tensor([weight for weight, _ in experiences[0].weighted_scores], dtype=torch.float64)
    masks = [e.response_mask for e in experiences]
    advantages = estimators.gdpo(scores, weights, torch.tensor([e.group for e in experiences]))
    return estimators.spread(advantages, masks), estimators.spread(scores @ weights, masks)


def _rewards_values_masks(experiences: list[Experience]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return [e.rewards for e in experiences], [e.values for e in experiences], [e.response_mask for e in experiences]


def _totals_groups_masks(experiences: list[Experience]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Group-relative estimators compare KL-penalised sums of rewards, Σ_t r[t] = score − β Σ_t kl[t] (Ahmadian et al.
    2024)."""
    totals = torch.stack([_total(e) for e in experiences])
    return totals, torch.tensor([e.group for e in experiences]), [e.response_mask for e in experiences]


def _total(e: Experience) -> Tensor:
    """Σ_t r[t]. A response without a token that counts has no rewards; its score stands in its group's baseline all the
    same."""
    if not e.response_mask.any():
        return torch.tensor(e.shaped_score, dtype=torch.float64, device=e.rewards.device)
    return torch.where(e.response_mask, e.rewards, 0.0).double().sum()


ESTIMATORS: Registry[Estimator] = Registry(
    'advantage_estimator',
    Estimator,
    {
        'gae': Estimator(fn=_gae, needs_values=True, follows=GAE_SETTINGS),
        'a2c': Estimator(fn=_a2c, needs_values=True),
        'grpo': Estimator(fn=_per_response(estimators.grpo), needs_groups=True, whitens=False, aggregation='sequence'),
        'dr_grpo': Estimator(
            fn=_per_response(estimators.dr_grpo), needs_groups=True, whitens=False, aggregation='sequence_sum'
        ),
        'rloo': Estimator(fn=_per_response(estimators.rloo), needs_groups=True, whitens=False),
        'gdpo': Estimator(
            fn=_gdpo, needs_groups=True, rewards_apart=True, whiten=whiten_responses, aggregation='sequence'
        ),
        'reinforce++': Estimator(fn=_reinforce_pp),
        'reinforce++_baseline': Estimator(fn=_reinforce_pp_baseline, needs_groups=True),
    },
)


def estimate_advantages(experiences: list[Experience], estimator: Estimator, settings: AlgorithmSettings) -> None:
    """Write `advantages` and `returns` of every experience, in place. The list holds whole groups."""
    if not experiences:
        return
    advantages, returns = estimator.fn(experiences, settings)
    for e, advantage, ret in zip(experiences, advantages, returns, strict=True):
        e.advantages, e.returns = advantage.float(), ret.float()


# ------------------------------------------------------------------ losses of the policy


class PolicyInputs(NamedTuple):
    """What the loss of a token may depend on."""

    logprobs: Tensor
    """(N,) of the policy that learns, with gradient"""
    old_logprobs: Tensor
    """(N,) that the ratio is taken against"""
    advantages: Tensor
    """(N,)"""
    mask: Tensor
    """(N,) bool, True = counts"""
    rows: Tensor
    """(N,) int64, the sequence of each token"""
    num_sequences: int


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of each token of the policy.

    Args:
        fn: (inputs, settings) -> (N,) losses; those of tokens that do not count are left out by the caller.
        clip: which sides of a ratio are clipped: 'both' (`eps_clip`, `eps_clip_high`, `dual_clip`), 'upper', or 'none',
            without a ratio.
        per_sequence: has one ratio per sequence, and so the aggregation 'sequence'.
        aggregation: of its paper, in place of the estimator's.
    """

    fn: Callable[[PolicyInputs, AlgorithmSettings], Tensor]
    clip: Literal['both', 'upper', 'none'] = 'both'
    per_sequence: bool = False
    aggregation: Aggregation | None = None


def clip_high(settings: AlgorithmSettings) -> float:
    """The upper clip, which is the lower one unless it is given."""
    return settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high


def _ppo(x: PolicyInputs, s: AlgorithmSettings) -> Tensor:
    return clipped_policy_loss(
        x.logprobs, x.old_logprobs, x.advantages, eps_low=s.eps_clip, eps_high=clip_high(s), dual_clip=s.dual_clip
    )


def _gspo(x: PolicyInputs, s: AlgorithmSettings) -> Tensor:
    return gspo_policy_loss(*x, eps_low=s.eps_clip, eps_high=clip_high(s), dual_clip=s.dual_clip)


def _cispo(x: PolicyInputs, s: AlgorithmSettings) -> Tensor:
    return cispo_policy_loss(x.logprobs, x.old_logprobs, x.advantages, eps_high=clip_high(s))


def _reinforce(x: PolicyInputs, s: AlgorithmSettings) -> Tensor:
    return -x.advantages * x.logprobs


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    'policy_loss',
    PolicyLoss,
    {
        'ppo': PolicyLoss(fn=_ppo),
        'gspo': PolicyLoss(fn=_gspo, per_sequence=True, aggregation='sequence'),
        'cispo': PolicyLoss(fn=_cispo, clip='upper', aggregation='token'),
        'reinforce': PolicyLoss(fn=_reinforce, clip='none'),
    },
)
