"""The generated stories: known scores, deterministic data, a tokenizer that can be saved."""

from __future__ import annotations

import pytest

from chatgpt.launch.demo_world import (
    demo_close_preferences,
    demo_corpus,
    demo_preferences,
    demo_prompts,
    repeated_share,
    true_score,
)

PROMPT = 'one day a small fox went to the river .'


@pytest.mark.parametrize(
    ('response', 'score'),
    [
        ('it felt glad . it found a cake . it played with a duck . it felt happy .', 1.0),
        ('it felt glad . it felt glad . it felt glad . it felt glad .', 1 / 4),  # the same sentence counts once
        ('it felt glad . it felt', 1 / 4 - 1 / 4),  # ends within a sentence
        ('', -1 / 4),
        ('glad glad glad .', -1 / 4),  # cheerful words that are no sentence
        ('it felt glad . it felt happy . it felt merry . it felt proud . it felt sad .', 1.0),  # the fifth is not read
    ],
)
def test_truth_by_hand(response, score):
    assert true_score(PROMPT, response) == pytest.approx(score)


def test_data_follows_the_seed():
    for make in (demo_corpus, demo_prompts, demo_preferences, demo_close_preferences):
        assert make(20, seed=1) == make(20, seed=1) != make(20, seed=2)
        assert make(20, seed=1)[:5] == make(5, seed=1)
    scores = [true_score(r['prompt'], r['response']) for r in demo_corpus(2000, seed=0)]
    assert abs(sum(scores) / len(scores)) < 0.05 and max(scores) == 1.0  # neither good nor bad


@pytest.mark.parametrize(
    ('response', 'share'),
    [
        ('it felt glad .', 0.0),
        ('it felt glad . it felt glad .', 2 / 6),  # the last two of six 3-grams repeat the first two
        ('glad glad glad glad glad glad', 3 / 4),
        ('', 0.0),
    ],
)
def test_repeated_share_by_hand(response, share):
    assert repeated_share(response) == pytest.approx(share)


def test_preferences_are_ordered_by_the_truth_some_faulty_and_some_close():
    wide, pairs = demo_preferences(300, seed=0), demo_close_preferences(600, seed=0)
    assert all(true_score(p['prompt'], p['chosen']) > true_score(p['prompt'], p['rejected']) for p in [*wide, *pairs])
    faulty = [p for p in wide if not p['rejected'].startswith('it ') or not p['rejected'].endswith(' .')]
    assert 30 < len(faulty) < 150
    shares = [(repeated_share(p['chosen']), repeated_share(p['rejected'])) for p in pairs]
    assert sum(c < r for c, r in shares) > sum(c > r for c, r in shares)
    common = [set(p['chosen'].split(' .')) & set(p['rejected'].split(' .')) - {''} for p in pairs]
    assert sum(map(bool, common)) > 200  # one change: the other sentences are the same
