"""Records to examples: what is recognised, how the parts are cut, and what is refused."""

from __future__ import annotations

import json

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


CASES = {
    'prompt': ({'prompt': 'p', 'act': 'x'}, PromptExample(prompt='p', columns={'act': 'x'})),
    'prompt as turns': ({'prompt': openai(U('p'))}, PromptExample(prompt=(U('p'),))),
    'pair': ({'prompt': 'p', 'chosen': 'c', 'rejected': 'r'}, Preference(prompt='p', responses=('c', 'r'))),
    'pair with scores': (
        {'prompt': 'p', 'chosen': 'c', 'rejected': 'r', 'score_chosen': 2, 'score_rejected': 0.5},
        Preference(
            prompt='p', responses=('c', 'r'), scores=(2.0, 0.5), columns={'score_chosen': 2, 'score_rejected': 0.5}
        ),
    ),
    'instruction pair': (
        {'instruction': 'i', 'input': 'x', 'chosen': 'c', 'rejected': 'r'},
        Preference(prompt=Instruction('i', 'x'), responses=('c', 'r')),
    ),
    'stack exchange': (
        {'question': 'q', 'response_j': 'c', 'response_k': 'r'},
        Preference(prompt='q', responses=('c', 'r')),
    ),
    'hh': (
        {'chosen': HH + ' see you', 'rejected': HH + ' so what'},
        Preference(prompt=HH, responses=(' see you', ' so what')),
    ),
    'plain texts compared': (
        {'chosen': 'good film', 'rejected': 'bad film'},
        Preference(prompt='', responses=('good film', 'bad film')),
    ),
    'dialogues as turns': (
        {'chosen': openai(U('q'), A('c')), 'rejected': openai(U('q'), A('r'))},
        Preference(prompt=(U('q'),), responses=('c', 'r')),
    ),
    'ultrafeedback': (
        {'prompt': 'q', 'chosen': openai(U('q'), A('c')), 'rejected': openai(U('q'), A('r'))},
        Preference(prompt=(U('q'),), responses=('c', 'r')),
    ),
    'sharegpt pair': (
        {'conversations': sharegpt(U('q')), 'chosen': sharegpt(A('c'))[0], 'rejected': sharegpt(A('r'))[0]},
        Preference(prompt=(U('q'),), responses=('c', 'r')),
    ),
    'turns in csv cells': (
        {'messages': json.dumps(openai(U('q'), A('a')))},
        Demonstration(prompt=(U('q'),), response='a'),
    ),
    'ranked': ({'prompt': 'p', 'responses': ['a', 'b', 'c']}, Preference(prompt='p', responses=('a', 'b', 'c'))),
    'ranked by scores': (
        {'prompt': 'p', 'responses': ['a', 'b', 'c'], 'scores': [0, 2, 1]},
        Preference(prompt='p', responses=('b', 'c', 'a'), scores=(2.0, 1.0, 0.0)),
    ),
    'ranked by ranks': (
        {'prompt': 'p', 'responses': ['a', 'b'], 'ranks': [2, 1]},
        Preference(prompt='p', responses=('b', 'a')),
    ),
    'completion': ({'prompt': 'p', 'completion': 'c'}, Demonstration(prompt='p', response='c')),
    'response': ({'prompt': 'p', 'response': 'c', 'id': 4}, Demonstration(prompt='p', response='c', columns={'id': 4})),
    'json as an answer': (
        {'prompt': 'p', 'completion': '[{"a": 1}]'},
        Demonstration(prompt='p', response='[{"a": 1}]'),
    ),
    'a list in the prompt': ({'prompt': '[1, 2]', 'completion': 'x'}, Demonstration(prompt='[1, 2]', response='x')),
    'question': ({'question': 'q', 'answer': 'a'}, Demonstration(prompt='q', response='a')),
    'alpaca': (
        {'instruction': 'i', 'input': 'x', 'output': 'o'},
        Demonstration(prompt=Instruction('i', 'x'), response='o'),
    ),
    'alpaca without input': ({'instruction': 'i', 'output': 'o'}, Demonstration(prompt=Instruction('i'), response='o')),
    'dolly': (
        {'instruction': 'i', 'context': 'x', 'response': 'o'},
        Demonstration(prompt=Instruction('i', 'x'), response='o'),
    ),
    'alpaca with history': (
        {'instruction': 'i', 'input': '', 'output': 'o', 'history': [['a', 'b']], 'system': 's'},
        Demonstration(prompt=(S('s'), U('a'), A('b'), U('i')), response='o'),
    ),
    'messages': (
        {'messages': openai(S('s'), U('a'), A('b'), U('c'), A('d'))},
        Demonstration(prompt=(S('s'), U('a')), response=(A('b'), U('c'), A('d'))),
    ),
    'messages that ask': ({'messages': openai(U('a'), A('b'), U('c'))}, PromptExample(prompt=(U('a'), A('b'), U('c')))),
    'sharegpt': (
        {'conversations': sharegpt(U('a'), A('b')), 'system': 's'},
        Demonstration(prompt=(S('s'), U('a')), response='b'),
    ),
    'kto': (
        {'messages': openai(U('a'), A('b'), U('c'), A('d')), 'label': False},
        Labelled(prompt=(U('a'), A('b'), U('c')), response='d', label=False),
    ),
    'kto in text': (
        {'prompt': 'p', 'completion': 'c', 'label': 'True'},
        Labelled(prompt='p', response='c', label=True),
    ),
    'reward': ({'prompt': 'p', 'response': 'c', 'reward': -0.5}, Labelled(prompt='p', response='c', label=-0.5)),
    'text and label': ({'text': 't', 'label': '1'}, Labelled(prompt='', response='t', label=1)),
    'text and class': ({'text': 't', 'label': 'good'}, Labelled(prompt='', response='t', label='good')),
    'text and reward': ({'text': 't', 'reward': 0.25}, Labelled(prompt='', response='t', label=0.25)),
    'text': ({'text': 't', 'chosen': None}, Demonstration(prompt='', response='t', columns={'chosen': None})),
}


@pytest.mark.parametrize('name', CASES)
def test_shape(name):
    data, expected = CASES[name]
    assert to_example(data) == expected


def test_hh_prompt_ends_at_the_last_shared_turn_of_the_assistant():
    """The first letters of both answers are the same; they belong to the answers all the same."""
    found = to_example({'chosen': HH + ' see you', 'rejected': HH + ' see me'})
    assert found.prompt == HH and found.responses == (' see you', ' see me')
    # one answer is the beginning of the other
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
        (
            {'prompt': 'p', 'responses': ['a']},
            r"responses is a list \(\['a'\]\), where a list of two or more answers is needed",
        ),
        (
            {'prompt': 'p', 'responses': ['a', 'b'], 'scores': [1]},
            'where 2 numbers are needed, one for each of responses',
        ),
        ({'chosen': HH + 'a', 'rejected': '\n\nHuman: other\n\nAssistant: b'}, 'share no beginning that ends with'),
        ({'chosen': openai(U('a'), A('b')), 'rejected': openai(U('x'), A('b'))}, 'share no turns before an answer'),
        ({'messages': []}, r'messages is a list \(\[\]\), where a list of turns is needed'),
        ({'messages': [{'role': 'wizard', 'content': 'x'}]}, "turn 1 of messages has the role 'wizard'; known are"),
        ({'messages': [{'role': 'user', 'content': ''}]}, 'turn 1 of messages has no text'),
        ({'messages': openai(A('a'))}, 'begins with the assistant'),
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


def test_one_kind_for_another():
    pair = Preference(prompt='p', responses=('a', 'b'))
    assert as_kind(pair, 'prompt') == PromptExample(prompt='p')
    assert as_kind(pair, 'demonstration') == Demonstration(prompt='p', response='a')
    chat = Demonstration(prompt=(U('a'),), response=(A('b'), U('c'), A('d')))
    assert as_kind(chat, 'prompt') == PromptExample(prompt=(U('a'), A('b'), U('c')))
    asked = PromptExample(prompt=(U('a'), A('b'), U('c')))
    assert as_kind(asked, 'demonstration') == Demonstration(prompt=(U('a'),), response='b')
    assert as_kind(Labelled(prompt='p', response='r', label=True), 'demonstration') == Demonstration(
        prompt='p', response='r'
    )


@pytest.mark.parametrize(
    ('example', 'kind', 'reason'),
    [
        (PromptExample(prompt='p'), 'preference', r'a prompt \(without an answer\), where a preference is needed'),
        (Demonstration(prompt='p', response='r'), 'labelled', 'a demonstration .*, where a labelled example is needed'),
        (Demonstration(prompt='', response='r'), 'prompt', 'a text without a prompt'),
        (Labelled(prompt='p', response='r', label=False), 'demonstration', 'labelled undesirable'),
    ],
)
def test_kinds_that_do_not_fit(example, kind, reason):
    with pytest.raises(BadRecord, match=reason):
        as_kind(example, kind)
