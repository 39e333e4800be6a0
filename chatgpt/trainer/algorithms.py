"""Online methods as two tables: advantage estimators, and losses of the policy per token; and the losses of a critic.

A method of the literature is an entry of each and a few settings (docs/algorithms). User code adds entries of its own:

    ESTIMATORS['mine'] = Estimator(fn=lambda experiences, settings: (advantages, returns))
    POLICY_LOSSES['mine'] = PolicyLoss(fn=lambda inputs, settings: -inputs.advantages * inputs.logprobs)

`PPOConfig`, config files and flags then accept the name; `--advantage_estimator my_file.py:mine` works without
registration. Imports no torch: the functions are in `estimates`, the formulas in `chatgpt.functional`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from chatgpt.functional.choices import Aggregation
from chatgpt.names import hint
from chatgpt.registry import Registry, late

if TYPE_CHECKING:
    from torch import Tensor

    from chatgpt.nn.sweep import Communicator
    from chatgpt.types import Experience

Estimates = tuple[list['Tensor'], list['Tensor']]
"""advantages and returns, each (A,) per experience"""

GAE_SETTINGS = ('gae_over', 'value_lam', 'lam_length')
"""settings that only some estimators with values use"""


def _late(name: str) -> Callable[..., Any]:
    return late(f'chatgpt.trainer.estimates:{name}')


# ------------------------------------------------------------------ advantages


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An advantage estimator: a function of rewards, values and groups, with its requirements.

    Args:
        fn: (experiences of a timestep, whole groups, ordered by sample index; settings) -> `Estimates`. Rewards
            include score and KL.
        spans: 'group': what `fn` returns for a response depends on its group alone, so each rank estimates its own
            groups; 'phase': `fn` reads the experience of all ranks, which then is sent to each.
        needs_values: requires a critic, or an actor with a value head.
        needs_groups: compares responses to the same prompt, so requires several per prompt.
        rewards_apart: reads each of several rewards (`Experience.weighted_scores`) instead of their sum.
        follows: the settings of `GAE_SETTINGS` that `fn` reads; the others are refused.
        ignores: those of 'gamma' and 'lam' that `fn` does not read, which are refused if they are changed.
        whitens: advantages are whitened over a learning phase unless `whiten_advantages` is set.
        whiten: (experiences, strategy) -> copies with whitened advantages; by default over all tokens that count.
        aggregation: of the policy loss, unless `loss_aggregation` or the policy loss sets it.
    """

    fn: Callable[[list[Experience], Any], Estimates]
    spans: Literal['group', 'phase'] = 'phase'
    needs_values: bool = False
    needs_groups: bool = False
    rewards_apart: bool = False
    follows: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    whitens: bool = True
    whiten: Callable[..., list[Experience]] = _late('whiten_tokens')
    aggregation: Aggregation = 'token'


ESTIMATORS: Registry[Estimator] = Registry(
    'advantage_estimator',
    Estimator,
    {
        'gae': Estimator(spans='group', fn=_late('gae'), needs_values=True, follows=GAE_SETTINGS),
        'a2c': Estimator(spans='group', fn=_late('a2c'), needs_values=True, ignores=('lam',)),
        'grpo': Estimator(
            spans='group',
            fn=_late('grpo'),
            needs_groups=True,
            ignores=('gamma', 'lam'),
            whitens=False,
            aggregation='sequence',
        ),
        'dr_grpo': Estimator(
            spans='group',
            fn=_late('dr_grpo'),
            needs_groups=True,
            ignores=('gamma', 'lam'),
            whitens=False,
            aggregation='sequence_sum',
        ),
        'rloo': Estimator(spans='group', fn=_late('rloo'), needs_groups=True, ignores=('gamma', 'lam'), whitens=False),
        'gdpo': Estimator(
            spans='group',
            fn=_late('gdpo'),
            needs_groups=True,
            rewards_apart=True,
            ignores=('gamma', 'lam'),
            whiten=_late('whiten_responses'),
            aggregation='sequence',
        ),
        'reinforce++': Estimator(spans='group', fn=_late('reinforce_pp'), ignores=('lam',)),
        'reinforce++_baseline': Estimator(
            spans='group', fn=_late('reinforce_pp_baseline'), needs_groups=True, ignores=('lam',)
        ),
    },
)


def estimate_advantages(
    experiences: list[Experience], estimator: Estimator, settings: Any, strategy: Communicator | None = None
) -> None:
    """Writes `advantages` and `returns` of this rank's experience, in place. The list holds whole groups. A collective;
    without a strategy this rank has all records."""
    from chatgpt.nn.records import fetched, is_here

    ranks_of: dict[int, set[int]] = {}
    for e in experiences:
        ranks_of.setdefault(e.group, set()).add(e.rank)
    read = experiences
    if strategy is not None and (estimator.spans == 'phase' or any(len(ranks) > 1 for ranks in ranks_of.values())):
        read = fetched(strategy, experiences)
    at = [i for i, e in enumerate(read) if is_here(e)]
    if not at:
        return
    for i, advantage, ret in zip(at, *estimator.fn([read[i] for i in at], settings), strict=True):
        if is_here(experiences[i]):
            experiences[i].advantages, experiences[i].returns = advantage.float(), ret.float()


# ------------------------------------------------------------------ losses of the policy


class PolicyInputs(NamedTuple):
    """Inputs of a policy loss."""

    logprobs: Tensor
    """(N,) of the policy in training, with gradient"""
    old_logprobs: Tensor
    """(N,) denominator of the ratio"""
    advantages: Tensor
    """(N,)"""
    mask: Tensor
    """(N,) bool, True = counts"""
    rows: Tensor
    """(N,) int64, the sequence of each token"""
    num_sequences: int


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A policy loss per token.

    Args:
        fn: (inputs, settings) -> (N,) losses; the caller drops those of tokens that do not count.
        clip: sides of the ratio that are clipped: 'both' (`eps_clip`, `eps_clip_high`, `dual_clip`), 'upper', or
            'none', without a ratio.
        per_sequence: has one ratio per sequence, so requires the aggregation 'sequence'.
        aggregation: as in its paper, in place of the estimator's.
        settings: a frozen dataclass of its own settings, given as `PPOConfig.loss_settings`; `fn` reads them as
            `settings.of_loss`.
    """

    fn: Callable[[PolicyInputs, Any], Tensor]
    clip: Literal['both', 'upper', 'none'] = 'both'
    per_sequence: bool = False
    aggregation: Aggregation | None = None
    settings: type | None = None


def settings_of(cls: type | None, given: Mapping[str, Any] | None, name: str, owner: str) -> Any:
    """Returns the settings of a loss, an object of `cls` made from the mapping `given`; None without a class.

    Args:
        name: of the setting that holds the mapping.
        owner: the setting that selects the loss.
    """
    known = [f.name for f in fields(cls)] if cls is not None else []
    for key in given or {}:
        if key not in known:
            raise ValueError(f'{name}: this {owner} has no setting {key!r}{hint(key, known)}')
    try:
        return cls(**(given or {})) if cls is not None else None
    except TypeError as error:
        raise ValueError(f'{name}: {error}') from None


def clip_high(settings: Any) -> float:
    """Returns the upper clip, by default equal to the lower one."""
    return settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high


@dataclass(frozen=True, kw_only=True)
class CISPO:
    """Settings of policy_loss='cispo'."""

    eps_low: float = 1.0
    """the weight is at least 1 − eps_low; 1: no lower bound"""

    def __post_init__(self) -> None:
        if not 0 <= self.eps_low <= 1:
            raise ValueError(f'loss_settings: eps_low={self.eps_low!r} must be in [0, 1]')


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    'policy_loss',
    PolicyLoss,
    {
        'ppo': PolicyLoss(fn=_late('ppo')),
        'gspo': PolicyLoss(fn=_late('gspo'), per_sequence=True, aggregation='sequence'),
        'gspo_token': PolicyLoss(fn=_late('gspo_token'), per_sequence=True, aggregation='sequence'),
        'cispo': PolicyLoss(fn=_late('cispo'), clip='upper', aggregation='token', settings=CISPO),
        'reinforce': PolicyLoss(fn=_late('reinforce'), clip='none'),
    },
)


# ------------------------------------------------------------------ losses of the critic


@dataclass(frozen=True, kw_only=True)
class Huber:
    """Settings of critic_loss='huber'."""

    delta: float = 1.0
    """error up to which the loss is a square; beyond it is linear"""

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise ValueError(f'critic_loss_settings: delta={self.delta!r} must be positive')


@dataclass(frozen=True, kw_only=True)
class Categorical:
    """Settings of critic_loss='categorical' (`chatgpt.functional.values`)."""

    bins: int = 101
    low: float = -10.0
    high: float = 10.0
    """ends of the range of returns; returns outside of it count as its nearest end"""
    sigma: float = 0.75
    """standard deviation of a target in widths of a bin; the paper's default"""

    def __post_init__(self) -> None:
        if isinstance(self.bins, bool) or self.bins != int(self.bins) or self.bins < 2:
            raise ValueError(f'critic_loss_settings: bins={self.bins!r} must be a whole number, at least 2')
        object.__setattr__(self, 'bins', int(self.bins))
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f'critic_loss_settings: low={self.low!r} must be below high={self.high!r}')
        if not 0 < self.sigma < math.inf:
            raise ValueError(f'critic_loss_settings: sigma={self.sigma!r} must be positive')

    @property
    def support(self) -> dict[str, float]:
        """The bins, as `CategoricalHead.support` returns them."""
        return {'bins': self.bins, 'low': float(self.low), 'high': float(self.high)}


CRITIC_LOSSES: dict[str, type | None] = {'mse': None, 'huber': Huber, 'categorical': Categorical}
"""critic_loss -> the class of its settings"""
