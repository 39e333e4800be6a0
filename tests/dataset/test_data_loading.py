"""Loaders of examples and prompts: sample files, skipping, splits, order, conversion of shapes, and the warnings and
errors about truncated rows, equal pairs, rows of another kind and reserved column names."""

from __future__ import annotations

import datetime
import json
import runpy
import warnings
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import torch

from chatgpt.data import (
    load_demonstrations,
    load_examples,
    load_labelled,
    load_preferences,
    load_prompts,
    split_examples,
)
from chatgpt.data.convert import TARGETS, to_records, write_records
from chatgpt.data.examples import BadRecord, Demonstration, Instruction, Labelled, Message, Preference, PromptExample
from chatgpt.data.prompts import PromptOrder, PromptSet, as_prompts
from chatgpt.data.shapes import to_example
from chatgpt.data.tokenize import check_tokenizer
from chatgpt.testing import byte_tokenizer, tiny_config
from chatgpt.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / 'examples' / 'data'


@pytest.fixture(scope='module')
def tokenizer():
    return byte_tokenizer()


PREFERENCES = ('dialogues', 'instruction_preference', 'preference', 'ranked', 'sharegpt_preference')
KINDS = dict.fromkeys(PREFERENCES, Preference) | dict.fromkeys(('kto', 'rewards', 'text_label'), Labelled)
LOADERS = {Demonstration: load_demonstrations, Preference: load_preferences, Labelled: load_labelled}


@pytest.mark.parametrize('path', sorted(p for p in SAMPLES.iterdir() if p.suffix != '.md'), ids=lambda p: p.name)
def test_sample_file(path, tokenizer):
    # a text file is one text; `load_prompts` takes its lines
    kind = PromptExample if path.name in ('prompts.csv', 'prompts.jsonl') else KINDS.get(path.stem, Demonstration)
    found = load_examples(path)
    assert {type(e) for e in found} == {kind} and found.num_skipped == 0
    tokenized = LOADERS[kind](path, tokenizer)[0] if kind in LOADERS else load_prompts(path, tokenizer)
    assert len(tokenized) == len(found) > 0


def test_bad_records_are_named_or_counted(tmp_path, tokenizer):
    path, good = tmp_path / 'a.jsonl', '{"prompt": "p", "chosen": "c", "rejected": "r"}\n'
    path.write_text(good + good.replace('"r"', '""') + '{"x": 1}\nno\n')
    assert len(load_examples(path, max_examples=1)) == 1  # loading stops before the bad records
    with pytest.raises(ValueError, match=r'a.jsonl, line 2: answer 2 of 2 is empty\. Bad records'):
        load_examples(path)
    found = load_examples(path, skip_bad_records=True)
    assert len(found) == 1 and found.num_skipped == 3
    assert [r.split(': ')[0][-6:] for r in found.reasons] == ['line 2', 'line 3', 'line 4']
    train, validation = load_preferences(path, tokenizer, skip_bad_records=True)
    assert len(train) == 1 and train.num_skipped == 3 and len(validation) == 0
    with pytest.raises(ValueError, match='none of 1 records can be used; the first: data, row 1: no known shape'):
        load_examples([{'x': 1}], skip_bad_records=True)
    with pytest.raises(ValueError, match='line 1: a preference .ranked answers., where a labelled example is needed'):
        load_labelled(path, tokenizer)


def test_what_cannot_be_tokenized_is_a_bad_record_too(tokenizer):
    rows = [{'prompt': 'p', 'completion': 'x' * n} for n in (3, 30, 4)]
    with pytest.raises(ValueError, match='data, row 2: 1 tokens of prompt and 31 of response, .*max_length=10'):
        load_demonstrations(rows, tokenizer, max_length=10, overflow='refuse')
    train, _ = load_demonstrations(rows, tokenizer, max_length=10, overflow='refuse', skip_bad_records=True)
    assert [s.num_tokens for s in train] == [5, 6] and train.num_skipped == 1
    train, _ = load_demonstrations(rows, tokenizer, max_length=10)
    assert [s.num_tokens for s in train] == [5, 10, 6]


def test_own_column_names():
    rows = [{'q': 'a', 'a': 'b', 'text': 't'}]
    (found,) = load_examples(rows, columns={'prompt': 'q', 'completion': 'a'})
    assert found == Demonstration(prompt='a', response='b', columns={'text': 't'}, where='data, row 1')
    with pytest.raises(ValueError, match="row 1: there is no column 'q' .given for prompt.; the columns are 'x'"):
        load_examples([{'x': 'a'}], columns={'prompt': 'q'})
    with pytest.raises(ValueError, match="kind='prompts'; give 'prompt', 'demonstration'"):
        load_examples(['x'], kind='prompts')


def test_a_data_frame_is_its_rows(tokenizer):
    rows = [{'prompt': 'a', 'response': 'b'}, {'prompt': 'c', 'response': 'd'}]
    assert load_examples(pandas.DataFrame(rows)) == load_examples(rows)
    prompts = as_prompts(pandas.DataFrame([{'prompt': 'a', 'answer': 1}, {'prompt': 'c'}]), tokenizer)
    assert [prompt.text for prompt in prompts] == ['a', 'c'] and prompts[1].columns == {'answer': None}


def test_prompts_that_are_cut_are_known_by_position(tokenizer):
    prompts = load_prompts([{'prompt': text} for text in ('abcdef', 'a', 'abcdefgh')], tokenizer, max_prompt_tokens=4)
    assert prompts.cut == {0, 2} and prompts.facts()['cut'] == 2
    part = prompts.subset([1, 2])
    assert [prompt.text for prompt in part] == ['a', 'abcdefgh'] and part.cut == {1}


def test_splits(tokenizer):
    data = list(range(200))
    train, validation = split_examples(data, 10, seed=1)
    assert len(validation) == 20 and sorted(train + validation) == data
    assert train == sorted(train) and validation == sorted(validation)
    assert (train, validation) == split_examples(data, 10, seed=1) and validation != split_examples(data, 10, seed=2)[1]
    assert set(split_examples(data, 5, seed=1)[1]) < set(validation)  # a larger percentage only adds
    assert split_examples(data, 0) == (data, []) and len(split_examples(data, 0.001)[1]) == 1
    with pytest.raises(ValueError, match='validation percentage 100; give a number from 0 to below 100'):
        split_examples(data, 100)
    with pytest.raises(ValueError, match='1 examples cannot be split'):
        split_examples([1], 5)
    rows = [{'text': f'story {i}'} for i in range(10)]
    for given, lengths in (({'validation_percentage': 20}, (8, 2)), ({'validation_source': ['a', 'b']}, (10, 2))):
        train, validation = load_demonstrations(rows, tokenizer, seed=3, **given)
        assert (len(train), len(validation)) == lengths
    with pytest.raises(ValueError, match='validation_source and validation_percentage are both given; give one'):
        load_demonstrations(rows, tokenizer, validation_source=['a'], validation_percentage=5)


U, A = (lambda text, role=role: Message(role, text) for role in ('user', 'assistant'))


ASKED = Demonstration(prompt=Instruction('i', 'x'), response='o')
TALK = Demonstration(prompt=(U('a'),), response=(A('b'), U('c'), A('d')))
PAIR = Preference(prompt='p', responses=('a', 'b'))
HH = '\n\nHuman: {}\n\nAssistant:'


@pytest.mark.parametrize(
    ('example', 'shape', 'back'),
    [
        (PromptExample(prompt='p'), 'prompt', None),
        (Demonstration(prompt='p', response='r'), 'prompt_completion', None),
        (ASKED, 'alpaca', None),
        (ASKED, 'messages', Demonstration(prompt=(U('i\n\nx'),), response='o')),
        (TALK, 'sharegpt', None),
        (TALK, 'messages', None),
        (PAIR, 'preference', None),
        (PAIR, 'dialogues', Preference(prompt=HH.format('p'), responses=(' a', ' b'))),
        (
            Preference(prompt=(U('p'),), responses=('a', 'b')),
            'dialogues',
            Preference(prompt=HH.format('p'), responses=(' a', ' b')),
        ),
        (Preference(prompt='', responses=('a', 'b')), 'dialogues', None),
        (Preference(prompt='p', responses=('a', 'b', 'c'), scores=(3.0, 2.0, 1.0)), 'ranked', None),
        (Labelled(prompt=(U('a'),), response='b', label=False), 'kto', None),
        (Labelled(prompt='', response='b', label=0.5), 'text_label', None),
        (Demonstration(prompt='a', response='b'), 'text', Demonstration(prompt='', response='ab')),
    ],
)
@pytest.mark.parametrize('suffix', ['.jsonl', '.json', '.csv', '.parquet'])
def test_conversion_there_and_back(tmp_path, example, shape, back, suffix):
    path = tmp_path / f'a{suffix}'
    assert write_records(to_records(example, shape), path) == 1
    (found,) = load_examples(path)
    expected = back or example
    assert type(found) is type(expected)
    for name in ('prompt', 'response', 'responses', 'scores', 'label'):
        assert getattr(found, name, None) == getattr(expected, name, None)


def test_conversion_to_several_records():
    ranked = Preference(prompt='p', responses=('a', 'b', 'c'))
    pairs = [(r['chosen'], r['rejected']) for r in to_records(ranked, 'preference')]
    assert pairs == [('a', 'b'), ('a', 'c'), ('b', 'c')]
    judged = [(r['messages'][-1]['content'], r['label']) for r in to_records(ranked, 'kto')]
    assert judged == [('a', True), ('c', False)]


def test_conversion_leaves_ties_out_and_keeps_scores():
    ranked = Preference(prompt='p', responses=('a', 'b', 'c'), scores=(2.0, 2.0, 1.0))
    scores = {'score_chosen': 2.0, 'score_rejected': 1.0}
    pairs = [{'prompt': 'p', 'chosen': better, 'rejected': 'c'} | scores for better in 'ab']
    assert to_records(ranked, 'preference') == pairs
    prompt = HH.format('p')
    assert to_records(ranked, 'dialogues') == [
        {'chosen': f'{prompt} {better}', 'rejected': f'{prompt} c'} | scores for better in 'ab'
    ]
    assert [to_example(record).scores for record in to_records(ranked, 'dialogues')] == [(2.0, 1.0)] * 2
    assert [record['label'] for record in to_records(ranked, 'kto')] == [True, False]
    tied = Preference(prompt='p', responses=('a', 'b'), scores=(1.0, 1.0))
    for shape in ('preference', 'dialogues', 'kto'):
        with pytest.raises(BadRecord, match='equal scores of all answers'):
            to_records(tied, shape)


def test_prompts_keep_the_answer_and_other_columns(tmp_path, tokenizer):
    date = datetime.date(2024, 2, 29)
    shown = Demonstration(prompt='2 + 3?', response='5', columns={'level': 1, 'date': date})
    judged = Labelled(prompt='2 + 3?', response='6', label=False, columns={'level': 2})
    records = [record for example in (shown, judged) for record in to_records(example, 'prompt')]
    assert records == [{'prompt': '2 + 3?', 'answer': '5', 'level': 1, 'date': date}, {'prompt': '2 + 3?', 'level': 2}]
    pair = Preference(prompt='p', responses=('a', 'b'), columns={'answer': 'own'})
    assert to_records(pair, 'prompt') == [{'prompt': 'p', 'answer': 'own'}]
    for suffix in ('.jsonl', '.json', '.csv'):
        write_records(records[:1], tmp_path / f'a{suffix}')
        (found,) = load_prompts(tmp_path / f'a{suffix}', tokenizer)
        level = '1' if suffix == '.csv' else 1
        assert (found.text, found.columns) == ('2 + 3?', {'answer': '5', 'level': level, 'date': '2024-02-29'})


def test_answers_of_equal_rank_make_no_pair(tokenizer):
    row = {'prompt': 'p', 'responses': ['a', 'b', 'c'], 'ranks': [1, 2, 2]}
    (found,), _ = load_preferences([row], tokenizer)
    assert found.ranks() == [0, 1, 1]
    with pytest.warns(UserWarning, match='1 of 2 preferences have answers that do not differ'):
        load_preferences([row, row | {'ranks': [1, 1, 1]}], tokenizer)


@pytest.mark.parametrize(
    ('example', 'shape', 'reason'),
    [
        (PromptExample(prompt='p'), 'alpaca', r'a prompt \(without an answer\), where a demonstration is needed'),
        (Demonstration(prompt='p', response='r'), 'preference', 'a demonstration'),
        (Demonstration(prompt='p', response='r'), 'text_label', 'no label'),
        (Demonstration(prompt='', response='r'), 'messages', 'a text without a prompt'),
        (Demonstration(prompt=(U('a'), A('b'), U('c')), response='d'), 'alpaca', 'more than one question'),
        (Demonstration(prompt='a', response=(A('b'), U('c'), A('d'))), 'alpaca', 'more than one question'),
        (Labelled(prompt='p', response='r', label=3), 'kto', 'neither a preference nor a labelled answer'),
    ],
)
def test_conversions_that_would_lose_something(example, shape, reason):
    with pytest.raises(BadRecord, match=reason):
        to_records(example, shape)


def test_writing_refuses(tmp_path):
    (tmp_path / 'a.json').write_text('keep')
    refusals = {'a.json': 'the file exists', 'a.doc': "unknown kind of file '.doc'", 'x/a.json': 'there is no folder'}
    for path, reason in refusals.items():
        with pytest.raises(ValueError, match=reason):
            write_records([{'a': 1}], tmp_path / path)
    assert (tmp_path / 'a.json').read_text() == 'keep'
    with pytest.raises(ValueError, match='there are no records to write'):
        write_records([], tmp_path / 'b.json')
    assert [p.name for p in tmp_path.iterdir()] == ['a.json']


def test_convert_script(tmp_path, capsys):
    script = runpy.run_path(str(ROOT / 'examples' / 'convert_data.py'))
    script['main']([str(SAMPLES / 'alpaca.json'), str(tmp_path / 'out.jsonl'), '--to', 'messages'])
    assert '3 records written, 0 skipped' in capsys.readouterr().out
    assert len(load_examples(tmp_path / 'out.jsonl')) == 3
    with pytest.raises(ValueError, match=r'sharegpt.json, line 2: more than one question'):
        script['main']([str(SAMPLES / 'sharegpt.json'), str(tmp_path / 'b.json'), '--to', 'alpaca'])
    script['main']([str(SAMPLES / 'sharegpt.json'), str(tmp_path / 'b.json'), '--to', 'alpaca', '--skip_bad_records'])
    assert '1 records written, 1 skipped' in capsys.readouterr().out
    for name in TARGETS:  # one of the samples converts to each shape
        sample = 'kto.jsonl' if name == 'text_label' else 'preference.jsonl'
        script['main']([str(SAMPLES / sample), str(tmp_path / f'{name}.jsonl'), '--to', name])


HI = HH.format('hi')


def silent():
    return warnings.catch_warnings(action='error')


def test_rows_that_are_cut_are_counted_and_the_longest_is_named():
    tokenizer = byte_tokenizer()
    pairs = (('ab', 'cd'), ('abcdef', 'ghi'), ('a' * 20, 'b'))
    rows = [{'prompt': prompt, 'response': response} for prompt, response in pairs]
    with pytest.warns(UserWarning, match=r'2 of 3 records are longer than 8 tokens.*The longest has 22 tokens \(.*3\)'):
        load_demonstrations(rows, tokenizer, max_length=8)
    with silent():
        load_demonstrations(rows, tokenizer, max_length=22)  # with an end token
    train, validation = ([{'text': 'a' * n} for n in lengths] for lengths in ((3, 30), (40, 12)))
    with pytest.warns(UserWarning, match='1 of 2 records') as seen:
        load_demonstrations(train, tokenizer, max_length=10, validation_source=validation)
    assert [str(w.message).split(' records')[0] for w in seen] == ['1 of 2', '2 of 2']  # counted per source


def test_preferences_with_equal_responses_are_warned_about():
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
    chosen, rejected = ({'from': 'assistant', 'content': text} for text in 'cr')
    row = {'context': [{'from': 'human', 'content': 'q'}], 'chosen': chosen, 'rejected': rejected}
    assert to_example(row) == Preference(prompt=(Message('user', 'q'),), responses=('c', 'r'))
    assert to_example({'context': 'q', 'chosen': 'c', 'rejected': 'r'}) == Preference(prompt='q', responses=('c', 'r'))
    assert load_prompts([row], byte_tokenizer())[0].columns.keys() == {'chosen', 'rejected'}


TURN = (Message('user', 'p'),)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        # a turn, as in records with a system message
        ('prompt,chosen,rejected,system,margin\np,c,r,,\n', Preference(prompt=TURN, responses=('c', 'r'))),
        ('chosen,rejected,score_chosen,score_rejected\nc,r,,\n', Preference(prompt='', responses=('c', 'r'))),
        (
            'prompt,responses,scores,ranks\np,"[""a"", ""b""]",,"[2, 1]"\n',
            Preference(prompt='p', responses=('b', 'a')),
        ),
        ('prompt,completion,messages\np,c,\n', Demonstration(prompt='p', response='c')),
        ('prompt,conversations\np,\n', PromptExample(prompt='p')),
    ],
)
def test_an_empty_cell_of_an_optional_column_is_absent(tmp_path, text, expected):
    path = tmp_path / 'a.csv'
    path.write_text(text)
    assert load_examples(path) == [replace(expected, where=f'{path}, line 2')]


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
    texts = [' yes\n\nHuman: more\n\nAssistant: fine', ' no\n\nHuman: why\n\nAssistant: so']
    row = {'chosen': HI + texts[0], 'rejected': HI + texts[1] + '\n\nHuman: bye'}
    (pair,), _ = load_preferences([row], tokenizer)
    assert [tokenizer.decode(r, skip_special_tokens=True) for r in pair.responses] == texts
    learned = [r[mask] for r, mask in zip(pair.responses, pair.response_masks, strict=True)]
    assert [tokenizer.decode(r, skip_special_tokens=True) for r in learned] == [' yes fine', ' no so']


@pytest.mark.parametrize('form', ['text', 'turns'])
def test_dialogues_that_part_in_the_humans_words_are_bad_records(form):
    a = [('user', 'hi'), ('assistant', 'yes'), ('user', 'more'), ('assistant', 'fine')]
    b = [('user', 'hi'), ('assistant', 'yes'), ('user', 'less'), ('assistant', 'well')]
    if form == 'text':
        names = {'user': 'Human', 'assistant': 'Assistant'}
        rows = [''.join(f'\n\n{names[role]}: {text}' for role, text in turns) for turns in (a, b)]
    else:
        rows = [[{'role': role, 'content': text} for role, text in turns] for turns in (a, b)]
    with pytest.raises(BadRecord, match='chosen and rejected first differ in what the human says'):
        to_example({'chosen': rows[0], 'rejected': rows[1]})


def test_a_column_with_the_name_of_an_argument_is_an_error():
    for name in ('prompts', 'responses', 'samples', 'outputs'):
        record = Prompt(ids=torch.tensor([3]), columns={name: 1, 'answer': 'z'})
        row = {'prompt': 'p', name: ['x', 'y'], 'answer': 'z'}
        for load in (lambda row=row: load_prompts([row], byte_tokenizer()), lambda r=record: as_prompts([r])):
            with pytest.warns(UserWarning, match=f'the prompts have columns called {name},'):
                assert load()[0].columns == {'answer': 'z'}


def test_turns_in_json_text_keep_the_system_message(tokenizer):
    row = {'prompt': json.dumps([{'role': 'user', 'content': 'q'}]), 'system': 'be brief'}
    turns = {'prompt': [{'role': 'user', 'content': 'q'}], 'system': 'be brief'}
    assert load_prompts([row], tokenizer)[0].text == load_prompts([turns], tokenizer)[0].text != 'q'


def texts(prompts):
    return [p.text for p in prompts]


def test_prompts_of_a_csv_with_their_columns(tmp_path, tokenizer):
    path = tmp_path / 'a.csv'
    path.write_text('act,prompt\nx,one\ny,"two\nlines"\n')
    found = load_prompts(str(path), tokenizer)
    assert texts(found) == ['one', 'two\nlines'] and [p.columns for p in found] == [{'act': 'x'}, {'act': 'y'}]
    assert found[0].ids.tolist() == list(b'one') and found[0].ids.dtype == torch.int64 and found.num_skipped == 0
    assert texts(load_prompts(path, tokenizer, column='act')) == ['x', 'y']
    assert texts(load_prompts(path, tokenizer, max_prompts=1)) == ['one']


def test_prompts_of_other_shapes(tmp_path, tokenizer):
    found = load_prompts([{'question': 'q', 'answer': 'a'}], tokenizer)
    assert texts(found) == ['q'] and found[0].columns == {'answer': 'a'}
    found = load_prompts([{'instruction': 'i', 'input': 'x', 'output': 'o'}], tokenizer)
    assert texts(found) == ['\n\nHuman: i\n\nx\n\nAssistant:'] and found[0].columns == {'output': 'o'}
    found = load_prompts([{'question': 'q', 'answer': 12}], tokenizer)
    assert texts(found) == ['q'] and found[0].columns == {'answer': 12}
    talk = [{'role': 'user', 'content': 'hi'}]
    with pytest.raises(ValueError, match='the prompt ends with a turn of the assistant'):
        load_prompts([{'prompt': [*talk, {'role': 'assistant', 'content': 'yes'}]}], tokenizer)
    assert texts(load_prompts([{'messages': talk}, {'prompt': talk}], tokenizer)) == ['\n\nHuman: hi\n\nAssistant:'] * 2
    assert texts(load_prompts(['a', 'b'], tokenizer)) == ['a', 'b']
    (tmp_path / 'a.txt').write_text('one\n\ntwo\n')
    assert texts(load_prompts(tmp_path / 'a.txt', tokenizer)) == ['one', 'two']
    chosen = {'prompt': 'p', 'chosen': 'c', 'rejected': 'r'}
    assert load_prompts([chosen], tokenizer)[0].columns == {'chosen': 'c', 'rejected': 'r'}


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('act,text\nx,y\n', "a.csv, line 2: there is no column 'prompt' for the prompt; the columns are 'act', 'text'"),
        ('act,prompt\nx,y\nx,"  "\n', 'a.csv, line 3: the prompt is empty'),
        ('prompt\nhello\n' + 'x' * 9, 'a.csv, line 3: the prompt has 9 tokens, and there is room for 5'),
    ],
)
def test_bad_prompt_files(tmp_path, tokenizer, text, reason):
    (tmp_path / 'a.csv').write_text(text)
    with pytest.raises(ValueError, match=reason) as error:
        load_prompts(tmp_path / 'a.csv', tokenizer, max_prompt_tokens=5, overflow='refuse')
    assert '\n' not in str(error.value)


def test_bad_prompts_can_be_skipped(tmp_path, tokenizer):
    rows = ('{"prompt": "one"}', '{"prompt": ""}', 'nonsense', '{"prompt": null}', '{"text": "x"}', '{"prompt": "two"}')
    (tmp_path / 'a.jsonl').write_text('\n'.join(rows))
    found = load_prompts(tmp_path / 'a.jsonl', tokenizer, skip_bad_records=True)
    assert texts(found) == ['one', 'two'] and found.num_skipped == 4
    (tmp_path / 'b.csv').write_text('act\nx\ny\n')
    with pytest.raises(ValueError, match='none of 2 records has a usable prompt; the first: .*b.csv, line 2: there is'):
        load_prompts(tmp_path / 'b.csv', tokenizer, skip_bad_records=True)


def test_long_prompts_lose_their_left_end(tokenizer):
    assert load_prompts(['abcdef'], tokenizer, max_prompt_tokens=4)[0].ids.tolist() == list(b'cdef')
    with pytest.raises(ValueError, match='max_prompt_tokens=0; give at least 1'):
        load_prompts(['a'], tokenizer, max_prompt_tokens=0)
    with pytest.raises(ValueError, match="overflow='cut'; give 'truncate' or 'refuse'"):
        load_prompts(['a'], tokenizer, overflow='cut')


def test_as_prompts(tokenizer):
    given = [Prompt(ids=torch.tensor([1, 2])), torch.tensor([3]), torch.tensor([[4, 5]])]
    assert [p.ids.tolist() for p in as_prompts(given)] == [[1, 2], [3], [4, 5]]
    assert texts(as_prompts(['a', {'prompt': 'b'}], tokenizer)) == ['a', 'b']
    refused = [
        ([], 'there are no prompts'),
        (['a'], 'need a tokenizer'),
        ([3], 'prompt 0 is a int'),
        ([torch.tensor([])], 'is empty'),
    ]
    for given, reason in refused:
        with pytest.raises(ValueError, match=reason):
            as_prompts(given)


def test_fingerprint_follows_the_ids(tokenizer):
    found = [load_prompts(given, tokenizer).fingerprint() for given in (['ab', 'c'], ['ab', 'c'], ['a', 'bc'])]
    assert found[0] == found[1] != found[2]


def test_order_is_without_replacement_and_depends_on_seed_and_epoch_only():
    draws = [PromptOrder(50, seed=3)[i] for i in range(150)]
    for epoch in range(3):
        assert sorted(draws[50 * epoch : 50 * epoch + 50]) == list(range(50))
    assert PromptOrder(1, seed=3)[7] == 0
    order = PromptOrder(50, seed=3)
    assert [order[i] for i in reversed(range(150))] == draws[::-1]  # the index of a draw is the only state
    assert draws[:50] != draws[50:100] and draws[:50] != [PromptOrder(50, seed=4)[i] for i in range(50)]
    assert draws[:50] != list(range(50))


def test_check_tokenizer(tokenizer):
    check_tokenizer(tokenizer, tiny_config(vocab_size=259))
    check_tokenizer(tokenizer, tiny_config(vocab_size=320))  # vocabularies are often rounded up
    with pytest.raises(ValueError, match='its token .* has id 258, but the model has a vocabulary of 64'):
        check_tokenizer(tokenizer, tiny_config(vocab_size=64))
    config = tiny_config(vocab_size=1000)
    config.eos_token_id = 900
    with pytest.raises(ValueError, match="the model's end token has id 900, but the tokenizer has 259 tokens"):
        check_tokenizer(tokenizer, config)
    config.eos_token_id = [900, 258]
    check_tokenizer(tokenizer, config)
    config.eos_token_id = 50256  # a family's default beyond this small model's vocabulary is ignored
    check_tokenizer(tokenizer, config)
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match='the tokenizer has no end token'):
        check_tokenizer(endless, tiny_config(vocab_size=259))


def test_tasks_without_text_have_no_facts():
    """An environment writes its tasks, so one empty prompt is neither a small data set nor a repetition."""
    nothing = Prompt(ids=torch.zeros(0, dtype=torch.int64))
    assert PromptSet([nothing, nothing]).facts() == {}
    assert PromptSet([nothing, Prompt(ids=torch.tensor([3]))]).facts()['prompts'] == 2


def test_a_flag_is_named_only_where_there_is_one():
    rows = [{'problem': 'p', 'solution': 's'}]
    with pytest.raises(ValueError, match='name the column of the prompt with --prompt_column'):
        load_prompts(rows, byte_tokenizer())
    with pytest.raises(ValueError, match='rename the column of the prompt to prompt$') as error:
        as_prompts(rows, byte_tokenizer())
    assert '--' not in str(error.value)
