"""The argument of a reward function that gets a text or a column, by name, and what is told before any call."""

from __future__ import annotations

import pytest

from chatgpt.data.rewards import ExactAnswer, combine
from chatgpt.data.rewards.calling import call, check_call


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


def needs(prompts, responses, answr, **columns):
    return [0.0]


@pytest.mark.parametrize(
    ('function', 'message'),
    [
        (needs, "it needs a column 'answr' beside the prompts; there are answer, level; did you mean answer"),
        (lambda completions, truth, **kwargs: 0, "needs a column 'truth' beside the prompts"),
        (ExactAnswer('truth'), "needs a column 'truth' beside the prompts"),
        (combine((1.0, ExactAnswer()), (0.5, needs)), "needs a column 'answr'"),
        (lambda text: 0, 'too many positional arguments; it is called as'),
        (
            lambda prompts, answer: 0,
            "its argument 'answer' gets the responses by its place, .*; call the argument responses",
        ),
    ],
)
def test_a_call_that_cannot_be_is_told_before(function, message):
    with pytest.raises(ValueError, match=message):
        check_call(function, ['answer', 'level'], 'it')


def test_parts_of_a_sum_are_called_by_the_same_rule():
    reward = combine((1.0, lambda completions, answer: [float(a) for a in answer]), (0.5, lambda p, r: [2.0]))
    assert call(reward, ['P'], ['R'], {'answer': [7]}) == [8.0]
