"""Files that are another encoding's, another method's or have a misspelt column: the remedy that helps, and never one
that leaves no record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatgpt.data import load_demonstrations, load_labelled, load_preferences
from chatgpt.data.prompts import load_prompts
from chatgpt.testing import byte_tokenizer

LOADERS: dict[str, Any] = {
    'sft': load_demonstrations,
    'dpo': load_preferences,
    'kto': load_labelled,
    'ppo': load_prompts,
}
DEMONSTRATION, PREFERENCE = {'prompt': 'a', 'completion': 'b'}, {'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}


def refusal(method: str, path: Path) -> str:
    with pytest.raises(ValueError) as error:
        LOADERS[method](path, byte_tokenizer())
    return str(error.value)


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


@pytest.mark.parametrize(
    ('method', 'row', 'told'),
    [
        ('sft', {'prompt': 'a'}, 'such a file is for the command ppo'),
        ('dpo', {'prompt': 'a'}, 'such a file is for the command ppo'),
        ('dpo', DEMONSTRATION, 'such a file is for the command sft'),
        ('dpo', {**DEMONSTRATION, 'label': True}, 'such a file is for the command kto'),
        ('kto', PREFERENCE, 'such a file is for the command dpo'),
        ('ppo', {'text': 'a'}, "the columns are 'text'; such a file is for the command sft"),
        ('dpo', {'prompt': 'a', 'choosen': 'b', 'rejected': 'c'}, "rename column 'choosen' to 'chosen'"),
        ('sft', {'prompt': 'a', 'complletion': 'b'}, "rename column 'complletion' to 'completion'"),
        ('ppo', {'promt': 'a'}, "rename column 'promt' to 'prompt'"),
        ('sft', {'promt': 'a', 'completion': 'b'}, "rename column 'promt' to 'prompt'"),
    ],
)
def test_a_file_of_another_kind_names_the_column_or_the_command(tmp_path, method, row, told):
    found = refusal(method, written(tmp_path / 'data.jsonl', row, row, row))
    assert told in found and 'line 1' in found and 'skip_bad_records' not in found


@pytest.mark.parametrize(('method', 'good'), [('sft', DEMONSTRATION), ('dpo', PREFERENCE), ('ppo', {'prompt': 'a'})])
def test_one_bad_record_among_good_ones_can_be_left_out(tmp_path, method, good):
    for name, rows in (('first', ({'other': 1}, good)), ('later', (good, {'other': 1}))):
        assert '--skip_bad_records' in refusal(method, written(tmp_path / f'{name}.jsonl', *rows))


@pytest.mark.parametrize(
    ('ending', 'bad', 'good'),
    [
        ('jsonl', '{"prompt": "a\\ud800"}\n', '{"prompt": "a"}\n'),
        ('jsonl', '{"prompt": \n', '{"prompt": "a"}\n'),
        ('jsonl', '3\n', '{"prompt": "a"}\n'),
        ('csv', 'a,b,c\n', 'a\n'),
    ],
)
def test_what_cannot_be_read_is_left_out_only_beside_something_that_can(tmp_path, ending, bad, good):
    header = 'prompt\n' if ending == 'csv' else ''
    for name, text, remedy in (('one', bad, False), ('all', bad + bad, False), ('first', bad + good, True)):
        (tmp_path / f'{name}.{ending}').write_text(header + text)
        assert ('--skip_bad_records' in refusal('ppo', tmp_path / f'{name}.{ending}')) == remedy, name


@pytest.mark.parametrize(
    ('name', 'text', 'encoding', 'told'),
    [
        (
            'a.csv',
            'prompt,completion\na,b\na,caf\u00e9\n',
            'latin-1',
            'iconv -f ISO-8859-1 -t UTF-8 a.csv > utf8-a.csv',
        ),
        ('a.csv', 'prompt,completion\na,\u201cb\u201d\n', 'cp1252', 'iconv -f CP1252'),
        ('a.jsonl', '{"prompt": "a", "completion": "\u00fc"}\n', 'latin-1', 'ISO-8859-1 (latin-1)'),
        ('a.json', '[{"prompt": "a", "completion": "\u00fc"}]', 'latin-1', 'iconv -f ISO-8859-1'),
        ('a.txt', 'a\nna\u00efve\n', 'latin-1', 'line 2: not UTF-8'),
        ('a.jsonl', '{"prompt": "a", "completion": "b"}\n', 'utf-16', 'encoded in UTF-16'),
        ('a.csv', 'prompt,completion\na,b\n', 'utf-16-be', 'iconv -f UTF-16BE'),
    ],
)
def test_another_encoding_is_named_with_the_way_to_convert_it(tmp_path, name, text, encoding, told):
    (tmp_path / name).write_bytes(text.encode(encoding))
    found = refusal('sft', tmp_path / name)
    assert told in found and 'iconv' in found and 'skip_bad_records' not in found


def test_a_damaged_line_of_utf8_is_a_bad_record(tmp_path):
    row = json.dumps(DEMONSTRATION).encode()
    (tmp_path / 'a.jsonl').write_bytes(row + b'\n{"prompt": "\xc3\xa9", "completion": "\xc3"}\n')
    assert 'line 2: not UTF-8. Bad records are left out' in refusal('sft', tmp_path / 'a.jsonl')
