"""examples/inference.py: one line for a mistake, and nothing is generated that could not be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_script import script

import chatgpt.rollout


@pytest.fixture(autouse=True)
def no_generation(monkeypatch):
    def generate(self, *args, **options):
        raise AssertionError('it generated before the mistake was found')

    monkeypatch.setattr(chatgpt.rollout.LocalEngine, 'generate', generate)


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--input=missing.txt'], '--input missing.txt: there is no such file'),
        (['--input=missing.csv'], 'missing.csv: no such file'),
        (['--input=in.txt', '--output=file/out.jsonl'], 'cannot write --output file/out.jsonl: File exists'),
        (['--input=in.txt', '--output=folder'], 'cannot write --output folder: Is a directory'),
        (['--input=in.txt', '--output=in.txt'], '--output in.txt is the file of --input: give another'),
        (['--input=in.txt', '--temperature=0'], '--temperature 0 is --greedy: give that instead'),
        (['--input=in.txt', '--temperature=nan'], "argument --temperature: 'nan' is not a number"),
        (['--input=in.txt', '--temperature=-1'], 'temperature=-1.0; give a number above 0'),
        (['--input=in.txt', '--top_p=2'], 'top_p=2.0; give a number above 0 and at most 1'),
        (['--input=in.txt', '--max_lenght=20'], "unknown argument '--max_lenght'; did you mean --max_length"),
        (['--input=in.txt', '--num_beams=4'], "unknown argument '--num_beams'"),
    ],
)
def test_one_line(monkeypatch, capsys, tmp_path, model_folder: Path, flags, message):
    (tmp_path / 'in.txt').write_text('one day\n')
    (tmp_path / 'file').touch()
    (tmp_path / 'folder').mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script('inference', monkeypatch, '--pretrain', str(model_folder), *flags)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: ') and message in lines[0], lines
    assert (tmp_path / 'in.txt').read_text() == 'one day\n'
