"""Agreement and intervals, against examples that others have worked out by hand."""

from __future__ import annotations

import pytest
from serving import filled

from chatgpt.monitor.compare.statistics import krippendorff_alpha, lines, summarize, wilson


def units(*people: str) -> list[list[str]]:
    """What was said of each unit, from a line per person; a dot was not judged."""
    return [[value for value in column if value != '.'] for column in zip(*people, strict=True)]


# Krippendorff (2011), Computing Krippendorff's Alpha-Reliability, sections A, B and C.
@pytest.mark.parametrize(
    ('people', 'alpha'),
    [
        (('0100000010', '1110010000'), 0.095),
        (('aabbdcccedda', 'babbbccceddd'), 0.692),
        (('123321412...', '1233224125.3', '.3332342251.', '12332441251.'), 0.743),
    ],
    ids=['two people, two values', 'two people, five values', 'four people, gaps'],
)
def test_krippendorffs_own_examples(people, alpha):
    assert krippendorff_alpha(units(*people)) == pytest.approx(alpha, abs=5e-4)


def test_alpha_where_it_has_no_value():
    assert krippendorff_alpha([]) is None
    assert krippendorff_alpha(units('abc', '...')) is None  # nothing was judged twice
    assert krippendorff_alpha(units('aaa', 'aaa')) is None  # no value but one
    assert krippendorff_alpha(units('ab', 'ab')) == pytest.approx(1.0)
    assert krippendorff_alpha(units('ab', 'ba')) == pytest.approx(-0.5)  # o = 0, n = 4: −4 / 8


# Newcombe (1998), Two-sided confidence intervals for the single proportion, table I, method 3.
@pytest.mark.parametrize(
    ('wins', 'n', 'low', 'high'),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_as_tabulated(wins, n, low, high):
    assert wilson(wins / n, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1 - wins / n, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def judge_all(store, name: str, verdicts: str) -> None:
    """A person's verdicts of pairs 1, 2, ...: a, b, tie (=), both bad (0), skip (-)."""
    person = store.join(name)
    for _ in verdicts:
        pair = store.next_pair(person)
        verdict = {'=': 'tie', '0': 'both_bad', '-': 'skip'}.get(verdicts[pair.id - 1], verdicts[pair.id - 1])
        sides = {'a': 'left' if pair.left.startswith('a') else 'right'}
        sides['b'] = 'right' if sides['a'] == 'left' else 'left'
        store.judge(person, pair.id, sides.get(verdict, verdict))


def test_a_summary_by_hand(tmp_path):
    with filled(
        tmp_path / 'said.sqlite', [*((f'a{i}', f'b{i}') for i in range(6)), ('=', '=')], annotators_per_pair=2
    ) as store:
        judge_all(store, 'Anna', 'bba=0-')
        judge_all(store, 'Ben', 'bab=bb')
        found = summarize(store)
        # Pairs: 1, 1/2, 1/2, 1/2, 3/4 and, judged once, 1: mean 4.25 / 6.
        assert found['win_rate'] == pytest.approx(4.25 / 6)
        assert found['interval'] == wilson(4.25 / 6, 6)
        assert found['verdicts'] == {'b': 6, 'a': 2, 'tie': 2, 'both_bad': 1}
        assert (found['num_judgements'], found['num_wanted'], found['num_skipped']) == (11, 12, 1)
        assert (found['num_judged_pairs'], found['num_judged_twice'], found['num_equal']) == (6, 5, 1)
        assert found['people'] == {'Anna': 5, 'Ben': 6}
        # The five pairs of both: bb, ba, ab, ==, 0b.
        # n = 10: b 5, a 2, = 2, 0 1. Agreeing pairs count 2 each: o = 4; Σ n_c (n_c − 1) = 20 + 2 + 2 = 24.
        assert found['alpha'] == pytest.approx((9 * 4 - 24) / (90 - 24))
        shown = '\n'.join(lines(found))
        assert '11 of 12 judgements, of 6 pairs by Anna (5), Ben (6); 1 skipped' in shown
        assert 'B wins against A in 70.8%' in shown and '6 won, 2 lost, 2 ties, 1 both bad' in shown
        assert 'Krippendorff α 0.182' in shown
        assert '1 of 7 pairs have equal answers' in shown
