"""Gradient norms."""

from __future__ import annotations

from statistics import median

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import History
from chatgpt.doctor.limits import limit

WINDOW = 20


def grad_norm_spikes(h: History) -> Finding | None:
    for name in h.names():
        if name.endswith('grad_norm_max'):
            found = _of_model(h, name)
            if found is not None:
                return found
    return None


def _of_model(h: History, name: str) -> Finding | None:
    tops, means = h.values(name), h.values(name.removesuffix('_max'))
    if len(tops) <= limit('min_phases'):
        return None
    spikes = []
    for i in range(max(len(tops) - WINDOW, int(limit('min_phases'))), len(tops)):
        usual = median(means[max(i - WINDOW, 0) : i])
        if usual > 0.0 and tops[i] > limit('spike') * usual:
            spikes.append((tops[i] / usual, tops[i], usual))
    if not spikes or (len(spikes) < limit('spikes') and max(spikes)[0] <= limit('spike_once')):
        return None
    times, top, usual = max(spikes)
    clip = h.setting('max_grad_norm')
    rate = h.highest(f'{name.split("/")[0]}/lr', 0.0)
    return Finding(
        key='grad-norm-spikes',
        step=h.step,
        level='warning',
        title='the gradient norm spikes',
        evidence=f'{name} {top:.3g}, {times:.0f} times its usual {usual:.2g}; {len(spikes)} such of the last {WINDOW} '
        'phases',
        cause='a train batch of odd data (one very long or empty text, an extreme score), or a learning rate at the '
        'edge',
        change=(
            f'max_grad_norm from {clip:g} to {min(clip, 2 * usual):.1g}' if clip else f'max_grad_norm={2 * usual:.1g}'
        )
        + f', lr from {rate:.1g} to {rate / 2:.1g}; look at the data of that phase',
    )
