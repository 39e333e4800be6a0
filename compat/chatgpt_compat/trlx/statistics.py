"""Statistics under trlX's names, beside this library's own. docs/coming_from/trlx.md says where they differ.

trlX logs every optimizer step; here a number is the mean over the train batches of a learning phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from chatgpt.trainer.callbacks import Callback

Metrics = Mapping[str, float]


def _same(name: str) -> Callable[[Metrics, Any], float]:
    return lambda m, c: m[name]


def _unscaled(name: str, scale: str) -> Callable[[Metrics, Any], float]:
    return lambda m, c: m[f'ilql/{name}'] / getattr(c, scale)


def _root_of_kl(m: Metrics, c: Any, per: float = 1.0) -> float:
    return math.sqrt(max(m['rollout/kl_k3_mean'] / per, 0.0))


STATISTICS: dict[str, Callable[[Metrics, Any], float]] = {
    'losses/total_loss': lambda m, c: m['ppo/policy_loss'] + c.value_coef * m['ppo/value_loss'],
    'losses/policy_loss': _same('ppo/policy_loss'),
    'losses/value_loss': _same('ppo/value_loss'),
    'values/mean': _same('ppo/value_mean'),
    'values/clipfrac': _same('ppo/value_clip_fraction'),
    'returns/mean': _same('ppo/return_mean'),
    'returns/std': lambda m, c: math.sqrt(m['ppo/return_var']),
    'policy/approx_kl': _same('ppo/approx_kl_k3'),
    'policy/clipfrac': _same('ppo/clip_fraction'),
    'ratio': _same('ppo/ratio_mean'),
    'rollout_scores/mean': _same('rollout/score_mean'),
    'rollout_scores/std': _same('rollout/score_std'),
    'policy/sqrt_kl': _root_of_kl,
    'policy/kl_per_token': lambda m, c: _root_of_kl(m, c, m['rollout/response_len_mean']),
    'kl_ctl_value': _same('rollout/kl_coef'),
    'time/rollout_generate': _same('perf/collect_s'),
    'time/rollout_score': _same('perf/score_s'),
    'losses/loss': _same('ilql/loss'),
    'losses/loss_q': _same('ilql/td_loss'),
    'losses/loss_v': _same('ilql/value_loss'),
    'losses/loss_cql': _unscaled('cql_loss', 'cql_scale'),
    'losses/loss_awac': _unscaled('awac_loss', 'awac_scale'),
    'loss': _same('sft/loss'),
    'scores_mean': _same('rft/score_mean'),
}
"""trlX's key → the number out of a phase's metrics and the trainer's config; a metric that is missing leaves it out.
`values/mean` of ILQL is `ilql/value_mean`; the learning rate stands under `learning_rate_group_0`"""
EVALUATED = {'eval/score_mean': 'reward/mean', 'eval/metrics/': 'metrics/'}
"""of an evaluation: our name, or its beginning → trlX's; a suffix `@beta=1` stays"""
RATES = ('ppo/lr', 'ilql/lr', 'sft/lr')


def theirs(metrics: Metrics, config: Any) -> dict[str, float]:
    """The numbers of a phase, and of an evaluation in it, under trlX's names."""
    found = evaluated(metrics)
    for name, statistic in STATISTICS.items():
        try:
            found[name] = statistic(metrics, config)
        except (KeyError, ZeroDivisionError):
            continue
    if 'ilql/value_mean' in metrics:
        found['values/mean'] = metrics['ilql/value_mean']
    for name in RATES:
        if name in metrics:
            found['learning_rate_group_0'] = metrics[name]
    return found


def evaluated(metrics: Metrics) -> dict[str, float]:
    """`reward/mean` and `metrics/<name>` of an evaluation's numbers."""
    found = {}
    for name, value in metrics.items():
        for ours, name_of_theirs in EVALUATED.items():
            if name.startswith(ours) and not name.endswith('_best'):
                found[name_of_theirs + name.removeprefix(ours)] = value
    return found


class Statistics(Callback):
    """Adds trlX's names to the metrics of a phase, before they are logged."""

    order: ClassVar[int] = -5

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        metrics.update(theirs(metrics, trainer.config))
