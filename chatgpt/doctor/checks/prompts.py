"""The prompt set: too small, with doubles, cut."""

from __future__ import annotations

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import History
from chatgpt.doctor.limits import limit


def few_prompts(h: History) -> Finding | None:
    distinct = h.data('distinct')
    if not distinct or distinct >= limit('few_prompts') or h.has_episodes:
        return None  # an environment sets a new task each time
    size = h.setting('experience_batch_size', 8)
    times = h.step * size / distinct  # at least: a phase may have several timesteps
    if times < limit('prompt_passes'):
        return None
    return Finding(
        key='few-prompts',
        step=h.step,
        level='warning',
        title='the prompt set is too small',
        evidence=f'{distinct} different prompts ({h.data("prompts")} in all), each drawn {times:.0f} times by now',
        cause='a file of a few examples, or max_prompts left from a trial',
        change=f'at least {limit("few_prompts"):.0f} prompts, better as many as the run draws: {size} a timestep',
    )


def duplicate_prompts(h: History) -> Finding | None:
    prompts, distinct = h.data('prompts'), h.data('distinct')
    if not prompts or not distinct or 1.0 - distinct / prompts <= limit('duplicates') or h.has_episodes:
        return None
    return Finding(
        key='duplicate-prompts',
        step=h.step,
        level='note',
        title='many prompts stand there more than once',
        evidence=f'{prompts} prompts, {distinct} different ones ({1 - distinct / prompts:.0%} are repetitions)',
        cause='files joined twice, rows that differ only in columns that the prompt does not show, or prompts cut to '
        'the same end',
        change=f'remove the {prompts - distinct} repetitions, unless their weight is meant',
    )


def cut_prompts(h: History) -> Finding | None:
    prompts, cut = h.data('prompts'), h.data('cut')
    if not prompts or not cut or cut / prompts <= limit('cut_prompts'):
        return None
    room = h.setting('max_prompt_tokens')
    return Finding(
        key='cut-prompts',
        step=h.step,
        level='warning',
        title='prompts are cut',
        evidence=f'{cut} of {prompts} prompts ({cut / prompts:.0%}) are longer than the room for them'
        + (f', max_prompt_tokens={room},' if room else '')
        + ' and lost their beginning',
        cause='a limit shorter than the data; the beginning, often the instruction, goes first',
        change=f'max_prompt_tokens to {2 * room if room else "twice as many"}, or leave out what is longer '
        "(overflow='refuse', skip_bad_records=True)",
    )
