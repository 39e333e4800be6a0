"""The policy's entropy."""

from __future__ import annotations

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import NOW, START, History
from chatgpt.doctor.limits import limit


def entropy_collapses(h: History) -> Finding | None:
    name = 'ppo/entropy'
    if h.count(name) < START + NOW or not h.count('rollout/score_mean'):
        return None
    start, now = h.start(name), h.now(name)
    if start <= 0.0 or now > limit('entropy_share') * start:
        return None
    gain = h.now('rollout/score_mean') - h.start('rollout/score_mean')
    spread = h.start('rollout/score_std')
    if gain > limit('entropy_gain') * spread:
        return None  # sure of the right thing
    rate, bonus = h.highest('ppo/lr', 0.0), h.setting('entropy_coef', 0.0)
    return Finding(
        key='entropy-collapses',
        step=h.step,
        level='error',
        title='the entropy collapses',
        evidence=f'{start:.3g} -> {now:.2g} nats per token since the start, while the score gained {gain:+.2g} '
        f'(its standard deviation was {spread:.2g})',
        cause='the policy has become sure of one response before it found a better one',
        change=f'lr from {rate:.1g} to {rate / 3:.1g}, entropy_coef from {bonus:g} to {max(10 * bonus, 0.01):g}, or '
        'eps_clip_high=0.28, which lets unlikely tokens grow',
    )
