"""What nobody should train on, or lose, without a word: cut rows, pairs that do not differ, rows of another kind, odd
columns."""

from __future__ import annotations

import warnings

import pytest
import torch

from chatgpt.data import load_demonstrations, load_preferences, load_prompts
from chatgpt.data.examples import BadRecord, Message, Preference
from chatgpt.data.prompts import as_prompts
from chatgpt.data.shapes import to_example
from chatgpt.testing.fakes import byte_tokenizer
from chatgpt.types import Prompt

HH = '\n\nHuman: hi\n\nAssistant:'


def silent():
    return warnings.catch_warnings(action='error')


def test_rows_that_are_cut_are_counted_and_the_longest_is_named():
    tokenizer = byte_tokenizer()
    rows = [
        {'prompt': 'ab', 'response': 'cd'},
        {'prompt': 'abcdef', 'response': 'ghi'},
        {'prompt': 'a' * 20, 'response': 'b'},
    ]
    lengths = [len(r['prompt']) + len(r['response']) + 1 for r in rows]  # and an end token
    longest = max(lengths) + len(tokenizer('a')['input_ids']) - 1  # and a begin token, where there is one
    with pytest.warns(
        UserWarning, match=rf'2 of 3 records are longer than 8 tokens.*The longest has {longest} tokens \(.*3\)'
    ):
        load_demonstrations(rows, tokenizer, max_length=8)
    with silent():
        load_demonstrations(rows, tokenizer, max_length=longest)


def test_each_source_is_counted_by_itself():
    tokenizer = byte_tokenizer()
    with pytest.warns(UserWarning, match='1 of 2 records') as seen:
        load_demonstrations(
            [{'text': 'abc'}, {'text': 'a' * 30}],
            tokenizer,
            max_length=10,
            validation_source=[{'text': 'b' * 40}, {'text': 'c' * 12}],
        )
    assert [str(w.message).split(' records')[0] for w in seen] == ['1 of 2', '2 of 2']


def test_preferences_that_teach_less_than_they_seem_to_are_told():
    pair = {'prompt': 'p', 'chosen': 'a', 'rejected': 'b'}
    tokenizer = byte_tokenizer()
    rows = [pair, pair | {'rejected': 'a'}, pair, pair | {'score_chosen': 1, 'score_rejected': 1}]
    with pytest.warns(UserWarning, match=r'2 of 4 preferences have answers that do not differ.*first: .*2'):
        load_preferences(rows, tokenizer)
    with silent():
        load_preferences([pair, pair], tokenizer)
    alike = {'prompt': 'p', 'chosen': 'a' * 20 + 'b', 'rejected': 'a' * 20 + 'c'}
    with pytest.warns(UserWarning, match='1 of 1 preferences have answers that do not differ'):
        load_preferences([alike], tokenizer, max_length=8)
    with pytest.warns(UserWarning, match='1 of 2 records are preferences, the first: .*2; only the best answer'):
        train, _ = load_demonstrations([{'prompt': 'p', 'response': 'r'}, pair], tokenizer)
    assert len(train) == 2
    for more in ({'score_chosen': 1, 'score_rejected': 2}, {'margin': -1}):
        with pytest.raises(BadRecord, match='contradict the order of the answers'):
            to_example(pair | more)


def test_context_chosen_rejected():
    context = [{'from': 'human', 'content': 'q'}]
    row = {
        'context': context,
        'chosen': {'from': 'assistant', 'content': 'c'},
        'rejected': {'from': 'assistant', 'content': 'r'},
    }
    assert to_example(row) == Preference(prompt=(Message('user', 'q'),), responses=('c', 'r'))
    assert to_example({'context': 'q', 'chosen': 'c', 'rejected': 'r'}) == Preference(prompt='q', responses=('c', 'r'))
    assert load_prompts([row], byte_tokenizer())[0].columns.keys() == {'chosen', 'rejected'}


def panda(*votes):
    names = {f'annotator{i}': vote for i, vote in enumerate(votes, 1)}
    return {'idx': 1, 'instruction': 'i', 'input': '', 'response1': 'a', 'response2': 'b'} | names


def test_pandalm():
    found = to_example(panda(2, 2, 1))
    assert found.responses == ('b', 'a') and found.scores == (2.0, 1.0) and found.columns == {'idx': 1}
    assert to_example(panda(0, 1)).responses == ('a', 'b')
    tied = to_example(panda(0, 0))
    assert tied.scores == (0.0, 0.0)  # makes no pair
    for row, fault in ((panda(), 'found none of them'), (panda(1, 3), r"found \{'annotator1': 1, 'annotator2': 3\}")):
        with pytest.raises(BadRecord, match=f'response1 and response2 need verdicts.*{fault}'):
            to_example(row)


def test_dialogues_in_text_that_part_early_do_not_train_on_the_human():
    tokenizer = byte_tokenizer()
    row = {
        'chosen': HH + ' yes\n\nHuman: more\n\nAssistant: fine',
        'rejected': HH + ' no\n\nHuman: why\n\nAssistant: so\n\nHuman: bye',
    }
    (pair,), _ = load_preferences([row], tokenizer)
    texts = [tokenizer.decode(r.tolist(), skip_special_tokens=True) for r in pair.responses]
    assert texts == [' yes\n\nHuman: more\n\nAssistant: fine', ' no\n\nHuman: why\n\nAssistant: so']
    learned = [
        tokenizer.decode([t for t, m in zip(r.tolist(), mask.tolist(), strict=True) if m], skip_special_tokens=True)
        for r, mask in zip(pair.responses, pair.response_masks, strict=True)
    ]
    assert learned == [' yes fine', ' no so']


@pytest.mark.parametrize('form', ['text', 'turns'])
def test_dialogues_that_part_in_the_humans_words_are_bad_records(form):
    a = [('user', 'hi'), ('assistant', 'yes'), ('user', 'more'), ('assistant', 'fine')]
    b = [('user', 'hi'), ('assistant', 'yes'), ('user', 'less'), ('assistant', 'well')]
    if form == 'text':
        names = {'user': 'Human', 'assistant': 'Assistant'}
        rows = [''.join(f'\n\n{names[role]}: {said}' for role, said in turns) for turns in (a, b)]
    else:
        rows = [[{'role': role, 'content': said} for role, said in turns] for turns in (a, b)]
    with pytest.raises(BadRecord, match='chosen and rejected first differ in what the human says'):
        to_example({'chosen': rows[0], 'rejected': rows[1]})


def test_a_column_with_the_name_of_an_argument_is_named_and_not_handed_on():
    for name in ('prompts', 'responses', 'samples', 'outputs'):
        record = Prompt(ids=torch.tensor([3]), columns={name: 1, 'answer': 'z'})
        row = {'prompt': 'p', name: ['x', 'y'], 'answer': 'z'}
        for load in (lambda row=row: load_prompts([row], byte_tokenizer()), lambda r=record: as_prompts([r])):
            with pytest.warns(UserWarning, match=f'the prompts have columns called {name},'):
                assert load()[0].columns == {'answer': 'z'}
