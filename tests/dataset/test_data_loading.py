"""The one loader: sample files, real files, skipping, streams, splits, and conversion between shapes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

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
from chatgpt.testing import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / 'examples' / 'data'


@pytest.fixture(scope='module')
def tokenizer():
    return byte_tokenizer()


SAMPLE_FILES = {
    'alpaca.json': (Demonstration, 3),
    'dialogues.jsonl': (Preference, 2),
    'instruction_context.jsonl': (Demonstration, 2),
    'instruction_preference.json': (Preference, 2),
    'kto.jsonl': (Labelled, 2),
    'messages.jsonl': (Demonstration, 2),
    'preference.jsonl': (Preference, 3),
    'prompt_completion.jsonl': (Demonstration, 2),
    'prompt_response.csv': (Demonstration, 2),
    'prompts.csv': (PromptExample, 3),
    'prompts.jsonl': (PromptExample, 3),
    'prompts.txt': (Demonstration, 1),  # one text; `load_prompts` takes its lines
    'question_answer.jsonl': (Demonstration, 2),
    'ranked.jsonl': (Preference, 2),
    'rewards.jsonl': (Labelled, 3),
    'sharegpt.json': (Demonstration, 2),
    'sharegpt_preference.json': (Preference, 2),
    'stories.txt': (Demonstration, 3),
    'text.jsonl': (Demonstration, 2),
    'text_label.csv': (Labelled, 3),
}


@pytest.mark.parametrize('name', sorted(p.name for p in SAMPLES.iterdir() if p.name != 'README.md'))
def test_sample_file(name, tokenizer):
    kind, number = SAMPLE_FILES[name]
    found = load_examples(SAMPLES / name)
    assert [type(e) for e in found] == [kind] * number and found.num_skipped == 0
    load = {Demonstration: load_demonstrations, Preference: load_preferences, Labelled: load_labelled}.get(kind)
    tokenized = load(SAMPLES / name, tokenizer)[0] if load else load_prompts(SAMPLES / name, tokenizer)
    assert len(tokenized) == number


def test_bad_records_are_named_or_counted(tmp_path, tokenizer):
    path, good = tmp_path / 'a.jsonl', '{"prompt": "p", "chosen": "c", "rejected": "r"}\n'
    path.write_text(good + good.replace('"r"', '""') + '{"x": 1}\nno\n')
    assert len(load_examples(path, max_examples=1)) == 1  # the bad records are not reached
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


def test_splits(tokenizer):
    data = list(range(200))
    train, validation = split_examples(data, 10, seed=1)
    assert len(validation) == 20 and sorted(train + validation) == data
    assert train == sorted(train) and validation == sorted(validation)
    assert (train, validation) == split_examples(data, 10, seed=1) and validation != split_examples(data, 10, seed=2)[1]
    assert set(split_examples(data, 5, seed=1)[1]) < set(validation)  # more percent only adds
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


@pytest.mark.parametrize(
    ('example', 'shape', 'back'),
    [
        (PromptExample(prompt='p'), 'prompt', PromptExample(prompt='p')),
        (Demonstration(prompt='p', response='r'), 'prompt_completion', Demonstration(prompt='p', response='r')),
        (
            Demonstration(prompt=Instruction('i', 'x'), response='o'),
            'alpaca',
            Demonstration(prompt=Instruction('i', 'x'), response='o'),
        ),
        (
            Demonstration(prompt=Instruction('i', 'x'), response='o'),
            'messages',
            Demonstration(prompt=(U('i\n\nx'),), response='o'),
        ),
        (Demonstration(prompt=(U('a'),), response=(A('b'), U('c'), A('d'))), 'sharegpt', None),
        (Demonstration(prompt=(U('a'),), response=(A('b'), U('c'), A('d'))), 'messages', None),
        (Preference(prompt='p', responses=('a', 'b')), 'preference', None),
        (
            Preference(prompt=(U('a'),), responses=('b', 'c')),
            'dialogues',
            Preference(prompt='\n\nHuman: a\n\nAssistant:', responses=(' b', ' c')),
        ),
        (
            Preference(prompt='p', responses=('a', 'b')),
            'dialogues',
            Preference(prompt='\n\nHuman: p\n\nAssistant:', responses=(' a', ' b')),
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


@pytest.mark.parametrize(
    ('example', 'shape', 'reason'),
    [
        (PromptExample(prompt='p'), 'alpaca', r'a prompt \(without an answer\), where a demonstration is needed'),
        (Demonstration(prompt='p', response='r'), 'preference', 'a demonstration'),
        (Demonstration(prompt='p', response='r'), 'text_label', 'no label'),
        (Demonstration(prompt='', response='r'), 'messages', 'a text without a prompt'),
        (Demonstration(prompt=(U('a'), A('b'), U('c')), response='d'), 'alpaca', 'more than one question'),
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
    for name in TARGETS:  # every shape can be made from one of the samples
        sample = 'kto.jsonl' if name == 'text_label' else 'preference.jsonl'
        script['main']([str(SAMPLES / sample), str(tmp_path / f'{name}.jsonl'), '--to', name])
