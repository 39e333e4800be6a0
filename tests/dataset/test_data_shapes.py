"""Records to examples: recognition of shapes, splitting into prompt and response, and errors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from chatgpt.data.examples import (
    BadRecord,
    Demonstration,
    Instruction,
    Labelled,
    Message,
    Preference,
    PromptExample,
    as_kind,
)
from chatgpt.data.shapes import to_example

U, A, S = (lambda text, role=role: Message(role, text) for role in ('user', 'assistant', 'system'))
HH = '\n\nHuman: hi\n\nAssistant: hello\n\nHuman: bye\n\nAssistant:'


def openai(*turns):
    return [{'role': t.role, 'content': t.content} for t in turns]


def sharegpt(*turns):
    names = {'user': 'human', 'assistant': 'gpt', 'system': 'system'}
    return [{'from': names[t.role], 'value': t.content} for t in turns]


def prompt(prompt, **columns):
    return PromptExample(prompt=prompt, columns=columns)


def shows(prompt, response, **columns):
    return Demonstration(prompt=prompt, response=response, columns=columns)


def ranks(prompt, *responses, scores=None, **columns):
    return Preference(prompt=prompt, responses=responses, scores=scores, columns=columns)


def judges(prompt, response, label):
    return Labelled(prompt=prompt, response=response, label=label)


I, X = Instruction('i'), Instruction('i', 'x')
PAIR, Q = {'chosen': 'c', 'rejected': 'r'}, openai(U('q'))
TALKS = {'chosen': openai(U('q'), A('c')), 'rejected': openai(U('q'), A('r'))}
SHARED = {'chosen': sharegpt(A('c'))[0], 'rejected': sharegpt(A('r'))[0]}
SCORES = {'score_chosen': 2, 'score_rejected': 0.5}
ABC = {'prompt': 'p', 'responses': ['a', 'b', 'c']}
TIED = {**ABC, 'ranks': [2, 1, 2]}
FOUR = openai(U('a'), A('b'), U('c'), A('d'))
NO_CALLS = {'tool_calls': np.array([]), 'function_call': None, 'reasoning_content': math.nan, 'weight': 1}
PAST = {'instruction': 'i', 'input': '', 'output': 'o', 'history': [['a', 'b']], 'system': 's'}
ASKED = (S('s'), U('q'))
CASES = {
    'prompt': ({'prompt': 'p', 'act': 'x'}, prompt('p', act='x')),
    'prompt as turns': ({'prompt': Q}, prompt((U('q'),))),
    'pair': ({'prompt': 'p', **PAIR}, ranks('p', 'c', 'r')),
    'pair with scores': ({'prompt': 'p', **PAIR, **SCORES}, ranks('p', 'c', 'r', scores=(2.0, 0.5), **SCORES)),
    'instruction pair': ({'instruction': 'i', 'input': 'x', **PAIR}, ranks(X, 'c', 'r')),
    'pair with a question and a system message': ({'system': 's', 'question': 'q', **PAIR}, ranks(ASKED, 'c', 'r')),
    'pair with an input and a system message': ({'system': 's', 'input': 'q', **PAIR}, ranks(ASKED, 'c', 'r')),
    'pair with an input': ({'input': 'q', **PAIR}, ranks('q', 'c', 'r')),
    'hh with an input': ({'input': 'q', 'chosen': HH + ' a', 'rejected': HH + ' b'}, ranks(HH, ' a', ' b')),
    'a system message beside a text': ({'system': 's', 'prompt': 'q', 'completion': 'a'}, shows(ASKED, 'a')),
    'openorca': ({'system_prompt': 's', 'question': 'q', 'response': 'a'}, shows(ASKED, 'a')),
    'a blank system message': ({'system_prompt': '', 'question': 'q', 'response': 'a'}, shows((U('q'),), 'a')),
    'a text with a column tools': ({'prompt': 'p', 'tools': ['t'], **PAIR}, ranks('p', 'c', 'r', tools=['t'])),
    'hh with a system column': ({'system': 's', 'prompt': HH, 'completion': 'a'}, shows(HH, 'a', system='s')),
    'a question about a text': ({'question': 'i', 'context': 'x', 'answer': 'a'}, shows(X, 'a')),
    'its pair': ({'question': 'i', 'context': 'x', **PAIR}, ranks(X, 'c', 'r')),
    'a question with facts': ({'question': 'q', 'context': {'a': 1}, 'answer': 'a'}, shows('q', 'a', context={'a': 1})),
    'a prompt with a column context': ({'prompt': 'p', 'context': 'x'}, prompt('p', context='x')),
    'a blank input beside a context': (
        {'instruction': 'i', 'input': '', 'context': 'x', 'output': 'o'},
        shows(X, 'o', input=''),
    ),
    'a column system that is no message': ({'system': 7, 'prompt': 'q', **PAIR}, ranks('q', 'c', 'r', system=7)),
    'stack exchange': ({'question': 'q', 'response_j': 'c', 'response_k': 'r'}, ranks('q', 'c', 'r')),
    'hh': ({'chosen': HH + ' see you', 'rejected': HH + ' so what'}, ranks(HH, ' see you', ' so what')),
    'plain texts compared': ({'chosen': 'good film', 'rejected': 'bad film'}, ranks('', 'good film', 'bad film')),
    'dialogues as turns': (TALKS, ranks((U('q'),), 'c', 'r')),
    'ultrafeedback': ({'prompt': 'q', **TALKS}, ranks((U('q'),), 'c', 'r')),
    'sharegpt pair': ({'conversations': sharegpt(U('q')), **SHARED}, ranks((U('q'),), 'c', 'r')),
    'turns in csv cells': ({'messages': json.dumps(openai(U('q'), A('a')))}, shows((U('q'),), 'a')),
    'ranked': (ABC, ranks('p', 'a', 'b', 'c')),
    'ranked by scores': ({**ABC, 'scores': [0, 2, 1]}, ranks('p', 'b', 'c', 'a', scores=(2.0, 1.0, 0.0))),
    'ranked by ranks': ({**ABC, 'ranks': [2, 1, 3]}, ranks('p', 'b', 'a', 'c')),
    'ranked by ranks, two of them equal': (TIED, ranks('p', 'b', 'a', 'c', scores=(-1.0, -2.0, -2.0))),
    'completion': ({'prompt': 'p', 'completion': 'c'}, shows('p', 'c')),
    'response': ({'prompt': 'p', 'response': 'c', 'id': 4}, shows('p', 'c', id=4)),
    'json as an answer': ({'prompt': 'p', 'completion': '[{"a": 1}]'}, shows('p', '[{"a": 1}]')),
    'a list in the prompt': ({'prompt': '[1, 2]', 'completion': 'x'}, shows('[1, 2]', 'x')),
    'question': ({'question': 'q', 'answer': 'a'}, shows('q', 'a')),
    'alpaca': ({'instruction': 'i', 'input': 'x', 'output': 'o'}, shows(X, 'o')),
    'alpaca without input': ({'instruction': 'i', 'output': 'o'}, shows(I, 'o')),
    'dolly': ({'instruction': 'i', 'context': 'x', 'response': 'o'}, shows(X, 'o')),
    'alpaca with history': (PAST, shows((S('s'), U('a'), A('b'), U('i')), 'o')),
    'messages': ({'messages': openai(S('s')) + FOUR}, shows((S('s'), U('a')), (A('b'), U('c'), A('d')))),
    'messages that ask': ({'messages': FOUR[:3]}, prompt((U('a'), A('b'), U('c')))),
    'messages without calls': (
        {'messages': [{**Q[0], 'weight': 0}, {**openai(A('a'))[0], **NO_CALLS}]},
        shows((U('q'),), 'a'),
    ),
    'sharegpt': ({'conversations': sharegpt(U('a'), A('b')), 'system': 's'}, shows((S('s'), U('a')), 'b')),
    'kto': ({'messages': FOUR, 'label': False}, judges((U('a'), A('b'), U('c')), 'd', False)),
    'kto in text': ({'prompt': 'p', 'completion': 'c', 'label': 'True'}, judges('p', 'c', True)),
    'reward': ({'prompt': 'p', 'response': 'c', 'reward': -0.5}, judges('p', 'c', -0.5)),
    'text and label': ({'text': 't', 'label': '1'}, judges('', 't', 1)),
    'text and class': ({'text': 't', 'label': 'good'}, judges('', 't', 'good')),
    'text and reward': ({'text': 't', 'reward': 0.25}, judges('', 't', 0.25)),
    'text': ({'text': 't', 'chosen': None}, shows('', 't', chosen=None)),
}


@pytest.mark.parametrize('name', CASES)
def test_shape(name):
    data, expected = CASES[name]
    assert to_example(data) == expected


def test_hh_prompt_ends_at_the_last_shared_turn_of_the_assistant():
    """Both responses begin with the same letters, which belong to the responses."""
    found = to_example({'chosen': HH + ' see you', 'rejected': HH + ' see me'})
    assert found.prompt == HH and found.responses == (' see you', ' see me')
    # one response is a prefix of the other
    found = to_example({'chosen': HH + ' see you', 'rejected': HH + ' see'})
    assert found.prompt == HH and found.responses == (' see you', ' see')


def test_dialogues_that_part_earlier_keep_their_later_turns():
    chosen = openai(U('a'), A('b'), U('c'), A('d'))
    rejected = openai(U('a'), A('x'), U('c'), A('d'))
    found = to_example({'chosen': chosen, 'rejected': rejected})
    assert found.prompt == (U('a'),) and found.responses == ((A('b'), U('c'), A('d')), (A('x'), U('c'), A('d')))


@pytest.mark.parametrize(
    ('data', 'reason'),
    [
        ({'act': 1, 'foo': 2}, r"no known shape in the columns found \('act', 'foo'\); expected one of: prompt"),
        ({}, r'no known shape in the columns found \(none\)'),
        ({'prompt': ''}, 'the prompt is empty'),
        ({'prompt': ' \n'}, 'the prompt is empty'),
        ({'prompt': float('nan')}, r'prompt is a float \(nan\), where text is needed'),
        ({'prompt': 'p', 'completion': ''}, 'the completion is empty'),
        ({'prompt': 'p', 'chosen': 'c', 'rejected': ' '}, 'answer 2 of 2 is empty'),
        ({'prompt': 'p', 'responses': ['a']}, r"responses is a list \(\['a'\]\), where a list of two or more answers"),
        ({**ABC, 'scores': [1]}, 'where 3 numbers are needed, one for each of responses'),
        ({'chosen': HH + 'a', 'rejected': '\n\nHuman: other\n\nAssistant: b'}, 'share no beginning that ends with'),
        ({'chosen': openai(U('a'), A('b')), 'rejected': openai(U('x'), A('b'))}, 'share no turns before an answer'),
        ({'messages': []}, r'messages is a list \(\[\]\), where a list of turns is needed'),
        ({'messages': [{'role': 'wizard', 'content': 'x'}]}, "turn 1 of messages has the role 'wizard'; known are"),
        ({'messages': [{'role': 'user', 'content': ''}]}, 'turn 1 of messages has no text'),
        ({'messages': openai(A('a'))}, 'begins with the assistant'),
        ({'messages': openai(U('a'), A('b')), **PAIR}, 'end with an answer of the assistant; drop that answer'),
        ({'messages': openai(U('a'), A('b')), 'tools': [{'name': 'f'}]}, 'tools is not read beside answers'),
        ({'messages': openai(U('a')), 'tools': '[{"name": "f"}]', **PAIR}, 'tools is not read beside answers'),
        ({'tools': [{'name': 'f'}], **TALKS}, 'tools is not read beside answers'),
        ({'conversations': openai(S('a')), 'chosen': 'c', 'rejected': 'r'}, 'no turn but the system message'),
        ({'messages': openai(U('a'), A('b')), 'label': float('inf')}, 'label is a float'),
        ({'text': '', 'label': 1}, 'the text is empty'),
        ({'instruction': '', 'output': 'x'}, 'the instruction is empty'),
        ({'prompt': 'p', 'chosen': 'c', 'rejected': 'r', 'margin': 'big'}, 'margin is a str'),
    ],
)
def test_bad_records(data, reason):
    with pytest.raises(BadRecord, match=reason) as error:
        to_example(data)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('part', 'name'),
    [
        ({'tool_calls': [{'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}]}, 'has tool_calls'),
        ({'tool_calls': np.array(['f'])}, 'has tool_calls'),
        ({'function_call': {'name': 'f', 'arguments': '{}'}}, 'has function_call'),
        ({'reasoning_content': 'because'}, 'has reasoning_content'),
        ({'weight': 0}, 'is an answer of weight 0'),
    ],
)
def test_a_turn_with_a_part_that_is_not_read_is_a_bad_record(part, name):
    turns = [*Q, openai(A('a'))[0] | part]
    with pytest.raises(BadRecord, match=f'^turn 2 of messages {name}'):
        to_example({'messages': turns})
    with pytest.raises(BadRecord, match=f'^turn 1 of chosen {name}'):
        to_example({'prompt': 'q', 'chosen': turns[1:], 'rejected': openai(A('b'))})


@pytest.mark.parametrize('text', [100_000 * '[', 1000 * '{"a": ', f'[{5000 * "9"}]', f'{{"a": {5000 * "9"}}}'])
def test_deep_brackets_and_very_long_numbers_are_text(text):
    assert to_example({'prompt': text, 'completion': text}) == shows(text, text)
    assert to_example({'prompt': 'p', 'chosen': text, 'rejected': 'r'}) == ranks('p', text, 'r')


def test_one_kind_for_another():
    pair, conversation = ranks('p', 'a', 'b'), prompt((U('a'), A('b'), U('c')))
    assert as_kind(pair, 'prompt') == prompt('p') and as_kind(pair, 'demonstration') == shows('p', 'a')
    assert as_kind(shows((U('a'),), (A('b'), U('c'), A('d'))), 'prompt') == conversation
    assert as_kind(conversation, 'demonstration') == shows((U('a'),), 'b')
    assert as_kind(judges('p', 'r', True), 'demonstration') == shows('p', 'r')


@pytest.mark.parametrize(
    ('example', 'kind', 'reason'),
    [
        (PromptExample(prompt='p'), 'preference', r'a prompt \(without an answer\), where a preference is needed'),
        (PromptExample(prompt='p', columns={'chosen': 'r'}), 'preference', "'chosen' alone, where a preference has"),
        (Demonstration(prompt='p', response='r'), 'labelled', 'a demonstration .*, where a labelled example is needed'),
        (Demonstration(prompt='', response='r'), 'prompt', 'a text without a prompt'),
        (Labelled(prompt='p', response='r', label=False), 'demonstration', 'labelled undesirable'),
    ],
)
def test_kinds_that_do_not_fit(example, kind, reason):
    with pytest.raises(BadRecord, match=reason):
        as_kind(example, kind)
