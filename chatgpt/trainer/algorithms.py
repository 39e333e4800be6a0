"""What an online method is made of, as two tables: how advantages are estimated, and the loss of a token of the policy.

A method of the literature is an entry of each and a few settings (docs/algorithms). A user's own stands beside them:

    ESTIMATORS['mine'] = Estimator(fn=lambda experiences, settings: (advantages, returns))
    POLICY_LOSSES['mine'] = PolicyLoss(fn=lambda inputs, settings: -inputs.advantages * inputs.logprobs)

and is then known by its name to `PPOConfig`, config files and flags; `--advantage_estimator my_file.py:mine` needs no
line more. Imports no torch: the functions of the tables are in `estimates`, the formulas in `chatgpt.functional`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from chatgpt.functional.choices import Aggregation
from chatgpt.names import hint
from chatgpt.registry import Registry, late

if TYPE_CHECKING:
    from torch import Tensor

    from chatgpt.types import Experience

Estimates = tuple[list['Tensor'], list['Tensor']]
"""advantages and returns, each (A,) per experience"""

GAE_SETTINGS = ('gae_over', 'value_lam', 'lam_length')
"""which not every estimator with values has a meaning for"""


def _late(name: str) -> Callable[..., Any]:
    return late(f'chatgpt.trainer.estimates:{name}')


# ------------------------------------------------------------------ advantages


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

    fn: Callable[[list[Experience], Any], Estimates]
    needs_values: bool = False
    needs_groups: bool = False
    rewards_apart: bool = False
    follows: tuple[str, ...] = ()
    whitens: bool = True
    whiten: Callable[[list[Experience]], list[Experience]] = _late('whiten_tokens')
    aggregation: Aggregation = 'token'


ESTIMATORS: Registry[Estimator] = Registry(
    'advantage_estimator',
    Estimator,
    {
        'gae': Estimator(fn=_late('gae'), needs_values=True, follows=GAE_SETTINGS),
        'a2c': Estimator(fn=_late('a2c'), needs_values=True),
        'grpo': Estimator(fn=_late('grpo'), needs_groups=True, whitens=False, aggregation='sequence'),
        'dr_grpo': Estimator(fn=_late('dr_grpo'), needs_groups=True, whitens=False, aggregation='sequence_sum'),
        'rloo': Estimator(fn=_late('rloo'), needs_groups=True, whitens=False),
        'gdpo': Estimator(
            fn=_late('gdpo'),
            needs_groups=True,
            rewards_apart=True,
            whiten=_late('whiten_responses'),
            aggregation='sequence',
        ),
        'reinforce++': Estimator(fn=_late('reinforce_pp')),
        'reinforce++_baseline': Estimator(fn=_late('reinforce_pp_baseline'), needs_groups=True),
    },
)


def estimate_advantages(experiences: list[Experience], estimator: Estimator, settings: Any) -> None:
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
        settings: a frozen dataclass of settings of its own, given as `PPOConfig.loss_settings`; `fn` reads them in
            `settings.of_loss`.
    """

    fn: Callable[[PolicyInputs, Any], Tensor]
    clip: Literal['both', 'upper', 'none'] = 'both'
    per_sequence: bool = False
    aggregation: Aggregation | None = None
    settings: type | None = None

    def own_settings(self, given: Mapping[str, Any] | None) -> Any:
        """Its own settings out of a mapping; None where it has none.

        Raises:
            ValueError: a name that is none of them, one without a default that is not given, or a value that the
                dataclass refuses.
        """
        known = [f.name for f in fields(self.settings)] if self.settings is not None else []
        for name in given or {}:
            if name not in known:
                raise ValueError(f'loss_settings: this policy_loss has no setting {name!r}{hint(name, known)}')
        try:
            return self.settings(**(given or {})) if self.settings is not None else None
        except TypeError as error:
            raise ValueError(f'loss_settings: {error}') from None


def clip_high(settings: Any) -> float:
    """The upper clip, which is the lower one unless it is given."""
    return settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    'policy_loss',
    PolicyLoss,
    {
        'ppo': PolicyLoss(fn=_late('ppo')),
        'gspo': PolicyLoss(fn=_late('gspo'), per_sequence=True, aggregation='sequence'),
        'cispo': PolicyLoss(fn=_late('cispo'), clip='upper', aggregation='token'),
        'reinforce': PolicyLoss(fn=_late('reinforce'), clip='none'),
    },
)
