"""Statistics under trlX's names, beside this library's own: what each is made of, and where it differs.

trlX logs every optimizer step; here a number is the mean over the train batches of a learning phase. Left out: numbers
of which `NOT_MADE` says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from chatgpt.trainer.callbacks import Callback

Metrics = Mapping[str, float]


class Statistic(NamedTuple):
    """A number of trlX's, out of a phase's metrics and the trainer's config; a metric that is missing leaves it out."""

    of: Callable[[Metrics, Any], float]
    remark: str


def _same(name: str, remark: str = 'the same') -> Statistic:
    return Statistic(lambda m, c: m[name], f'`{name}`: {remark}')


def _unscaled(name: str, scale: str) -> Statistic:
    def of(m: Metrics, c: Any) -> float:
        return m[f'ilql/{name}'] / getattr(c, scale)

    return Statistic(of, f'`ilql/{name}` / {scale}: the same')


STATISTICS: dict[str, Statistic] = {
    'losses/total_loss': Statistic(
        lambda m, c: m['ppo/policy_loss'] + c.value_coef * m['ppo/value_loss'],
        '`ppo/policy_loss` + vf_coef · `ppo/value_loss`: the same',
    ),
    'losses/policy_loss': _same('ppo/policy_loss'),
    'losses/value_loss': _same('ppo/value_loss'),
    'values/mean': _same('ppo/value_mean'),
    'values/clipfrac': _same('ppo/value_clip_fraction', 'converted: values that left the range, costlier or not'),
    'returns/mean': _same('ppo/return_mean', 'the same, of the whole phase'),
    'returns/std': Statistic(lambda m, c: math.sqrt(m['ppo/return_var']), '√`ppo/return_var`: of the whole phase'),
    'policy/approx_kl': _same('ppo/approx_kl_k3', 'the same, over the tokens that count; trlX’s mean counts padding'),
    'policy/clipfrac': _same('ppo/clip_fraction', 'converted: ratios outside of the range, costlier or not'),
    'ratio': _same('ppo/ratio_mean'),
    'rollout_scores/mean': _same('rollout/score_mean', 'the same: after cliprange_reward'),
    'rollout_scores/std': _same('rollout/score_std', 'the same'),
    'policy/sqrt_kl': Statistic(
        lambda m, c: math.sqrt(max(m['rollout/kl_k3_mean'], 0.0)),
        '√`rollout/kl_k3_mean`: of the response; trlX adds the prompt’s tokens',
    ),
    'policy/kl_per_token': Statistic(
        lambda m, c: math.sqrt(max(m['rollout/kl_k3_mean'] / m['rollout/response_len_mean'], 0.0)),
        '√(`rollout/kl_k3_mean` / `rollout/response_len_mean`); trlX divides by prompt and padding as well',
    ),
    'kl_ctl_value': _same('rollout/kl_coef'),
    'time/rollout_generate': _same('perf/collect_s', 'of the phase'),
    'time/rollout_score': _same('perf/score_s', 'of the phase, with the reference’s and the values’ forward'),
    'losses/loss': _same('ilql/loss'),
    'losses/loss_q': _same('ilql/td_loss'),
    'losses/loss_v': _same('ilql/value_loss'),
    'losses/loss_cql': _unscaled('cql_loss', 'cql_scale'),
    'losses/loss_awac': _unscaled('awac_loss', 'awac_scale'),
    'loss': _same('sft/loss'),
    'scores_mean': _same('rft/score_mean', 'of this round; trlX’s mean goes on over all rounds'),
}
"""trlX's key → what it is made of. `values/mean` of ILQL is `ilql/value_mean`; the learning rate stands under
`learning_rate_group_0`"""
EVALUATED = {'eval/score_mean': 'reward/mean', 'eval/metrics/': 'metrics/'}
"""of an evaluation: our name, or its beginning → trlX's; a suffix `@beta=1` stays"""
NOT_MADE = {
    'values/min, values/max, values/std, old_values/*, returns/min, returns/max': 'not measured; `ppo/return_var` and '
    '`ppo/explained_variance` say how good the values are',
    'values/values_error, values/values_mape_error': 'not measured; see `ppo/explained_variance`',
    'qvalues/*, awac_weight/*': 'not measured for each head; `ilql/q_mean` is the mean of the smaller target Q',
    'padding_percentage': 'there is no padding between the phases',
    'rollout_scores/running_mean, rollout_scores/running_std': 'kept in the checkpoint, not logged',
    'time/forward, time/backward, time/generate, time/metric': '`perf/learn_s` and `perf/total_s`',
}
RATES = ('ppo/lr', 'ilql/lr', 'sft/lr')


def theirs(metrics: Metrics, config: Any) -> dict[str, float]:
    """The numbers of a phase, and of an evaluation in it, under trlX's names."""
    found = evaluated(metrics)
    for name, statistic in STATISTICS.items():
        try:
            found[name] = statistic.of(metrics, config)
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
