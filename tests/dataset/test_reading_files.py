"""Reading records from every kind of file, irregular files, and error messages."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from chatgpt.data import load_demonstrations, load_labelled, load_preferences
from chatgpt.data.prompts import load_prompts
from chatgpt.data.reading import BadRecords, read_records
from chatgpt.testing import byte_tokenizer


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(source, bad=None, **kw):
    return [(r.data, r.where) for r in read_records(source, bad, **kw)]


def skipping(source, **kw):
    bad = BadRecords(skip=True)
    return [r.data for r in read_records(source, bad, **kw)], bad


def test_csv_with_bom_quoted_newlines_crlf_and_other_delimiters(tmp_path):
    for name, text in (
        ('a.csv', '\na;b\n1;2,5\n'),
        ('a.csv', 'a;b\n1;2,5\n'),
        ('a.tsv', 'a\tb\n1\t2,5\n'),
        ('a.csv', 'a\tb\n1\t2,5\n'),
    ):
        assert read(write(tmp_path / name, text))[0][0] == {'a': '1', 'b': '2,5'}
    path = write(tmp_path / 'a.csv', b'\xef\xbb\xbf"act","prompt"\r\n"x","one\r\ntwo"\r\n\r\n"y","say ""hi"", now"\r\n')
    assert read(path) == [
        ({'act': 'x', 'prompt': 'one\r\ntwo'}, f'{path}, line 2'),
        ({'act': 'y', 'prompt': 'say "hi", now'}, f'{path}, line 5'),
    ]


ROWS = [{'a': 1, 'b': {'c': [{'d': 'x}{'}]}}, {'a': 2, 'b': 'line\nbreak "and quotes" \\'}, {'a': 3}]


LAYOUTS = {
    'blank lines': '\n\n'.join(json.dumps(r) for r in ROWS) + '\n\n',
    'pretty': '\n'.join(json.dumps(r, indent=4) for r in ROWS),
    'pretty without indent': '\n'.join(json.dumps(r, indent=0) for r in ROWS),
    'crlf': '\r\n'.join(json.dumps(r, indent=2).replace('\n', '\r\n') for r in ROWS),
    'one line': ' '.join(json.dumps(r) for r in ROWS),
    'touching': ''.join(json.dumps(r, indent=1) for r in ROWS),
    'array': json.dumps(ROWS),
    'pretty array after a byte order mark': '\ufeff' + json.dumps(ROWS, indent=2),
    'indented lines after a byte order mark': '\ufeff' + '\n'.join('  ' + json.dumps(r) for r in ROWS),
}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_every_layout_of_json_gives_the_same_rows(tmp_path, layout):
    for suffix in ('.json', '.jsonl', '.ndjson'):
        assert [r[0] for r in read(write(tmp_path / f'a{suffix}', LAYOUTS[layout]))] == ROWS


def test_lines_of_pretty_objects_are_those_of_their_braces(tmp_path):
    path = write(tmp_path / 'a.jsonl', '{\n  "a": 1\n}\n\n{\n  "a": 2\n}\n{"a": 3}\n')
    assert [where for _, where in read(path)] == [f'{path}, line {n}' for n in (1, 5, 8)]
    path = write(tmp_path / 'a.json', '[\n{"a": 1},\n\n{\n"a": 2}]')
    assert [where for _, where in read(path)] == [f'{path}, line {n}' for n in (2, 4)]


@pytest.mark.parametrize(
    ('broken', 'reason'),
    [
        (b'{"a": "x', 'not valid JSON: Unterminated string'),
        (b'{"a": "x"', r"not valid JSON: Expecting ',' delimiter \(it breaks off\)"),
        (b"{'a': 1}", 'not valid JSON: Expecting property name'),
        (b'hello', 'not valid JSON: Expecting value'),
        (b'[1, 2]', 'a JSON list, where an object is needed'),
        (b'7', 'a JSON int, where an object is needed'),
        (b'{"a": 1, }', 'not valid JSON: '),
        (b'{"a": "\xff"}', 'not UTF-8'),
        (b'only one', '1 fields, but the header has 2'),
        (b'a,b,c', '3 fields, but the header has 2'),
        (b'"a"b,c', 'not valid csv'),
        (b'a,\xff', 'not UTF-8'),
    ],
)
def test_a_broken_row_costs_only_itself(tmp_path, broken, reason):
    if reason.startswith('not valid JSON') or broken[:1] in b'{[7':
        name, parts = 'a.jsonl', (b'{"a": "1"}\n{"a": "2"}', b'{"a": "3"}')
    else:
        name, parts = 'a.csv', (b'a,b\n1,', b'3,')
    path = write(tmp_path / name, b'\n'.join((parts[0], broken, parts[1], b'')))
    with pytest.raises(ValueError, match=f'{name}, line 3: {reason}'):
        read(path)
    rows, bad = skipping(path)
    assert [r['a'] for r in rows] == (['1', '2', '3'] if name == 'a.jsonl' else ['1', '3'])
    assert bad.num_skipped == 1 and re.match(f'{path}, line 3: {reason}', bad.reasons[0])


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('[{"a": 1},\n{"a": 2}', 'line 2: not valid JSON from here on: a comma or the closing bracket is missing'),
        ('[{"a": 1},\n{"a" 2}]', 'line 2: not valid JSON from here on'),
        ('[{"a": 1}]\n{"a": 2}', 'line 1: more text after the end of the array'),
        ('[{"a": 1},\n{"a": "\xff"}]', 'line 2: not UTF-8'),
        (f'[{{"a": 1}},\n{100_000 * "["}', 'line 2: not valid JSON from here on: nested too deeply'),
    ],
)
def test_a_broken_array_stops_even_when_skipping(tmp_path, text, reason):
    with pytest.raises(ValueError, match=reason):
        skipping(write(tmp_path / 'a.json', text.encode('latin-1')))
    path = write(tmp_path / 'b.json', '[{"a": 1},\n 7,\n "a text"]')  # elements that are not objects are skipped
    rows, bad = skipping(path)
    assert rows == [{'a': 1}, {'text': 'a text'}]
    assert bad.reasons == [f'{path}, line 2: a JSON int, where an object is needed']


NO_RECORD = 'there is no record in it'


@pytest.mark.parametrize(
    ('source', 'reason'),
    [
        ('missing.csv', 'missing.csv: no such file or folder'),
        ('./missing', './missing: no such file or folder'),
        ('a/b/c', 'a/b/c: no such file or folder'),
        (Path('missing'), 'missing: no such file or folder'),
        (7, 'data: cannot read a int; give a path, a hub name, a data set, a DataFrame or a list of dicts'),
        ([], f'data: {NO_RECORD}'),
        (('a.csv', ''), 'a.csv: the file is empty'),
        (('a.jsonl', ' \n\n'), f'a.jsonl: {NO_RECORD}'),
        (('a.csv', 'prompt\n'), f'a.csv: {NO_RECORD}'),
        (('a.txt', '\n\n'), f'a.txt: {NO_RECORD}'),
        (('a.csv', 'prompt,prompt\n1,2\n'), 'a.csv, line 1: the header names prompt more than once'),
        (('a.xlsx', 'x'), "a.xlsx: unknown kind of file '.xlsx'; known are .csv"),
    ],
)
def test_sources_without_data(tmp_path, source, reason):
    if isinstance(source, tuple):
        with pytest.raises(ValueError, match=reason):
            read(write(tmp_path / source[0], source[1]))
    else:
        with pytest.raises(ValueError, match=f'^{reason}$'):
            read(source) if source == [] else read_records(source)  # raises before the first record


def test_a_broken_pretty_object_with_objects_inside_costs_only_itself(tmp_path):
    whole = json.dumps({'a': {'b': 1}, 'c': [{'d': 2}, {'e': 3}]}, indent=2)
    path = write(tmp_path / 'a.jsonl', whole + '\n' + whole.replace('"b": 1', '"b" 1') + '\n' + whole + '\n')
    rows, bad = skipping(path)
    assert rows == [{'a': {'b': 1}, 'c': [{'d': 2}, {'e': 3}]}] * 2
    assert bad.reasons == [f"{path}, line 14: not valid JSON: Expecting ':' delimiter"]
    records = read_records(path)
    assert next(records).data == rows[0]  # reading is lazy: the broken object is not reached


def test_rows_under_a_key(tmp_path):
    path = write(tmp_path / 'a.json', json.dumps({'type': 'x', 'data': [{'a': 1}, {'a': 2}]}))
    assert read(path) == [({'a': 1}, f'{path}, data[0]'), ({'a': 2}, f'{path}, data[1]')]
    with gzip.open(tmp_path / 'a.json.gz', 'wt') as file:
        file.write(path.read_text())
    for name in ('b.JSON.GZ', 'b.JSON'):
        (tmp_path / name).write_bytes((tmp_path / f'a.json{".gz" if name.endswith("GZ") else ""}').read_bytes())
    for name in ('a.json.gz', 'b.JSON.GZ', 'b.JSON'):
        assert [row for row, _ in read(tmp_path / name)] == [{'a': 1}, {'a': 2}]
    assert read(write(tmp_path / 'b.json', '{"prompt": "only one"}'))[0][0] == {'prompt': 'only one'}


def test_parquet_gz_and_folder(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{'a': 1, 'turns': [{'role': 'user', 'content': 'hi'}]}, {'a': 2, 'turns': []}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / 'b.parquet')
    assert read(tmp_path / 'b.parquet') == [
        (rows[0], f'{tmp_path}/b.parquet, row 1'),
        (rows[1], f'{tmp_path}/b.parquet, row 2'),
    ]
    with gzip.open(tmp_path / 'a.jsonl.gz', 'wt') as file:
        file.write('{"a": 0}\n')
    assert [r['a'] for r, _ in read(tmp_path)] == [0, 1, 2]  # files are in the order of their names
    assert [r['a'] for r, _ in read([tmp_path / 'b.parquet', tmp_path / 'a.jsonl.gz'])] == [1, 2, 0]
    with pytest.raises(ValueError, match='bad.parquet: not a parquet file'):
        read(write(tmp_path / 'bad.parquet', 'no'))


def test_of_a_folder_files_of_other_splits_are_left_out(tmp_path):
    for number, name in enumerate(('test.jsonl', 'train-00000.jsonl', 'Train-00001.jsonl', 'training.jsonl')):
        write(tmp_path / name, json.dumps({'a': number}) + '\n')
    with pytest.warns(UserWarning, match="of the split 'train', and not test.jsonl"):
        assert [r['a'] for r, _ in read(tmp_path)] == [2, 1, 3], 'the split is train by default'
    with pytest.warns(UserWarning, match='and not Train-00001.jsonl, train-00000.jsonl'):
        assert [r['a'] for r, _ in read(tmp_path, split='test')] == [0, 3]
    assert sorted(r['a'] for r, _ in read(tmp_path, split='validation')) == [0, 1, 2, 3], 'all, where none has its name'


def test_text_by_blank_lines_lines_or_whole(tmp_path):
    path = write(tmp_path / 'a.txt', 'one\nstill one\n\n \n\ntwo\n')
    assert read(path) == [({'text': 'one\nstill one'}, f'{path}, line 1'), ({'text': 'two'}, f'{path}, line 6')]
    assert [r['text'] for r, _ in read(path, text_separator='\n')] == ['one', 'still one', 'two']
    assert [r['text'] for r, _ in read(path, text_separator='still')] == ['one', 'one\n\n \n\ntwo']
    assert [r['text'] for r, _ in read(path, text_separator='')] == ['one\nstill one\n\n \n\ntwo']


def test_objects_in_memory(tmp_path):
    datasets = pytest.importorskip('datasets')
    data = datasets.Dataset.from_list([{'a': 1}, {'a': 2}])
    assert [r['a'] for r, _ in read(data)] == [1, 2]
    assert [r['a'] for r, _ in read(data.to_iterable_dataset())] == [1, 2]
    assert [r['a'] for r, _ in read(datasets.DatasetDict(train=data, test=data.select([1])), split='test')] == [2]
    with pytest.raises(ValueError, match=r"no split 'x' among \['train'\]"):
        read(datasets.DatasetDict(train=data), split='x')
    data.save_to_disk(tmp_path / 'saved')
    assert [r['a'] for r, _ in read(str(tmp_path / 'saved'))] == [1, 2]
    assert read(['x', {'a': 1}]) == [({'text': 'x'}, 'data, row 1'), ({'a': 1}, 'data, row 2')]
    with pytest.raises(ValueError, match='data, row 1: a int, where a dict of columns or a text is needed'):
        read([3])


def test_hub_names_go_through_datasets(monkeypatch):
    datasets = pytest.importorskip('datasets')
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        if args[0] == 'nobody/nothing':
            raise ConnectionError('no\nnetwork')
        if args[0] == 'some/parts':
            raise ValueError(f'Unknown split "{kwargs["split"]}". Should be one of [\'train_sft\'].')
        return [{'prompt': 'x'}]

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr('chatgpt.data.reading.check_name', lambda *names: None)
    found = read('some/data', split='test', subset='en', streaming=True)
    assert found == [({'prompt': 'x'}, 'data set some/data, row 1')]
    assert calls == [(('some/data', 'en'), {'split': 'test', 'streaming': True})]
    with pytest.raises(ValueError, match='^nobody/nothing: .* no data set from the hub: ConnectionError: no network$'):
        read('nobody/nothing')
    with pytest.raises(ValueError, match='train_sft.* convert some/parts data.jsonl --to SHAPE --split SPLIT$'):
        read('some/parts')


LOADERS = {'sft': load_demonstrations, 'dpo': load_preferences, 'kto': load_labelled, 'ppo': load_prompts}
DEMONSTRATION, PREFERENCE = {'prompt': 'a', 'completion': 'b'}, {'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}


def refusal(method: str, path: Path) -> str:
    with pytest.raises(ValueError) as error:
        LOADERS[method](path, byte_tokenizer())
    return str(error.value)


@pytest.mark.parametrize(
    ('method', 'row', 'message'),
    [
        ('sft', {'prompt': 'a'}, 'such a file is for the command ppo'),
        ('dpo', DEMONSTRATION, 'such a file is for the command sft'),
        ('dpo', {**DEMONSTRATION, 'label': True}, 'such a file is for the command kto'),
        ('kto', PREFERENCE, 'such a file is for the command dpo'),
        ('ppo', {'text': 'a'}, "the columns are 'text'; such a file is for the command sft"),
        ('dpo', {'prompt': 'a', 'choosen': 'b', 'rejected': 'c'}, "rename column 'choosen' to 'chosen'"),
        ('sft', {'prompt': 'a', 'complletion': 'b'}, "rename column 'complletion' to 'completion'"),
        ('ppo', {'promt': 'a'}, "rename column 'promt' to 'prompt'"),
        ('sft', {'promt': 'a', 'completion': 'b'}, "rename column 'promt' to 'prompt'"),
        # a name that differs in its number says nothing of which answer is better
        ('dpo', {'prompt': 'a', 'response_0': 'b', 'response_1': 'c'}, 'a preference is needed; such a file is for'),
        ('dpo', {'prompt': 'a', 'chosen': None, 'rejected': 'c'}, "'rejected' alone, where a preference has chosen"),
    ],
)
def test_a_file_of_another_kind_names_the_column_or_the_command(tmp_path, method, row, message):
    found = refusal(method, write(tmp_path / 'data.jsonl', 3 * (json.dumps(row) + '\n')))
    assert message in found and 'line 1' in found and 'skip_bad_records' not in found


@pytest.mark.parametrize(
    ('ending', 'bad', 'good'),
    [
        ('jsonl', '{"other": 1}\n', '{"prompt": "a"}\n'),
        ('jsonl', '{"prompt": "a\\ud800"}\n', '{"prompt": "a"}\n'),
        ('jsonl', '{"prompt": \n', '{"prompt": "a"}\n'),
        ('jsonl', '3\n', '{"prompt": "a"}\n'),
        ('csv', 'a,b,c\n', 'a\n'),
    ],
)
def test_bad_records_can_be_skipped_only_if_others_are_usable(tmp_path, ending, bad, good):
    header = 'prompt\n' if ending == 'csv' else ''
    for name, text, remedy in (('all', bad + bad, False), ('first', bad + good, True), ('later', good + bad, True)):
        (tmp_path / f'{name}.{ending}').write_text(header + text)
        assert ('--skip_bad_records' in refusal('ppo', tmp_path / f'{name}.{ending}')) == remedy, name


@pytest.mark.parametrize(
    ('name', 'text', 'encoding', 'message'),
    [
        ('a.csv', 'prompt,completion\na,caf\u00e9\n', 'latin-1', 'iconv -f ISO-8859-1 -t UTF-8 a.csv > utf8-a.csv'),
        ('a.csv', 'prompt,completion\na,\u201cb\u201d\n', 'cp1252', 'iconv -f CP1252'),
        ('a.jsonl', '{"prompt": "a", "completion": "\u00fc"}\n', 'latin-1', 'ISO-8859-1 (latin-1)'),
        ('a.json', '[{"prompt": "a", "completion": "\u00fc"}]', 'latin-1', 'iconv -f ISO-8859-1'),
        ('a.txt', 'a\nna\u00efve\n', 'latin-1', 'line 2: not UTF-8'),
        ('a.jsonl', '{"prompt": "a", "completion": "b"}\n', 'utf-16', 'encoded in UTF-16'),
        ('a.csv', 'prompt,completion\na,b\n', 'utf-16-be', 'iconv -f UTF-16BE'),
    ],
)
def test_another_encoding_is_named_with_the_way_to_convert_it(tmp_path, name, text, encoding, message):
    (tmp_path / name).write_bytes(text.encode(encoding))
    found = refusal('sft', tmp_path / name)
    assert message in found and 'iconv' in found and 'skip_bad_records' not in found
