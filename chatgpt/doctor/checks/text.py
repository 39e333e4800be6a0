"""What responses look like: whether they repeat, how long they are, and how they end."""

from __future__ import annotations

from statistics import median

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import NOW, START, History
from chatgpt.doctor.limits import limit

LENGTH, ENDED = 'rollout/response_len_mean', 'rollout/ended_share'
CUT = 'environment/end_tokens_share'


def _lengths(h: History) -> list[float]:
    """Tokens that the policy says at once, by phase: of a response, or of a turn."""
    turns = h.values('environment/num_turns_mean')
    lengths = h.drawn_lengths()
    return [n / max(count, 1.0) for n, count in zip(lengths, turns, strict=False)] if turns else lengths


def repetition_within(h: History) -> Finding | None:
    found = _risen(h, 'rollout/repetition_within', limit('repetition_rise'))
    if found is None:
        return None
    return Finding(
        key='repetition-within',
        step=h.step,
        level='warning',
        title='responses repeat themselves',
        evidence=f'{found[0]:.0%} -> {found[1]:.0%} of the runs of four tokens in a response stood in it before',
        cause='the reward pays for the same words twice',
        change=_against_repetition(
            h, 'count what is repeated once in the reward, or subtract the repeated share from it'
        ),
    )


def repetition_across(h: History) -> Finding | None:
    found = _risen(h, 'rollout/repetition_across', limit('repetition_rise_across'))
    if found is None:
        return None
    return Finding(
        key='repetition-across',
        step=h.step,
        level='warning',
        title='responses to different prompts become the same',
        evidence=f'{found[0]:.0%} -> {found[1]:.0%} of the different runs of four tokens stand in another response too',
        cause='one text that scores well whatever the prompt',
        change=_against_repetition(h, 'let the reward see whether a response fits its prompt'),
    )


def _risen(h: History, name: str, rise: float) -> tuple[float, float] | None:
    if h.count(name) < START + NOW or median(_lengths(h)[-NOW:]) < limit('short_limit'):
        return None
    start, now = h.start(name), h.now(name)
    return (start, now) if now - start > rise else None


def _against_repetition(h: History, mend: str) -> str:
    coef = h.setting('kl_coef', 0.0)
    pull = f'kl_coef from {coef:g} to {2 * coef:g}' if coef else 'kl_coef=0.05'
    return f'{mend}; {pull}, or stop earlier'


def length_drifts(h: History) -> Finding | None:
    lengths = _lengths(h)
    if len(lengths) < START + NOW:
        return None
    start, now, factor = median(lengths[:START]), median(lengths[-NOW:]), limit('length_factor')
    if start / factor <= now <= start * factor or abs(now - start) < 2.0:
        return None
    longer = now > start
    return Finding(
        key='length-drifts',
        step=h.step,
        level='warning',
        title=f'{"turns" if h.has_episodes else "responses"} become {"longer" if longer else "shorter"}',
        evidence=f'{start:.3g} -> {now:.3g} tokens since the start, score {h.start("rollout/score_mean"):.3g} -> '
        f'{h.now("rollout/score_mean"):.3g}',
        cause=f'the reward prefers {"long" if longer else "short"} responses, whatever is in them'
        + (', or the loss weighs long ones less for each token' if longer else ''),
        change='look at the reward of a good response and of the same '
        + (
            'with a needless end: they should not differ; token_penalty=0.001 of the usual score per token, or '
            'overlong_buffer'
            if longer
            else 'cut in half: the half should score less; min_new_tokens, or missing_eos_score for cut ones'
        ),
    )


def length_limit(h: History) -> Finding | None:
    if h.count(ENDED) < NOW:
        return None
    # An episode may also end without an end of its own because its turns are used up, which is no want of room.
    whole = [1.0 - share for share in h.values(CUT)] if h.has_episodes else h.values(ENDED)
    ended = median(whole[-NOW:])
    cut, first = 1.0 - ended, 1.0 - median(whole[:START])
    if cut < limit('cut_share') or not ended:
        return None
    drifted = first <= limit('cut_share_start')
    room = h.generation('max_new_tokens')
    matters = _end_matters(h) or room is None or room >= limit('long_limit')
    from_start = matters and median(whole[:NOW]) >= limit('chance')
    if not (drifted or from_start) or (room is not None and room < limit('short_limit')):
        return None
    told = f'max_new_tokens={room}' if room else 'the limit of tokens'
    return Finding(
        key='length-limit',
        step=h.step,
        level='warning',
        title='responses hit the limit of tokens',
        evidence=f'{cut:.0%} of responses are cut at {told} ({first:.0%} at the start); mean length '
        f'{h.now(LENGTH):.3g}',
        cause='responses have grown into the limit'
        if drifted
        else 'the limit is shorter than what the model wants to say',
        change=f'max_new_tokens to {2 * room if room else "twice as many"}, or make an end worth it: missing_eos_score '
        'one standard deviation below the mean score, or overlong_filter=True',
    )


def never_ends(h: History) -> Finding | None:
    if h.count(ENDED) < NOW or any(h.last(ENDED, NOW)) or h.has_episodes:
        return None  # the environment ends an episode, not an end token
    room, least = h.generation('max_new_tokens'), h.generation('min_new_tokens') or 0
    if room is not None and least >= room:
        return None  # that is how they were asked for
    once = h.start(ENDED) >= 1.0 - limit('cut_share')  # where few did, pieces may be what is wanted
    matters = _end_matters(h)
    pieces = room is not None and room < (limit('short_limit') if once or matters else limit('long_limit'))
    if pieces:
        return None
    return Finding(
        key='never-ends',
        step=h.step,
        level='warning' if once or matters else 'note',
        title='no response ends',
        evidence=f'not one end token in the last {NOW} phases'
        + (f' (max_new_tokens={room})' if room else '')
        + f'; {h.start(ENDED):.0%} of responses ended at the start',
        cause='the end token has become unlikely'
        if once
        else 'a model that never saw the end token in a loss (padding and end token are one id, or data without '
        'ends), or a limit too short to reach it',
        change='missing_eos_score one standard deviation below the mean score'
        if once
        else 'check that demonstrations end with the end token, that it counts in the loss and is not the padding '
        'token; then eos_token_id of generation',
    )


def _end_matters(h: History) -> bool:
    """The run asks for responses that end."""
    return h.setting('missing_eos_score') is not None or bool(h.setting('overlong_filter', False))


def ends_at_once(h: History) -> Finding | None:
    phases = int(limit('equal_phases'))
    lengths, ended = h.last(LENGTH, phases), h.last(ENDED, phases)
    if len(lengths) < phases or h.generation('max_new_tokens') == 1 or h.has_episodes:
        return None  # a turn may well be a word
    if max(lengths) > limit('at_once_len') or min(ended) < 0.9:
        return None
    return Finding(
        key='ends-at-once',
        step=h.step,
        level='error',
        title='responses end at once',
        evidence=f'{median(lengths):.3g} tokens a response in the last {phases} phases, {min(ended):.0%} of them ended',
        cause='prompts that already end with the end token, a chat template that the model was not trained with, or a '
        'reward that pays for saying nothing',
        change='print the last token ids of a prompt; min_new_tokens=4; give an empty response the lowest score',
    )
