"""Every reward on texts whose worth is plain to see."""

from __future__ import annotations

import pickle
import sys
import types
from decimal import Decimal

import pytest

from chatgpt.data.rewards import (
    ExactAnswer,
    Format,
    Length,
    NumberAtEnd,
    Pattern,
    Sentiment,
    checkable,
    combine,
    last_number,
)
from chatgpt.data.rewards.calling import call, check_call
from chatgpt.trainer.experience.scorers import as_scorer


def test_exact_answer():
    responses = ['Paris', ' paris ', 'It is Paris', 'Rome', '']
    assert ExactAnswer()([''] * 5, responses, answer=['Paris'] * 5) == [1, 1, 0, 0, 0]
    assert ExactAnswer(ignore_case=False, wrong=-1.0)([''] * 2, ['paris', 'Paris'], answer=['Paris'] * 2) == [-1, 1]
    after = ExactAnswer(column='capital', after='Answer:')
    given = ['so Answer: Rome? no. Answer: Paris', 'Paris', 'Answer: Rome']
    assert after([''] * 3, given, capital=['Paris'] * 3) == [1, 0, 0]


@pytest.mark.parametrize(
    ('text', 'want'),
    [('72', '72'), ('#### 1,234', '1234'), ('it is -3.5.', '-3.5'), ('1 then 2, then 3', '3'), ('$.50', '.50')]
    + [('none', None), ('', None), ('12,34', '34'), ('costs 2,000,000.25 dollars', '2000000.25'), ('x=-7', '-7')]
    + [('48-24', '24'), ('48 - 24', '24'), ('(5)-3', '3'), ('10 to -12', '-12'), ('it is \u22127', '-7')]
    + [('1+1=2', '2'), ('+4', '4')],
)
def test_last_number(text, want):
    assert last_number(text) == (None if want is None else Decimal(want))


def test_number_at_end():
    reward = NumberAtEnd(unanswered=-0.5)
    said = ['The answer is 72.', '72.0', 'It is 71', 'I do not know']
    assert reward([''] * 4, said, answer=['She sold 48/2 = 24 clips.\n#### 72'] * 4) == [1, 1, 0, -0.5]
    assert NumberAtEnd(tolerance=0.1)([''], ['3.14'], answer=[3.1]) == [1]
    with pytest.raises(ValueError, match='has no number'):
        reward([''], ['1'], answer=['many'])


@pytest.mark.parametrize('reward', [ExactAnswer(), NumberAtEnd()])
def test_a_missing_column_is_named(reward):
    with pytest.raises(ValueError, match=r"needs a column 'answer' beside the prompts; there are solution"):
        reward(['p'], ['r'], solution=['x'])
    with pytest.raises(ValueError, match="column 'answer' has 1 values for 2 responses"):
        reward(['p'] * 2, ['r'] * 2, answer=['1'])


def test_pattern():
    assert Pattern(r'\d+')([''] * 2, ['room 12', 'room'], other=[1, 2]) == [1, 0]
    assert Pattern(r'\d+', whole=True, miss=-1.0)([''] * 2, ['room 12', '12']) == [-1, 1]
    with pytest.raises(ValueError, match='is not a regular expression'):
        Pattern('(')


@pytest.mark.parametrize(
    ('response', 'loose', 'strict'),
    [
        ('<think>a b</think><answer>3</answer>', 1.0, 1.0),
        ('<think>a</think> so <answer>3</answer>', 1.0, 0.0),
        ('<answer>3</answer><think>a</think>', 0.5, 0.0),
        ('<think>a</think>', 0.5, 0.5),
        ('<think> </think><answer>3</answer>', 0.5, 0.0),
        ('<answer>1</answer><answer>2</answer>', 0.0, 0.0),
        ('3', 0.0, 0.0),
    ],
)
def test_format(response, loose, strict):
    assert Format()([''], [response]) == [loose]
    assert Format(only=True)([''], [response]) == [strict]


def test_length():
    assert Length(4)([''] * 4, ['a b c d', 'a b', 'a b c d e f', 'a ' * 20]) == [1.0, 0.5, 0.5, 0.0]
    assert Length(4, unit='characters')([''], ['abc']) == [0.75]
    for wrong in ({'target': 0}, {'target': 3, 'unit': 'tokens'}):
        with pytest.raises(ValueError, match='must be'):
            Length(**wrong)


def test_combine():
    reward = combine((2.0, Pattern('x')), (-0.5, Length(1)))
    assert reward([''] * 2, ['x', 'y']) == [1.5, -0.5]
    for wrong in ((), ((1.0,),), (Pattern('x'),)):
        with pytest.raises(ValueError, match='combine'):
            combine(*wrong)
    with pytest.raises(ValueError, match='returned 1 scores for 2 responses'):
        combine((1.0, lambda p, r: [1.0]))([''] * 2, ['a', 'b'])
    with pytest.raises(ValueError, match='returned a str; return a list'):
        combine((1.0, lambda p, r: '12'))([''] * 2, ['a', 'b'])

    async def one(prompts, responses, **columns):
        return [1.0] * len(responses)

    # it makes classes, awaits coroutines, and calls its parts by the names of their arguments
    assert combine((2.0, NumberAtEnd), (0.5, one))([''] * 2, ['4', '5'], answer=[4, 4]) == [2.5, 0.5]
    parts = combine((1.0, lambda completions, answer: [float(a) for a in answer]), (0.5, lambda p, r: [2.0]))
    assert call(parts, ['P'], ['R'], {'answer': [7]}) == [8.0]


@pytest.mark.parametrize(
    'reward', [ExactAnswer(), NumberAtEnd(), Pattern('x'), Format(), Length(3), combine((1.0, Length(2)))]
)
def test_they_can_be_pickled_and_scored_by_a_trainer(reward):
    assert pickle.loads(pickle.dumps(reward)) == reward
    assert as_scorer(reward) is not None


def test_the_sentiment_library_is_used(monkeypatch):
    """With a stand-in for the optional package, whose score is the number of 'good'."""
    checkable._analyzer.cache_clear()
    monkeypatch.setitem(sys.modules, 'vaderSentiment', None)
    with pytest.raises(ImportError, match='pip install vaderSentiment'):
        Sentiment()

    class Analyzer:
        def polarity_scores(self, text):
            return {'compound': float(text.count('good'))}

    inner = types.ModuleType('vaderSentiment.vaderSentiment')
    inner.SentimentIntensityAnalyzer = Analyzer
    monkeypatch.setitem(sys.modules, 'vaderSentiment', types.ModuleType('vaderSentiment'))
    monkeypatch.setitem(sys.modules, 'vaderSentiment.vaderSentiment', inner)
    checkable._analyzer.cache_clear()
    assert Sentiment(with_prompt=True)(['good '], ['good day']) == [2.0]
    assert Sentiment(negative=True)(['good '], ['good day']) == [-1.0]
    checkable._analyzer.cache_clear()


@pytest.mark.parametrize(
    ('function', 'given'),
    [
        (lambda prompts, responses: (prompts, responses), ('P', 'R')),
        (lambda prompts, responses, **columns: columns, {'answer': [7], 'level': [1]}),
        (lambda prompts, responses, answer, **others: (responses, answer, others), ('R', [7], {'level': [1]})),
        (lambda texts, said, answer: (texts, said, answer), ('P', 'R', [7])),
        (lambda texts, responses: (texts, responses), ('P', 'R')),
        (lambda responses, prompts: (responses, prompts), ('R', 'P')),
        (lambda *texts, **columns: (texts, columns), (('P', 'R'), {'answer': [7], 'level': [1]})),
        # TRL's
        (lambda completions, answer, **kwargs: (completions, answer, kwargs['prompts']), ('R', [7], 'P')),
        (lambda prompts, completions, **kwargs: (prompts, completions, kwargs['answer']), ('P', 'R', [7])),
        (lambda *, completions: completions, 'R'),
        (lambda **kwargs: (kwargs['prompts'], kwargs['completions']), ('P', 'R')),
        # trlX's
        (lambda samples, **kwargs: (samples, kwargs['prompts'], kwargs['outputs']), (['PR'], 'P', 'R')),
        (lambda outputs, answer: (outputs, answer), ('R', [7])),
    ],
)
def test_arguments_go_by_their_names(function, given):
    def listed(value):
        if isinstance(value, tuple):
            return tuple(map(listed, value))
        return [value] if isinstance(value, str) else value

    columns = {'answer': [7], 'level': [1]}
    check_call(function, columns, 'reward')
    assert call(function, ['P'], ['R'], columns) == listed(given)


@pytest.mark.parametrize(
    ('function', 'message'),
    [
        (lambda prompts, responses, answr, **columns: 0, "column 'answr' .* answer, level; did you mean answer"),
        (lambda completions, truth, **kwargs: 0, "needs a column 'truth' beside the prompts"),
        (ExactAnswer('truth'), "needs a column 'truth' beside the prompts"),
        (combine((1.0, ExactAnswer()), (0.5, lambda prompts, responses, answr: 0)), "needs a column 'answr'"),
        (lambda text: 0, 'too many positional arguments; it is called as'),
        (lambda prompts, answer: 0, "its argument 'answer' gets the responses by its place, .*; call the argument"),
    ],
)
def test_a_call_that_cannot_be_is_told_before(function, message):
    with pytest.raises(ValueError, match=message):
        check_call(function, ['answer', 'level'], 'it')
