"""The ratio π/π_old: 1 right after a rollout, and clipped now and then."""

from __future__ import annotations

from statistics import median

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import NOW, History
from chatgpt.doctor.limits import limit

CAUSES = (
    'a model in train mode or with dropout while collecting or learning; weights or autocast of another dtype; a mask '
    'or a position shifted by a token; another temperature in learning than in sampling; an engine with stale weights'
)
KEY = 'ratio-not-one'


def ratio_not_one(h: History) -> Finding | None:
    error, kl = h.newest('ppo/first_ratio_error'), h.newest('ppo/first_approx_kl')
    if error is None or kl is None:
        return None
    exact = h.computes_in_fp32
    most, most_kl = (
        (limit('ratio_error'), limit('ratio_error')) if exact else (limit('ratio_error_half'), limit('ratio_kl_half'))
    )
    if error <= most and abs(kl) <= most_kl:
        return None
    return Finding(
        key=KEY,
        step=h.step,
        level='error',
        title='the ratio right after a rollout is not 1',
        evidence=f'|ratio - 1| {error:.2g} (at most {most:g} is rounding), approximate KL {kl:.2g} (at most '
        f'{most_kl:g})',
        cause=CAUSES,
        change='find which of these it is: every gradient is taken against the wrong policy until then; '
        'recompute_logprobs=True takes the old log-probs from the trainer and hides an inexact engine',
    )


def clip_fraction_high(h: History) -> Finding | None:
    name = 'ppo/clip_fraction'
    if h.count(name) < NOW or h.now(name) <= limit('clip_high'):
        return None
    epochs, rate = h.setting('max_epochs', 1), h.highest('ppo/lr', 0.0)
    fewer = f', or max_epochs from {epochs} to {epochs // 2}' if epochs > 1 else ''
    return Finding(
        key='clip-fraction-high',
        step=h.step,
        level='warning',
        title='most of a phase is clipped away',
        evidence=f'clip fraction {h.now(name):.2f} over the last {NOW} phases, approximate KL '
        f'{h.now("ppo/approx_kl_k3"):.2g} nats per token',
        cause='the policy moves too far in one phase: the learning rate is too high, or there are too many updates of '
        'it',
        change=f'lr from {rate:.1g} to {rate / 3:.1g}{fewer}; target_kl=0.02 ends a phase in time',
    )


def clip_fraction_zero(h: History) -> Finding | None:
    name, phases = 'ppo/clip_fraction', int(limit('min_phases'))
    if h.count(name) < phases or h.updates_per_phase < 2 or any(h.last(name, phases)):
        return None
    if h.setting('policy_loss', 'ppo') == 'reinforce':
        return None
    pairs = zip(h.last('ppo/ratio_max', phases), h.last('ppo/ratio_min', phases), strict=False)
    off = median(max(high - 1.0, 1.0 - low) for high, low in pairs)
    if off > limit('clip_zero_ratio'):
        return None
    rate = h.highest('ppo/lr', 0.0)
    return Finding(
        key='clip-fraction-zero',
        step=h.step,
        level='note',
        title='the clip never acts',
        evidence=f'no token clipped in {phases} phases; the farthest ratio of a phase is {off:.1g} from 1, in '
        f'{h.updates_per_phase:.0f} updates of a phase',
        cause='updates so small that most of what a phase could teach is left unused',
        change=f'lr from {rate:.1g} to {3 * rate:.1g}, or twice as many max_epochs',
    )
