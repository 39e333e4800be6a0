"""The learning-rate schedule against the length of the run."""

from __future__ import annotations

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import History
from chatgpt.doctor.limits import limit


def schedule_ends_early(h: History) -> Finding | None:
    name, phases = f'{h.learning}/lr', h.num_phases
    rates = h.values(name)
    if phases is None or len(rates) < 3 or max(rates) <= 0.0:
        return None
    left = phases - h.step
    if left < max(limit('schedule_left') * phases, 2) or max(rates[-2:]) > limit('schedule_lr') * max(rates):
        return None
    if rates.index(max(rates)) == len(rates) - 1:
        return None
    steps = h.setting('lr_decay_steps')
    return Finding(
        key='schedule-ends-early',
        step=h.step,
        level='warning',
        title='the learning rate is at its end before the run is',
        evidence=f'{name} {max(rates):.1g} -> {rates[-1]:.1g} with {left} of {phases} phases to come',
        cause=f'lr_decay_steps={steps} is shorter than the run'
        if steps
        else 'a schedule of another length than this run',
        change='leave lr_decay_steps out, which ends the decay with the run'
        + (f', or multiply it by {phases / h.step:.2g}' if steps else '')
        + '; or stop here',
    )
