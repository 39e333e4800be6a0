"""Data to evaluate on that is the training data, by its records and not by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatgpt.launch.inputs import read_inputs
from chatgpt.launch.runs import Run, SFTRun, run_class
from chatgpt.nn import GPTActor
from chatgpt.testing.fakes import char_tokenizer, tiny_config


def written(path: Path, first: int, count: int, **columns: str) -> str:
    rows = ({'prompt': f'a {i}'} | columns for i in range(first, first + count))
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ('cls', 'columns'), [(SFTRun, {'completion': 'b'}), (run_class('dpo'), {'chosen': 'b', 'rejected': 'c'})]
)
def test_records_that_are_trained_on_are_told(tmp_path, cls, columns, recwarn):
    GPTActor(config=tiny_config('gpt2', positions=48)).save_pretrained(tmp_path / 'model', tokenizer=char_tokenizer())
    train = written(tmp_path / 'train.jsonl', 0, 6, **columns)

    def reads(validation: str) -> Run:
        run = cls(pretrain=str(tmp_path / 'model'), dataset=train, validation_file=validation, train_batch_size=2)
        return read_inputs(run).validation

    copy = written(tmp_path / 'copy.jsonl', 0, 6, **columns)
    with pytest.raises(ValueError, match='copy.jsonl holds the records of the training data: give others'):
        reads(copy)
    with pytest.warns(UserWarning, match='2 of 3 eval records are in the training data too'):
        reads(written(tmp_path / 'some.jsonl', 4, 3, **columns))
    recwarn.clear()
    assert len(reads(written(tmp_path / 'other.jsonl', 6, 3, **columns))) == 3
    assert not [w for w in recwarn if 'eval records' in str(w.message)]
