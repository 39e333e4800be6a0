"""Where the time goes."""

from __future__ import annotations

from collections import Counter
from statistics import median

from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import NOW, History
from chatgpt.doctor.limits import limit


def slow_rank(h: History) -> Finding | None:
    ranks, seconds, others = (h.last(f'perf/{n}', NOW) for n in ('slowest_rank', 'slowest_rank_s', 'other_ranks_s'))
    if len(ranks) < NOW:
        return None
    rank, times = Counter(ranks).most_common(1)[0]
    slow = [a / b for r, a, b in zip(ranks, seconds, others, strict=True) if r == rank and b > 0.0]
    offending = [factor for factor in slow if factor > limit('slow_rank')]
    if times < NOW - 1 or len(offending) < NOW - 1:
        return None
    return Finding(
        key='slow-rank',
        step=h.step,
        level='warning',
        title='one rank is slow',
        evidence=f'rank {rank:.0f} takes {median(seconds):.3g} s to generate its share where the others take '
        f'{median(others):.3g} s ({median(offending):.2g} times), in {len(offending)} of the last {NOW} phases',
        cause='another job on its processor or GPU, a GPU that throttles, or a slower machine; all ranks wait for it',
        change='look at nvidia-smi or top on its machine; leave that machine out of the job if nothing else runs there',
    )


def time_elsewhere(h: History) -> Finding | None:
    if h.count('perf/other_s') < NOW or not h.count('perf/total_s'):
        return None
    other, known = h.now('perf/other_s'), h.now('perf/total_s')
    whole = other + known
    if whole < limit('phase_s'):
        return None
    if other > limit('other_share') * whole:
        return _finding(
            h,
            f'{other:.3g} of {whole:.3g} s of a phase lie outside of collecting, scoring and learning',
            'evaluation, checkpoints, trackers or a callback of your own after each phase, or a slow disk',
            'raise the interval of Evaluator and SaveCheckpoint until this is a tenth; in a callback of your own, '
            'time it',
        )
    score = h.now('perf/score_s') if h.count('perf/score_s') else 0.0
    reward = h.record.reward if h.record is not None else None
    is_function = isinstance(reward, str) and 'Reward' not in reward and 'Pipeline' not in reward
    if is_function and score > limit('score_share') * whole:
        return _finding(
            h,
            f'{score:.3g} of {whole:.3g} s of a phase go into scoring, where the reward is the function {reward}',
            'a reward function that calls a service or another model one response at a time',
            'make it async (all calls then run at once) or let it work on the whole batch; with a remote engine, '
            'max_staleness=1 hides it behind generation',
        )
    return None


def _finding(h: History, evidence: str, cause: str, change: str) -> Finding:
    return Finding(
        key='time-elsewhere',
        step=h.step,
        level='note',
        title='time goes where it is not expected',
        evidence=evidence,
        cause=cause,
        change=change,
    )
