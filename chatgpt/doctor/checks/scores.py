"""The scores of responses: whether they differ, whether they can still rise, whether they can be believed."""

from __future__ import annotations

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import NOW, START, History
from chatgpt.doctor.limits import limit

MEAN, STD = 'rollout/score_mean', 'rollout/score_std'


def scores_equal(h: History) -> Finding | None:
    phases = int(limit('equal_phases'))
    low, high = h.last('rollout/score_min', phases), h.last('rollout/score_max', phases)
    if len(low) < phases or low != high:
        return None
    if len(set(low)) > 1:
        return None  # one response a phase
    if h.start(STD) > 0.0 and low[-1] >= h.highest('rollout/score_max'):
        return None  # they differed and have all become right: the score saturates
    return Finding(
        key='scores-equal',
        step=h.step,
        level='error',
        title='all scores are equal',
        evidence=f'every response of the last {phases} phases scored {low[-1]:.4g}',
        cause='a reward that tells no response of this policy from another: a bug in it, a task far too hard, or one '
        'that is solved',
        change='print the reward of ten responses by hand; give a part of the score for a part of the answer, or '
        'easier prompts',
    )


def score_saturates(h: History) -> Finding | None:
    if h.count(STD) < START + NOW:
        return None
    start, now = h.start(STD), h.now(STD)
    if start <= 0.0 or now > limit('saturated_std') * start:
        return None
    highest = h.highest('rollout/score_max')
    return Finding(
        key='score-saturates',
        step=h.step,
        level='note',
        title='the score saturates',
        evidence=f'standard deviation of scores {start:.3g} -> {now:.2g} since the start, mean '
        f'{h.start(MEAN):.3g} -> {h.now(MEAN):.3g}, the highest so far {highest:.3g}',
        cause='almost all responses get the same score, so there is nothing left to learn from it',
        change='stop here, take harder prompts, or a reward with more steps at its upper end',
    )


def reward_outliers(h: History) -> Finding | None:
    if not h.count('rollout/score_mad'):
        return None
    usual = h.start('rollout/score_mad')  # a policy that does well has few bad responses, far from the many good ones

    def size(mean: float, low: float, high: float, std: float, mad: float) -> float:
        robust = 1.4826 * max(mad, usual)
        if robust <= 0.0 or std <= limit('outlier_weight') * robust:
            return 0.0
        return max(high - mean, mean - low) / robust

    names = (MEAN, 'rollout/score_min', 'rollout/score_max', STD, 'rollout/score_mad')
    sizes = [size(*numbers) for numbers in zip(*(h.last(name, 10) for name in names), strict=False)]
    offending = [s for s in sizes if s > limit('outlier_size')]
    if len(offending) < 2:
        return None
    std, mad = h.values(STD)[-1], max(h.values('rollout/score_mad')[-1], usual)
    return Finding(
        key='reward-outliers',
        step=h.step,
        level='warning',
        title='the reward has outliers',
        evidence=f'in {len(offending)} of {len(sizes)} phases a score was up to {max(offending):.0f} robust standard '
        f'deviations from the mean; now they lie in [{h.values("rollout/score_min")[-1]:.3g}, '
        f'{h.values("rollout/score_max")[-1]:.3g}] with a median deviation of {mad:.2g}',
        cause='a few responses with extreme scores, which set the size of all advantages',
        change=f'score_clip={_round(5 * 1.4826 * mad)} cuts at five robust standard deviations (the ordinary one is '
        f"{std:.2g}); with score_scaling='running', score_clip=5",
    )


def _round(value: float) -> str:
    return f'{value:.2g}'


def reward_model_disagrees(h: History) -> Finding | None:
    error = h.newest('rollout/rescore_error')
    if error is None:
        return None
    std = h.values(STD)[-1]
    share = limit('rescore' if h.computes_in_fp32 else 'rescore_half')
    rounding = 1e-5 * max(abs(h.values('rollout/score_min')[-1]), abs(h.values('rollout/score_max')[-1]))
    if error <= max(share * std, rounding):
        return None
    return Finding(
        key='reward-model-disagrees',
        step=h.step,
        level='error',
        title='the reward model disagrees with itself',
        evidence=f'scored again, alone in a batch, a response got a score {error:.2g} away from the first; the '
        f'standard deviation of scores is {std:.2g}',
        cause='dropout or batch statistics in the reward model, or padding that it sees: a mask or position ids are '
        'lost',
        change='reward_model.eval(); compare its score of one text alone and beside a longer one: they must agree to '
        f'{1e-5 if h.computes_in_fp32 else 1e-2:g}',
    )


def groups_without_signal(h: History) -> Finding | None:
    drawn = 'rollout/informative_share'
    name = 'rollout/equal_groups_share'
    equal = [1.0 - v for v in h.last(drawn, NOW)] if h.count(drawn) else h.last(name, NOW)
    if len(equal) < NOW or sorted(equal)[NOW // 2] <= limit('equal_groups'):
        return None
    if h.solved_share >= limit('solved'):
        return None
    low, high = h.lowest('rollout/score_min'), h.highest('rollout/score_max')
    size = h.setting('num_samples_per_prompt', 2)
    return Finding(
        key='groups-without-signal',
        step=h.step,
        level='warning',
        title='most groups teach nothing',
        evidence=f'{sorted(equal)[NOW // 2]:.0%} of groups have equal scores within; mean score {h.now(MEAN):.3g} of '
        f'[{low:.3g}, {high:.3g}]',
        cause='prompts that this policy always fails (or always solves), and a reward of few steps',
        change=f'num_samples_per_prompt from {size} to {2 * size}, dynamic_sampling_rounds=3, or easier prompts',
    )
