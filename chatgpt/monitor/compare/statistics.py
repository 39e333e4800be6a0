"""Statistics of judgements: agreement, win rate and its confidence interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from chatgpt.monitor.compare.store import Store

Z = 1.959964
"""97.5 % quantile of the standard normal distribution, for intervals of 95 %"""


def krippendorff_alpha(units: Sequence[Sequence[Hashable]]) -> float | None:
    """Returns Krippendorff's α for nominal values: 1 − observed / expected disagreement. 1: full agreement, 0: chance.

    Source: Krippendorff (2011), Computing Krippendorff's Alpha-Reliability. With n_c the number of values c in units
    with two or more values, n their sum, and o_cc = Σ_units m_c (m_c − 1) / (m − 1),

        α = ((n − 1) Σ o_cc − Σ n_c (n_c − 1)) / (n (n − 1) − Σ n_c (n_c − 1))

    Args:
        units: the values that people gave to each unit; units with fewer than two values are ignored.

    Returns None if no unit has two values, or all values are equal.
    """
    judged = [Counter(unit) for unit in units if len(unit) > 1]
    totals: Counter[Hashable] = sum(judged, Counter())
    n = sum(totals.values())
    agreed = sum(sum(m * (m - 1) for m in unit.values()) / (sum(unit.values()) - 1) for unit in judged)
    by_chance = sum(c * (c - 1) for c in totals.values())
    expected = n * (n - 1) - by_chance
    return ((n - 1) * agreed - by_chance) / expected if expected else None


def wilson(mean: float, n: int, z: float = Z) -> tuple[float, float]:
    """Returns Wilson's confidence interval of the mean of n values in [0, 1].

    Source: Wilson (1927), Probable Inference, the Law of Succession, and Statistical Inference. The variance of values
    between 0 and 1 (a tie is 1/2) is at most that of zeros and ones with the same mean: the interval is conservative.
    """
    centre = mean + z * z / (2 * n)
    half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max((centre - half) / (1 + z * z / n), 0.0), min((centre + half) / (1 + z * z / n), 1.0)


def summarize(store: Store) -> dict[str, Any]:
    """Returns the statistics of a store by name; None for those that have no data yet.

    `win_rate` is that of the second model, b: the mean over pairs of the mean over a pair's judgements (b 1, a 0, tie
    and both bad 1/2). `interval` is Wilson's with n pairs, since judgements of a pair are not independent.
    """
    all_of_them = store.judgements()
    judged = [j for j in all_of_them if j.verdict != 'skip']
    of_pair: dict[int, dict[str, str]] = {}
    for j in judged:
        of_pair.setdefault(j.pair, {})[j.person] = j.verdict
    worth = {'a': 0.0, 'b': 1.0}
    values = [sum(worth.get(v, 0.5) for v in votes.values()) / len(votes) for votes in of_pair.values()]
    rate = sum(values) / len(values) if values else None
    sided = [j for j in judged if j.verdict in 'ab']
    people = Counter(j.person for j in judged)
    return {
        'names': store.settings.get('names', ['a', 'b']),
        'num_pairs': store.num_pairs,
        'num_equal': store.num_pairs - store.num_asked,
        'num_judgements': len(judged),
        'num_wanted': store.num_asked * store.annotators_per_pair,
        'num_skipped': len(all_of_them) - len(judged),
        'num_judged_pairs': len(of_pair),
        'num_judged_twice': sum(len(votes) > 1 for votes in of_pair.values()),
        'verdicts': dict(Counter(j.verdict for j in judged)),
        'people': dict(people),
        'alpha': krippendorff_alpha([list(votes.values()) for votes in of_pair.values()]),
        'win_rate': rate,
        'interval': None if rate is None else wilson(rate, len(values)),
        'left': sum((j.verdict == 'a') == j.a_is_left for j in sided) / len(sided) if sided else None,
    }


def lines(summary: dict[str, Any]) -> list[str]:
    """Returns a summary as lines of text."""
    out = ['{num_judgements} of {num_wanted} judgements, of {num_judged_pairs} pair'.format_map(summary)]
    out[0] += 's' * (summary['num_judged_pairs'] != 1)
    out[0] += f' by {", ".join(f"{name} ({count})" for name, count in summary["people"].items()) or "nobody"}'
    if summary['num_skipped']:
        out[0] += f'; {summary["num_skipped"]} skipped'
    if summary['num_equal']:
        out.append(f'{summary["num_equal"]} of {summary["num_pairs"]} pairs have equal responses and are excluded')
    if summary['win_rate'] is not None:
        first, second = summary['names']
        low, high = summary['interval']
        counts = {name: summary['verdicts'].get(name, 0) for name in ('a', 'b', 'tie', 'both_bad')}
        out.append(
            f'{second} wins against {first} in {summary["win_rate"]:.1%} (95 % interval {low:.1%} to {high:.1%}; '
            f'{counts["b"]} won, {counts["a"]} lost, {counts["tie"]} ties, {counts["both_bad"]} both bad)'
        )
    if summary['num_judged_twice']:
        alpha = 'undefined: all judgements are equal' if summary['alpha'] is None else f'{summary["alpha"]:.3f}'
        out.append(f'agreement over {summary["num_judged_twice"]} pairs: Krippendorff α {alpha}')
    if summary['left'] is not None:
        out.append(f'the answer on the left was preferred in {summary["left"]:.0%}')
    return out
