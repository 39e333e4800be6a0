"""Assignment and order of pairs, and durability; agreement and intervals against published examples."""

from __future__ import annotations

import sqlite3

import pytest
from serving import filled

from chatgpt.monitor.compare.statistics import krippendorff_alpha, lines, summarize, wilson
from chatgpt.monitor.compare.store import LEASE_S, NotAsked, Store


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def many(count: int) -> list[tuple[str, str]]:
    return [(f'a{i}', f'b{i}') for i in range(1, count + 1)]


def drain(store: Store, person: int, choice: str = 'tie') -> list[int]:
    """Judges every pair that a person gets; returns the pairs in their order."""
    order = []
    while (pair := store.next_pair(person)) is not None:
        store.judge(person, pair.id, choice)
        order.append(pair.id)
    return order


def test_each_pair_goes_to_the_set_number_of_people(tmp_path):
    with filled(tmp_path / 'db', many(10), annotators_per_pair=2) as store:
        people = [store.join(name) for name in ('Anna', 'Ben', 'Cem')]
        turns = 0
        while any(pairs := [store.next_pair(person) for person in people]):
            held = [pair.id for pair in pairs if pair is not None]
            assert all(held.count(pair) <= 2 for pair in held)
            for person, pair in zip(people, pairs, strict=True):
                if pair is not None:
                    store.judge(person, pair.id, 'left')
                    turns += 1
        assert turns == 20
        found = store.judgements()
        of_pair = {pair: [j.person for j in found if j.pair == pair] for pair in range(1, 11)}
        assert all(len(set(names)) == len(names) == 2 for names in of_pair.values())


def test_a_place_is_kept_for_a_while_and_then_given_away(tmp_path):
    clock = Clock()
    with filled(tmp_path / 'db', many(1)) as store:
        store.clock = clock
        anna, ben = store.join('Anna'), store.join('Ben')
        assert store.next_pair(anna).id == 1
        assert store.next_pair(ben) is None
        assert store.progress(ben)['open'] == 1  # once Anna lets it go
        clock.now += LEASE_S - 1
        assert store.next_pair(ben) is None and store.next_pair(anna).id == 1  # shown again: kept from now
        clock.now += LEASE_S + 1
        assert store.next_pair(ben).id == 1
        with pytest.raises(NotAsked, match='went to somebody else'):
            store.judge(anna, 1, 'tie')
        assert store.next_pair(anna) is None
        clock.now += 10 * LEASE_S
        store.judge(ben, 1, 'tie')  # late, but nobody else has taken it
        assert [j.person for j in store.judgements()] == ['Ben']


def test_a_skipped_pair_goes_to_another_person(tmp_path):
    with filled(tmp_path / 'db', many(1)) as store:
        anna, ben = store.join('Anna'), store.join('Ben')
        store.next_pair(anna)
        store.judge(anna, 1, 'skip')
        assert store.next_pair(anna) is None and store.progress(anna)['all'] == 0
        assert store.next_pair(ben).id == 1
        assert store.undo(anna) and store.next_pair(anna) is None  # Ben has the place now


def test_order_and_sides_are_drawn_for_each_person_and_stay(tmp_path):
    with filled(tmp_path / 'db', many(40), annotators_per_pair=1000) as store:
        seen = {}
        for name in ('Anna', 'Ben'):
            person = store.join(name)
            first = store.next_pair(person)
            assert store.next_pair(person) == first
            sides = []
            order = []
            while (pair := store.next_pair(person)) is not None:
                order.append(pair.id)
                sides.append(pair.left.startswith('a'))
                store.judge(person, pair.id, 'left')
            seen[name] = (order, sides)
            assert sorted(order) == list(range(1, 41)) and order != sorted(order)
            assert 8 <= sum(sides) <= 32  # 20 of 40 by chance, within four standard deviations
        assert seen['Anna'][0] != seen['Ben'][0] and seen['Anna'][1] != seen['Ben'][1]
        kept = {(j.person, j.pair): j for j in store.judgements()}
        for name, (order, sides) in seen.items():
            for pair, a_is_left in zip(order, sides, strict=True):
                judgement = kept[name, pair]
                assert judgement.a_is_left == a_is_left and judgement.verdict == ('a' if a_is_left else 'b')


def test_the_smallest_margin_comes_first_and_before_it_what_others_began(tmp_path):
    margins = [2.0, -0.1, 0.5, None, -3.0]
    with filled(tmp_path / 'db', many(5), margins=margins, annotators_per_pair=2) as store:
        anna, ben = store.join('Anna'), store.join('Ben')
        store.judge(anna, store.next_pair(anna).id, 'tie')
        assert store.next_pair(anna).id == 3
        assert store.next_pair(ben).id in (2, 3)  # both are begun, one judged and one shown; 2 has the smaller margin
        assert drain(store, ben)[:2] == [2, 3]
    with filled(tmp_path / 'alone', many(5), margins=margins) as store:
        assert drain(store, store.join('Anna')) == [2, 3, 1, 5, 4]


def test_responses_are_set_once_and_equal_ones_are_excluded(tmp_path):
    with filled(tmp_path / 'db', many(2)) as store:
        with pytest.raises(ValueError, match='has the answers b already'):
            store.set_answers('b', ['x', 'y'])
        with pytest.raises(ValueError, match='has answers already'):
            store.begin([{'prompt': 'p'}], ['p'])
        assert store.answers('b') == ['b1', 'b2']
    with filled(tmp_path / 'equal', [('same', 'same'), ('a', 'b')]) as store:
        assert (store.num_pairs, store.num_asked) == (2, 1)
        assert store.join(' Anna  Ö ') == store.join('Anna Ö') != store.join('Ben')
        assert drain(store, store.join('Ben')) == [2]
        with pytest.raises(ValueError, match='1 to 60'):
            store.join('  ')


def test_judgements_are_taken_back_one_after_another(tmp_path):
    with filled(tmp_path / 'db', many(3)) as store:
        anna, ben = store.join('Anna'), store.join('Ben')
        order = []
        for choice in ('left', 'skip', 'both_bad'):
            pair = store.next_pair(anna)
            order.append(pair.id)
            store.judge(anna, pair.id, choice, f'about {pair.id}')
        assert store.undo(anna) and store.next_pair(anna).comment == f'about {order[2]}'
        assert store.undo(anna)
        assert store.next_pair(anna).id == order[1]
        assert [j.pair for j in store.judgements()] == order[:1]
        assert store.undo(anna) and not store.undo(anna) and not store.undo(ben)
        assert store.judgements() == []


def test_the_same_judgement_again_is_no_second_one_and_another_is_refused(tmp_path):
    with filled(tmp_path / 'db', many(2)) as store:
        anna = store.join('Anna')
        pair = store.next_pair(anna)
        for comment in ('', 'thought again'):  # as when the answer to the first was lost on the way
            store.judge(anna, pair.id, 'left', comment)
        with pytest.raises(NotAsked, match='take that back first'):
            store.judge(anna, pair.id, 'right')
        with pytest.raises(NotAsked, match='not yours'):
            store.judge(anna, 3 - pair.id, 'left')
        (judgement,) = store.judgements()
        assert judgement.comment == 'thought again'


@pytest.mark.parametrize(
    ('choice', 'comment', 'complaint'),
    [('a', '', "'a' is no choice"), ('left', 'x' * 4001, 'at most 4000'), ('left; DROP TABLE pairs', '', 'no choice')],
)
def test_what_cannot_be_judged(tmp_path, choice, comment, complaint):
    with filled(tmp_path / 'db', many(1)) as store:
        anna = store.join('Anna')
        store.next_pair(anna)
        with pytest.raises(ValueError, match=complaint):
            store.judge(anna, 1, choice, comment)
        assert store.judgements() == []


def test_everything_is_there_when_it_is_opened_again(tmp_path):
    with filled(tmp_path / 'db', many(3), annotators_per_pair=2) as store:
        anna = store.join('Anna')
        first = store.next_pair(anna)
        store.judge(anna, first.id, 'right', 'grün')
        held, before = store.next_pair(anna), store.judgements()
    with Store(tmp_path / 'db', create=False) as store:
        assert store.judgements() == before and before[0].comment == 'grün'
        assert store.next_pair(store.join('Anna')) == held
        assert store.annotators_per_pair == 2 and store.answers('b') == ['b1', 'b2', 'b3']
        assert (store._value('PRAGMA journal_mode'), store._value('PRAGMA synchronous')) == ('wal', 2)  # FULL


def test_files_of_others_are_refused_and_left_as_they_are(tmp_path):
    with pytest.raises(ValueError, match='there is no database'):
        Store(tmp_path / 'none', create=False)
    (tmp_path / 'text').write_text('no database at all, ' * 100)
    with pytest.raises(ValueError, match='is no database'):
        Store(tmp_path / 'text')
    other = sqlite3.connect(tmp_path / 'other')
    other.execute('CREATE TABLE songs (name TEXT)')
    other.close()
    before = (tmp_path / 'other').read_bytes()
    with pytest.raises(ValueError, match='it is one of something else'):
        Store(tmp_path / 'other')
    assert (tmp_path / 'other').read_bytes() == before
    filled(tmp_path / 'newer', many(1)).close()
    newer = sqlite3.connect(tmp_path / 'newer')
    newer.execute('PRAGMA user_version = 2')
    newer.close()
    with pytest.raises(ValueError, match='tables have version 2, and this package reads 1'):
        Store(tmp_path / 'newer')


def test_preferences_are_majorities(tmp_path):
    answers = [*many(4), ('a5', '  ')]
    with filled(tmp_path / 'db', answers, annotators_per_pair=3) as store:
        for name, verdicts in (('Anna', 'ab=aa'), ('Ben', 'aba=a'), ('Cem', 'baab-')):
            person = store.join(name)
            while (pair := store.next_pair(person)) is not None:
                verdict = {'=': 'tie', '-': 'skip'}.get(verdicts[pair.id - 1], verdicts[pair.id - 1])
                sides = ('a', 'b') if pair.left.startswith('a') else ('b', 'a')
                choice = 'left' if verdict == sides[0] else 'right' if verdict == sides[1] else verdict
                store.judge(person, pair.id, choice, f'by {name}' if (name, pair.id) == ('Ben', 2) else '')
        rows, num_left = store.preferences()
        about = [
            (r['prompt'], r['chosen'], r['rejected'], r['votes_chosen'], r['votes_rejected'], r['votes_neither'])
            for r in rows
        ]
        assert about == [
            ('prompt 1', 'a1', 'b1', 2, 1, 0),
            ('prompt 2', 'b2', 'a2', 2, 1, 0),
            ('prompt 3', 'a3', 'b3', 2, 0, 1),
        ]
        assert num_left == 2  # one vote each, and an answer without text
        assert [r['comments'] for r in rows] == [[], ['by Ben'], []]


def units(*people: str) -> list[list[str]]:
    """Returns the values of each unit, from a line per person; a dot is a missing value."""
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
    """Judges pairs 1, 2, ... as a person: a, b, tie (=), both bad (0), skip (-)."""
    person = store.join(name)
    for _ in verdicts:
        pair = store.next_pair(person)
        verdict = {'=': 'tie', '0': 'both_bad', '-': 'skip'}.get(verdicts[pair.id - 1], verdicts[pair.id - 1])
        sides = {'a': 'left' if pair.left.startswith('a') else 'right'}
        sides['b'] = 'right' if sides['a'] == 'left' else 'left'
        store.judge(person, pair.id, sides.get(verdict, verdict))


def test_a_summary_by_hand(tmp_path):
    with filled(
        tmp_path / 'judged.sqlite', [*((f'a{i}', f'b{i}') for i in range(6)), ('=', '=')], annotators_per_pair=2
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
        assert '1 of 7 pairs have equal responses' in shown
