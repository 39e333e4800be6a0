"""Checks of prompts, scores and responses."""

from __future__ import annotations

import math
from statistics import median

from chatgpt.monitor.doctor.finding import Seen, check
from chatgpt.monitor.doctor.history import NOW, START, History
from chatgpt.monitor.doctor.limits import LIMITS


@check('few-prompts', 'warning', 'the prompt set is too small')
def few_prompts(h: History) -> Seen | None:
    distinct = h.data('distinct')
    if not distinct or distinct >= LIMITS['few_prompts'] or h.has_episodes:
        return None  # an environment makes a new task for each episode
    size = h.setting('experience_batch_size', 8)
    times = h.step * size * h.setting('update_timesteps', 1) / distinct  # at least: a program's `fit` may have more
    if times < LIMITS['prompt_passes']:
        return None
    return Seen(
        f'{distinct} different prompts ({h.data("prompts")} in all), each drawn {times:.0f} times by now',
        'a file of a few examples, or max_prompts left from a trial',
        f'at least {LIMITS["few_prompts"]:.0f} prompts, better as many as the run draws: {size} a timestep',
    )


@check('duplicate-prompts', 'note', 'many prompts stand there more than once', unless=('few-prompts',))
def duplicate_prompts(h: History) -> Seen | None:
    prompts, distinct = h.data('prompts'), h.data('distinct')
    if not prompts or not distinct or 1.0 - distinct / prompts <= LIMITS['duplicates'] or h.has_episodes:
        return None
    return Seen(
        f'{prompts} prompts, {distinct} different ones ({1 - distinct / prompts:.0%} are repetitions)',
        'files joined twice, rows that differ only in columns that the prompt does not show, or prompts cut to '
        'the same end',
        f'remove the {prompts - distinct} repetitions, unless their weight is meant',
    )


@check('cut-prompts', 'warning', 'prompts are cut')
def cut_prompts(h: History) -> Seen | None:
    prompts, cut = h.data('prompts'), h.data('cut')
    if not prompts or not cut or cut / prompts <= LIMITS['cut_prompts']:
        return None
    limit = h.setting('max_prompt_tokens')
    return Seen(
        f'{cut} of {prompts} prompts ({cut / prompts:.0%}) are longer than the room for them'
        + (f', max_prompt_tokens={limit},' if limit else '')
        + ' and lost their beginning',
        'a limit shorter than the data; the beginning, often the instruction, goes first',
        f'max_prompt_tokens to {2 * limit if limit else "twice as many"}, or leave out what is longer: '
        "load_prompts(overflow='refuse', skip_bad_records=True), or with a command skip_bad_records without "
        'max_prompt_tokens',
    )


MEAN, STD = 'rollout/score_mean', 'rollout/score_std'


@check('scores-equal', 'error', 'all scores are equal')
def scores_equal(h: History) -> Seen | None:
    size = h.setting('experience_batch_size', 8) * h.setting('num_samples_per_prompt', 1)
    size *= h.setting('update_timesteps', 1)
    phases = max(int(LIMITS['equal_phases']), math.ceil(LIMITS['equal_responses'] / size))
    low, high = h.last('rollout/score_min', phases), h.last('rollout/score_max', phases)
    if len(low) < phases or low != high:
        return None
    if len(set(low)) > 1:
        return None  # one response per phase
    if h.start(STD) > 0.0 and low[-1] >= h.highest('rollout/score_max'):
        return None  # they differed before and are at the maximum now: the score saturates
    return Seen(
        f'every response of the last {phases} phases scored {low[-1]:.4g}, at least {phases * size} responses',
        'a reward that tells no response of this policy from another: a bug in it, a task far too hard, or one '
        'that is solved',
        'print the reward of ten responses by hand; give a part of the score for a part of the answer, or '
        'easier prompts',
    )


@check('score-saturates', 'note', 'the score saturates', unless=('scores-equal',))
def score_saturates(h: History) -> Seen | None:
    if h.count(STD) < START + NOW:
        return None
    start, now = h.start(STD), h.now(STD)
    if start <= 0.0 or now > LIMITS['saturated_std'] * start:
        return None
    highest = h.highest('rollout/score_max')
    return Seen(
        f'standard deviation of scores {start:.3g} -> {now:.2g} since the start, mean '
        f'{h.start(MEAN):.3g} -> {h.now(MEAN):.3g}, the highest so far {highest:.3g}',
        'almost all responses get the same score, so there is nothing left to learn from it',
        'stop here, take harder prompts, or a reward with more steps at its upper end',
    )


@check('reward-outliers', 'warning', 'the reward has outliers')
def reward_outliers(h: History) -> Seen | None:
    if not h.count('rollout/score_mad'):
        return None
    usual = h.start('rollout/score_mad')  # a good policy has a small deviation, far below its few bad responses

    def size(mean: float, low: float, high: float, std: float, mad: float) -> float:
        robust = 1.4826 * max(mad, usual)
        if robust <= 0.0 or std <= LIMITS['outlier_weight'] * robust:
            return 0.0
        return max(high - mean, mean - low) / robust

    names = (MEAN, 'rollout/score_min', 'rollout/score_max', STD, 'rollout/score_mad')
    sizes = [size(*numbers) for numbers in zip(*(h.last(name, 10) for name in names), strict=False)]
    offending = [s for s in sizes if s > LIMITS['outlier_size']]
    if len(offending) < 2:
        return None
    mean, std = h.values(MEAN)[-1], h.values(STD)[-1]
    mad = max(h.values('rollout/score_mad')[-1], usual)
    robust, scaling = 1.4826 * mad, h.setting('score_scaling', 'none')
    if not _forms_a_sum(h):
        change = 'bound each of the rewards in its function'
    elif scaling == 'none' and abs(mean) <= robust:
        change = f'score_clip={5 * robust:.2g}: five robust standard deviations (the ordinary one is {std:.2g})'
    else:
        change = '' if scaling == 'norm' else "score_scaling='norm', "  # clips around the mean
        change += f'score_clip={5 * robust / std:.2g}: five robust standard deviations, in units of the ordinary one'
    return Seen(
        f'in {len(offending)} of {len(sizes)} phases a score was up to {max(offending):.0f} robust standard '
        f'deviations from the mean; now they lie in [{h.values("rollout/score_min")[-1]:.3g}, '
        f'{h.values("rollout/score_max")[-1]:.3g}] with a median deviation of {mad:.2g}',
        'a few responses with extreme scores, which set the size of all advantages',
        change,
    )


def _forms_a_sum(h: History) -> bool:
    """Returns False if the estimator takes each of several rewards alone: the settings that change the score then do
    nothing, and are refused."""
    return bool(h.setting('advantage_estimator') != 'gdpo')


@check('reward-model-disagrees', 'error', 'the reward model disagrees with itself')
def reward_model_disagrees(h: History) -> Seen | None:
    error = h.newest('rollout/rescore_error')
    if error is None:
        return None
    std = h.values(STD)[-1]
    share = LIMITS['rescore' if h.computes_in_fp32 else 'rescore_half']
    rounding = (1e-5 if h.computes_in_fp32 else 1e-2) * max(
        abs(h.values('rollout/score_min')[-1]), abs(h.values('rollout/score_max')[-1])
    )
    if error <= max(share * std, rounding):
        return None
    return Seen(
        f'scored again, alone in a batch, a response got a score {error:.2g} away from the first; the '
        f'standard deviation of scores is {std:.2g}',
        'dropout or batch statistics in the reward model, or padding that it sees: a mask or position ids are lost',
        'reward_model.eval(); compare its score of one text alone and beside a longer one: they must agree to '
        f'{1e-5 if h.computes_in_fp32 else 1e-2:g}',
    )


@check('groups-without-signal', 'warning', 'most groups teach nothing', unless=('scores-equal',))
def groups_without_signal(h: History) -> Seen | None:
    if h.has_critic or h.setting('advantage_estimator') == 'reinforce++':
        return None  # advantages are not relative to the group
    informative = 'rollout/informative_share'
    name = 'rollout/equal_groups_share'
    equal = [1.0 - v for v in h.last(informative, NOW)] if h.count(informative) else h.last(name, NOW)
    if len(equal) < NOW or sorted(equal)[NOW // 2] <= LIMITS['equal_groups']:
        return None
    if h.solved_share >= LIMITS['solved']:
        return None
    low, high = h.lowest('rollout/score_min'), h.highest('rollout/score_max')
    size = h.setting('num_samples_per_prompt', 2)
    return Seen(
        f'{sorted(equal)[NOW // 2]:.0%} of groups have equal scores within; mean score {h.now(MEAN):.3g} of '
        f'[{low:.3g}, {high:.3g}]',
        'prompts that this policy always fails (or always solves), and a reward of few steps',
        f'num_samples_per_prompt from {size} to {2 * size}, dynamic_sampling_rounds=3, or easier prompts',
    )


LENGTH, ENDED = 'rollout/response_len_mean', 'rollout/ended_share'
CUT = 'environment/end_tokens_share'


def _lengths(h: History) -> list[float]:
    """Returns the mean number of tokens of a response, or of a turn, by phase."""
    turns = h.values('environment/num_turns_mean')
    lengths = h.drawn_lengths()
    return [n / max(count, 1.0) for n, count in zip(lengths, turns, strict=False)] if turns else lengths


@check('repetition-within', 'warning', 'responses repeat themselves')
def repetition_within(h: History) -> Seen | None:
    found = _risen(h, 'rollout/repetition_within', LIMITS['repetition_rise'])
    if found is None:
        return None
    return Seen(
        f'{found[0]:.0%} -> {found[1]:.0%} of the runs of four tokens in a response stood in it before',
        'the reward pays for the same words twice',
        _against_repetition(h, 'count what is repeated once in the reward, or subtract the repeated share from it'),
    )


@check('repetition-across', 'warning', 'responses to different prompts become the same', unless=('ends-at-once',))
def repetition_across(h: History) -> Seen | None:
    found = _risen(h, 'rollout/repetition_across', LIMITS['repetition_rise_across'])
    if found is None:
        return None
    return Seen(
        f'{found[0]:.0%} -> {found[1]:.0%} of the different runs of four tokens stand in another response too',
        'one text that scores well whatever the prompt',
        _against_repetition(h, 'let the reward see whether a response fits its prompt'),
    )


def _risen(h: History, name: str, rise: float) -> tuple[float, float] | None:
    if h.count(name) < START + NOW or median(_lengths(h)[-NOW:]) < LIMITS['short_limit']:
        return None
    start, now = h.start(name), h.now(name)
    return (start, now) if now - start > rise else None


def _against_repetition(h: History, remedy: str) -> str:
    coef = h.setting('kl_coef', 0.0)
    pull = f'kl_coef from {coef:g} to {2 * coef:g}' if coef else 'kl_coef=0.05'
    return f'{remedy}; {pull}, or stop earlier'


@check('ends-at-once', 'error', 'responses end at once')
def ends_at_once(h: History) -> Seen | None:
    phases = int(LIMITS['equal_phases'])
    lengths, ended = h.last(LENGTH, phases), h.last(ENDED, phases)
    if len(lengths) < phases or h.generation('max_new_tokens') == 1 or h.has_episodes:
        return None  # a turn may be one word
    if max(lengths) > LIMITS['at_once_len'] or min(ended) < 0.9:
        return None
    return Seen(
        f'{median(lengths):.3g} tokens a response in the last {phases} phases, {min(ended):.0%} of them ended',
        'prompts that already end with the end token, a chat template that the model was not trained with, or a '
        'reward that pays for saying nothing',
        'print the last token ids of a prompt; min_new_tokens=4; give an empty response the lowest score',
    )


@check('never-ends', 'warning', 'no response ends')
def never_ends(h: History) -> Seen | None:
    if h.count(ENDED) < NOW or any(h.last(ENDED, NOW)) or h.has_episodes:
        return None  # the environment ends an episode, not an end token
    limit, least = h.generation('max_new_tokens'), h.generation('min_new_tokens') or 0
    if limit is not None and least >= limit:
        return None  # responses cannot end before the limit
    once = h.start(ENDED) >= 1.0 - LIMITS['cut_share']  # if few ended at the start, cut texts may be intended
    matters = _end_matters(h)
    pieces = limit is not None and limit < (LIMITS['short_limit'] if once or matters else LIMITS['long_limit'])
    if pieces:
        return None
    return Seen(
        f'not one end token in the last {NOW} phases'
        + (f' (max_new_tokens={limit})' if limit else '')
        + f'; {h.start(ENDED):.0%} of responses ended at the start',
        'the end token has become unlikely'
        if once
        else 'a model that never saw the end token in a loss (padding and end token are one id, or data without '
        'ends), or a limit too short to reach it',
        _worth_an_end(h)
        if once
        else 'check that demonstrations end with the end token, that it counts in the loss and is not the padding '
        'token; then eos_token_id of generation',
        level='warning' if once or matters else 'note',
    )


def _end_matters(h: History) -> bool:
    """Returns True if the settings penalise responses that do not end."""
    return h.setting('missing_eos_score') is not None or bool(h.setting('overlong_filter', False))


def _worth_an_end(h: History) -> str:
    """Returns the settings that make a response with an end better than one without."""
    if not _forms_a_sum(h):
        return 'a reward of its own for an end'
    text = 'missing_eos_score one standard deviation below the mean score'
    return f'overlong_filter=False and {text}' if h.setting('overlong_filter', False) else text


@check('length-limit', 'warning', 'responses hit the limit of tokens', unless=('never-ends',))
def length_limit(h: History) -> Seen | None:
    if h.count(ENDED) < NOW:
        return None
    # An episode may also be cut by max_turns, which is not the limit of tokens.
    whole = [1.0 - share for share in h.values(CUT)] if h.has_episodes else h.values(ENDED)
    ended = median(whole[-NOW:])
    cut, first = 1.0 - ended, 1.0 - median(whole[:START])
    if cut < LIMITS['cut_share']:
        return None
    drifted = first <= LIMITS['cut_share_start']
    limit = h.generation('max_new_tokens')
    matters = _end_matters(h) or limit is None or limit >= LIMITS['long_limit']
    from_start = matters and (h.has_episodes or median(whole[:NOW]) >= LIMITS['chance'])
    if not (drifted or from_start) or (limit is not None and limit < LIMITS['short_limit']):
        return None
    where = f'max_new_tokens={limit}' if limit else 'the limit of tokens'
    return Seen(
        f'{cut:.0%} of responses are cut at {where} ({first:.0%} at the start); mean length {h.now(LENGTH):.3g}',
        'responses have grown into the limit' if drifted else 'the limit is shorter than what the model wants to say',
        f'max_new_tokens to {2 * limit if limit else "twice as many"}, or make an end worth it: '
        + _worth_an_end(h)
        + ('' if _end_matters(h) else ', or overlong_filter=True'),
    )


@check(
    'length-drifts', 'warning', 'the length of responses drifts', unless=('ends-at-once', 'length-limit', 'never-ends')
)
def length_drifts(h: History) -> Seen | None:
    lengths = _lengths(h)
    if len(lengths) < START + NOW:
        return None
    start, now, factor = median(lengths[:START]), median(lengths[-NOW:]), LIMITS['length_factor']
    if start / factor <= now <= start * factor or abs(now - start) < 2.0:
        return None
    longer, sums = now > start, _forms_a_sum(h)
    return Seen(
        f'{start:.3g} -> {now:.3g} tokens since the start, score {h.start("rollout/score_mean"):.3g} -> '
        f'{h.now("rollout/score_mean"):.3g}',
        f'the reward prefers {"long" if longer else "short"} responses, whatever is in them'
        + (', or the loss weighs long ones less for each token' if longer else ''),
        'look at the reward of a good response and of the same '
        + (
            'with a needless end: they should not differ; '
            + (
                'token_penalty=0.001 of the usual score per token, or overlong_buffer'
                if sums
                else 'a reward for short responses'
            )
            if longer
            else 'cut in half: the half should score less; min_new_tokens'
            + (f', or for cut ones {_worth_an_end(h)}' if sums else '')
        ),
        title=f'{"turns" if h.has_episodes else "responses"} become {"longer" if longer else "shorter"}',
    )
