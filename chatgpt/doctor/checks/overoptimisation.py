"""What is optimised gets better and what is wanted gets worse: reward against evaluation, train loss against eval
loss."""

from __future__ import annotations

from statistics import median

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import History
from chatgpt.doctor.limits import limit

HIGHER = ('score', 'reward', 'accuracy', 'win', 'optimality', 'truth', 'true', 'correct', 'pass')
LOWER = ('loss', 'perplexity', 'error')
NO_GOALS = ('_std', '_min', '_max', '_best')


def overoptimisation(h: History) -> Finding | None:
    for name in h.names():
        if name.startswith('eval/') and not name.endswith(NO_GOALS):
            found = _of_metric(h, name)
            if found is not None:
                return found
    return None


def _sign(h: History, name: str) -> int:
    """1 where higher is better, −1 where lower is, 0 where that is not known."""
    best = h.values(f'{name}_best')
    if len(best) >= 3 and len(best) == h.count(name):
        values = h.values(name)
        if any(v < b for v, b in zip(values, best, strict=True)):
            return 1
        if any(v > b for v, b in zip(values, best, strict=True)):
            return -1
    if any(word in name for word in LOWER):
        return -1
    return 1 if any(word in name for word in HIGHER) else 0


def _of_metric(h: History, name: str) -> Finding | None:
    series, sign = h.series(name), _sign(h, name)
    if len(series) < 4 or sign == 0 or series[-1][0] != h.step:
        return None
    values = [sign * value for _, value in series]
    top = max(range(len(values)), key=lambda i: values[i])
    if top == 0 or len(values) - top < 3:
        return None
    noise = median(abs(b - a) for a, b in zip(values[: top + 1], values[1 : top + 1], strict=False))
    fall = values[top] - max(values[-2:])
    if fall <= max(limit('eval_fall') * (values[top] - values[0]), noise / 2):
        return None
    at = series[top][0]
    then, now = h.around('rollout/score_mean', at), h.now('rollout/score_mean') if h.is_online else None
    spread = h.around('rollout/score_std', at)
    if then is None or now is None or now - then <= limit('eval_score_gain') * (spread or 0.0):
        return None
    kl_then, kl_now = h.around('rollout/kl_mean', at), h.now('rollout/kl_mean')
    coef = h.setting('kl_coef', 0.0)
    return Finding(
        key='over-optimisation',
        step=h.step,
        level='error',
        title='the reward rises while the evaluation falls',
        evidence=f'{name} {series[top][1]:.3g} at phase {at} -> {series[-1][1]:.3g}, score {then:.3g} -> {now:.3g}, KL '
        f'{kl_then or 0.0:.3g} -> {kl_now:.3g} nats',
        cause='the policy has gone where the reward no longer measures what is wanted',
        change=f'take the checkpoint of phase {at}; to go further, kl_target={max(kl_then or 0.0, 1.0):.2g} or kl_coef '
        f'from {coef:g} to {max(3 * coef, 0.05):g}, and a reward model with pairs of responses of the new policy',
    )


def eval_loss_rises(h: History) -> Finding | None:
    if h.is_online or h.learning is None:
        return None
    train, val = f'{h.learning}/loss', f'{h.learning}/val_loss'
    series = h.series(val)
    if len(series) < 3 or series[-1][0] != h.step:
        return None
    lowest = min(range(len(series)), key=lambda i: series[i][1])
    at, best = series[lowest]
    if len(series) - lowest < 3 or best <= 0.0:
        return None
    if min(value for _, value in series[-2:]) <= limit('eval_loss_rise') * best:
        return None
    then = h.around(train, at)
    if then is None or h.now(train) >= then:
        return None
    epochs = [value for step, value in h.series(f'{h.learning}/epoch') if step == at]
    told = f', after {epochs[0]:.2g} epochs' if epochs else ''
    return Finding(
        key='eval-loss-rises',
        step=h.step,
        level='warning',
        title='the eval loss rises while the train loss falls',
        evidence=f'{val} {best:.4g} at phase {at} -> {series[-1][1]:.4g}, {train} {then:.4g} -> {h.now(train):.4g}',
        cause='the model learns its training records by heart',
        change=f'take the model of phase {at}{told}: max_epochs={max(round(epochs[0]), 1) if epochs else 1}; or more '
        'data, or StopOnPlateau on the eval loss',
    )
