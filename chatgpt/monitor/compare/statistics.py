"""Statistics of judgements: how far people agree, which model wins and how sure that is. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from chatgpt.monitor.compare.store import Store

Z = 1.959964
"""of the standard normal distribution, for 95 %"""


def krippendorff_alpha(units: Sequence[Sequence[Hashable]]) -> float | None:
    """Krippendorff's α for names without an order: 1 − observed / expected disagreement. 1: all agree, 0: as by chance.

    Krippendorff (2011), Computing Krippendorff's Alpha-Reliability. With n_c how often value c was given in units that
    two or more people judged, n their sum, and o_cc = Σ_units m_c (m_c − 1) / (m − 1),

        α = ((n − 1) Σ o_cc − Σ n_c (n_c − 1)) / (n (n − 1) − Σ n_c (n_c − 1))

    Args:
        units: what the people said of each unit, as many as there were; those with fewer than two count for nothing.

    Returns None where nothing was judged twice, or only one value was ever given.
    """
    judged = [Counter(unit) for unit in units if len(unit) > 1]
    totals: Counter[Hashable] = sum(judged, Counter())
    n = sum(totals.values())
    agreed = sum(sum(m * (m - 1) for m in unit.values()) / (sum(unit.values()) - 1) for unit in judged)
    by_chance = sum(c * (c - 1) for c in totals.values())
    expected = n * (n - 1) - by_chance
    return ((n - 1) * agreed - by_chance) / expected if expected else None


def wilson(mean: float, n: int, z: float = Z) -> tuple[float, float]:
    """Wilson's interval of a share: of n values in [0, 1] with this mean.

    Wilson (1927), Probable Inference, the Law of Succession, and Statistical Inference. Values between 0 and 1 (a tie
    is 1/2) vary at most as much as zeros and ones of the same mean do, so with them the interval is wide rather than
    narrow.
    """
    centre = mean + z * z / (2 * n)
    half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max((centre - half) / (1 + z * z / n), 0.0), min((centre + half) / (1 + z * z / n), 1.0)


def summarize(store: Store) -> dict[str, Any]:
    """Everything there is to say of a store, by name; None for what cannot be told yet.

    `win_rate` is that of the second model, b: a pair is worth the mean over its judgements (b 1, a 0, tie and both bad
    1/2), and the rate is the mean over pairs. Its interval is Wilson's with as many trials as pairs, since judgements
    of one pair are not independent.
    """
    all_of_them = store.judgements()
    said = [j for j in all_of_them if j.verdict != 'skip']
    of_pair: dict[int, dict[str, str]] = {}
    for j in said:
        of_pair.setdefault(j.pair, {})[j.person] = j.verdict
    worth = {'a': 0.0, 'b': 1.0}
    values = [sum(worth.get(v, 0.5) for v in votes.values()) / len(votes) for votes in of_pair.values()]
    rate = sum(values) / len(values) if values else None
    sided = [j for j in said if j.verdict in 'ab']
    people = Counter(j.person for j in said)
    return {
        'names': store.settings.get('names', ['a', 'b']),
        'num_pairs': store.num_pairs,
        'num_equal': store.num_pairs - store.num_asked,
        'num_judgements': len(said),
        'num_wanted': store.num_asked * store.annotators_per_pair,
        'num_skipped': len(all_of_them) - len(said),
        'num_judged_pairs': len(of_pair),
        'num_judged_twice': sum(len(votes) > 1 for votes in of_pair.values()),
        'verdicts': dict(Counter(j.verdict for j in said)),
        'people': dict(people),
        'alpha': krippendorff_alpha([list(votes.values()) for votes in of_pair.values()]),
        'win_rate': rate,
        'interval': None if rate is None else wilson(rate, len(values)),
        'left': sum((j.verdict == 'a') == j.a_is_left for j in sided) / len(sided) if sided else None,
    }


def lines(summary: dict[str, Any]) -> list[str]:
    """A summary in words."""
    out = ['{num_judgements} of {num_wanted} judgements, of {num_judged_pairs} pair'.format_map(summary)]
    out[0] += 's' * (summary['num_judged_pairs'] != 1)
    out[0] += f' by {", ".join(f"{name} ({count})" for name, count in summary["people"].items()) or "nobody"}'
    if summary['num_skipped']:
        out[0] += f'; {summary["num_skipped"]} skipped'
    if summary['num_equal']:
        out.append(f'{summary["num_equal"]} of {summary["num_pairs"]} pairs have equal answers and are not asked')
    if summary['win_rate'] is not None:
        first, second = summary['names']
        low, high = summary['interval']
        counts = {name: summary['verdicts'].get(name, 0) for name in ('a', 'b', 'tie', 'both_bad')}
        out.append(
            f'{second} wins against {first} in {summary["win_rate"]:.1%} (95 % interval {low:.1%} to {high:.1%}; '
            f'{counts["b"]} won, {counts["a"]} lost, {counts["tie"]} ties, {counts["both_bad"]} both bad)'
        )
    if summary['num_judged_twice']:
        alpha = 'cannot be told: all said the same' if summary['alpha'] is None else f'{summary["alpha"]:.3f}'
        out.append(f'agreement over {summary["num_judged_twice"]} pairs: Krippendorff α {alpha}')
    if summary['left'] is not None:
        out.append(f'the answer on the left was preferred in {summary["left"]:.0%}')
    return out
