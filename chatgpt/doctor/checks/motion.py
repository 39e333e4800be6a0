"""Nothing moves: the policy stays what it was, or the loss of a supervised run where it was."""

from __future__ import annotations

from statistics import fmean, median

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import NOW, START, History
from chatgpt.doctor.learning_rate import recommended_lr
from chatgpt.doctor.limits import limit

KEY = 'nothing-moves'
AT_CHANCE = ('rm', 'dpo')
"""whose accuracy begins at one half"""


def nothing_moves(h: History) -> Finding | None:
    if h.learning is None or _warming_up(h):
        return None
    return _policy(h) if h.is_online else _supervised(h)


def _warming_up(h: History) -> bool:
    steps = h.setting('warmup_steps', 0)
    return bool(steps) and (h.count('ppo/num_updates') == 0 or h.values('ppo/num_updates')[-1] < 2 * steps)


def _policy(h: History) -> Finding | None:
    if h.step < limit('min_phases') or (h.values('ppo/num_updates') or [0.0])[-1] < limit('min_updates'):
        return None
    if h.now('rollout/score_std') == 0.0:
        return None  # there is nothing to learn from, which is another finding
    seen = []
    length = max(median(h.drawn_lengths()[-NOW:]), 1.0)
    if h.highest('rollout/kl_k3_mean') > 0.0:
        per_token = h.now('rollout/kl_k3_mean') / length
        if per_token > limit('still_kl'):
            return None
        seen.append(f'KL to the initial model {per_token:.1g} nats per token')
    if h.updates_per_phase > 1 and h.count('ppo/ratio_max'):
        pairs = zip(h.last('ppo/ratio_max', NOW), h.last('ppo/ratio_min', NOW), strict=False)
        off = median(max(high - 1.0, 1.0 - low) for high, low in pairs)
        if off > limit('still_ratio'):
            return None
        seen.append(f'ratio within {off:.1g} of 1')
    if not seen:
        return None
    updates = h.values('ppo/num_updates')[-1]
    return _finding(h, 'ppo/lr', f'after {h.step} phases and {updates:.0f} optimizer steps {", ".join(seen)}')


def _supervised(h: History) -> Finding | None:
    prefix = h.learning or ''
    name, accuracy = f'{prefix}/loss', f'{prefix}/accuracy'
    if h.count(name) < START + NOW:
        return None
    start, now = h.start(name), h.now(name)
    if prefix in AT_CHANCE and h.count(accuracy):
        # New weights begin with a loss above that of guessing, and lose that much without learning anything.
        off = fmean(h.last(accuracy, START + NOW)) - 0.5
        still, at_chance = off <= limit('chance'), off <= limit('chance_late')
    else:
        at_chance = False
        still = start - now <= limit('still_loss') * abs(start)
    if not still:
        return None
    rate, rule = _rates(h, f'{prefix}/lr')
    low = rate is not None and rule is not None and rate * limit('low_lr') <= rule
    # That the data hold nothing to learn shows only in the long run.
    late = h.num_phases is not None and h.step >= max(limit('late') * h.num_phases, 2 * limit('min_phases'))
    if not (low or (at_chance and late)):
        return None
    told = f', accuracy {fmean(h.last(accuracy, START + NOW)):.2f}' if h.count(accuracy) else ''
    return _finding(h, f'{prefix}/lr', f'in {h.step} logged phases {name} went from {start:.4g} to {now:.4g}{told}')


def _rates(h: History, name: str) -> tuple[float | None, float | None]:
    """The highest learning rate so far, and the rule for this size."""
    rates, parameters = h.values(name), h.trained.get('parameters')
    rule = recommended_lr(parameters, h.learning or 'sft', h.trained.get('trained')) if parameters else None
    return (max(rates) if rates else None), rule


def _finding(h: History, lr_name: str, evidence: str) -> Finding:
    rate, rule = _rates(h, lr_name)
    parameters = h.trained.get('parameters')
    told = f', lr {rate:.1g}' if rate is not None else ''
    told += f', {parameters:,} parameters' if parameters else ''
    if rate is not None and rule is not None and rate * limit('low_lr') > rule:
        cause = (
            'the learning rate fits the size, so the data: labels without signal, answers that were cut to the same '
            'text, swapped columns'
        )
        change = f'look at some records as the trainer sees them; then try lr {3 * rule:.0e}'
    else:
        cause = 'the learning rate is too low for a model of this size'
        change = f'raise lr to {rule:.0e}' if rule is not None else 'raise lr tenfold, until the loss or the KL moves'
        change += f' ({rule / rate:.2g} times as much)' if rule is not None and rate else ''
    return Finding(
        key=KEY,
        step=h.step,
        level='warning',
        title='nothing moves',
        evidence=evidence + told,
        cause=cause,
        change=change,
    )
