"""The critic: its share of the loss, and what it explains."""

from __future__ import annotations

from statistics import median

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import NOW, History
from chatgpt.doctor.learning_rate import recommended_lr
from chatgpt.doctor.limits import limit


def value_loss_dominates(h: History) -> Finding | None:
    if not h.shares_trunk or h.count('ppo/value_loss') < NOW:
        return None
    coef, loss = h.setting('value_coef', 0.1), h.now('ppo/value_loss')
    term, norm, most = coef * loss, h.now('ppo/actor_grad_norm'), h.setting('max_grad_norm', 1.0)
    if term <= limit('value_term') or norm <= most:
        return None
    wanted = coef * 0.1 / term
    return Finding(
        key='value-loss-dominates',
        step=h.step,
        level='warning',
        title='the value loss dominates',
        evidence=f'value_coef {coef:g} x value loss {loss:.3g} = {term:.3g}, where the policy term is about 0.8; '
        f'gradient norm {norm:.3g} is clipped to {most:g}, so little of the policy is left in it',
        cause="returns far from 0 with a value head on the policy's own trunk",
        change=f"score_scaling='running', which makes returns about 1, or value_coef from {coef:g} to {wanted:.1g}",
    )


def explained_variance_low(h: History) -> Finding | None:
    name, phases = 'ppo/explained_variance', int(limit('variance_median'))
    if not h.has_critic or h.count(name) < limit('variance_phases'):
        return None
    now = median(h.last(name, phases))
    if now > 0.0 or h.now('ppo/return_var') <= 1e-12 or h.solved_share >= limit('solved'):
        return None
    which = 'critic_lr' if h.count('ppo/critic_lr') else 'lr'
    rate = h.highest(f'ppo/{which}', 0.0)
    parameters = (h.record.models if h.record is not None else {}).get('critic', {}).get('parameters')
    rule = recommended_lr(parameters, 'rm') if parameters else rate
    high = rate > 3 * rule
    return Finding(
        key='explained-variance-low',
        step=h.step,
        level='warning',
        title='the critic explains nothing',
        evidence=f'explained variance {now:.2f} in the median of {phases} phases, at phase {h.step}; a constant has 0',
        cause='a learning rate too high for a critic of this size'
        if high
        else 'a critic that learns too slowly, starts too far off, or whose target has no part that the text tells',
        change=f'{which} from {rate:.1g} to {rule if high else 3 * rate:.1g}; begin it from the reward model '
        "(Critic.from_reward_model); or do without one: advantage_estimator='rloo', num_samples_per_prompt=4",
    )
