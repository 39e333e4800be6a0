"""The KL to the initial model, and the coefficient that is to hold it."""

from __future__ import annotations

from statistics import median

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import NOW, History
from chatgpt.doctor.limits import limit


def kl_runs_away(h: History) -> Finding | None:
    values = h.values('rollout/kl_mean')
    if len(values) < NOW:
        return None
    now, length = h.now('rollout/kl_mean'), max(median(h.drawn_lengths()[-NOW:]), 1.0)
    before = median(values[-2 * NOW : -NOW] or values[:1])
    growing = now > limit('kl_growth') * max(before, 0.0)
    target = h.setting('kl_target')
    above = target is not None and now > limit('kl_over_target') * target and now / length > limit('kl_notable')
    far = now / length > limit('kl_per_token')
    if not ((far or above) and growing):
        return None
    coef = h.values('rollout/kl_coef')[-1] if h.count('rollout/kl_coef') else 0.0
    pulls = f'kl_coef {coef:.3g}' + (f', target {target:g}' if target is not None else '')
    rate = h.highest('ppo/lr', 0.0)
    if coef == 0.0 and h.setting('kl_in') != 'loss':
        change = f'set kl_coef to 0.05, or lr from {rate:.1g} to {rate / 3:.1g}'
    elif target is not None:
        change = f'divide kl_horizon by 4, so that the coefficient follows faster, or lr by 3 (from {rate:.1g})'
    else:
        used = h.setting('kl_coef', coef)
        change = f'multiply kl_coef by 4 (from {used:.3g} to {4 * used:.3g}), or divide lr by 3 (from {rate:.1g})'
    return Finding(
        key='kl-runs-away',
        step=h.step,
        level='error',
        title='the KL to the initial model runs away',
        evidence=f'{before:.3g} -> {now:.3g} nats per response in {NOW} phases, {now / length:.2g} per token, {pulls}',
        cause='steps too large for the pull of the KL, often towards a reward that can be gamed',
        change=change,
    )


def kl_coef_at_limit(h: History) -> Finding | None:
    target, phases = h.setting('kl_target'), int(limit('kl_error_phases'))
    values = h.last('rollout/kl_mean', phases)
    if target is None or len(values) < phases:
        return None
    errors = [value / target - 1.0 for value in values]
    bound = limit('kl_error')
    above, below = all(e > bound for e in errors), all(e < -bound for e in errors)
    nearer = abs(median(errors[-NOW:])) < 0.9 * abs(median(errors[:NOW]))
    if not (above or below) or nearer:
        return None
    first, now = h.values('rollout/kl_coef')[-phases], h.values('rollout/kl_coef')[-1]
    factor = (now / first) ** (1 / (phases - 1))
    side = 'above' if above else 'below'
    if above:
        change = f'divide kl_horizon by 4 (the coefficient grows {factor:.3g} times a phase now), or lr by 2'
        cause = 'the coefficient moves as fast as it may, and the policy faster'
    else:
        change = 'set kl_target to what is reached, or multiply lr by 2; a coefficient near 0 holds nothing back later'
        cause = 'the policy does not move as far as the target, so the coefficient only falls'
    return Finding(
        key='kl-coef-at-limit',
        step=h.step,
        level='warning',
        title='the adaptive KL coefficient is at its limit',
        evidence=f'{phases} phases in a row the KL was {side} its target of {target:g} (now '
        f'{median(values[-NOW:]):.3g}) and came no nearer, while kl_coef went from {first:.3g} to {now:.3g}',
        cause=cause,
        change=change,
    )
