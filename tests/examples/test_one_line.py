"""Mistakes on the command lines that are not a training run's: one line, exit code 2."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from chatgpt.launch.arguments import run_main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['in.jsonl', 'out.jsonl', '--to=nope'], "argument --to: invalid choice: 'nope' (choose from"),
        (['in.jsonl', 'out.jsonl'], 'the following arguments are required: --to'),
        (
            ['in.jsonl', 'out.jsonl', '--to=alpaca', '--overwrit'],
            "unknown argument '--overwrit'; did you mean --overwrite?",
        ),
        (['in.jsonl', 'out.jsonl', '--to=alpaca'], 'line 1: not valid JSON'),
    ],
)
def test_convert_data(monkeypatch, capsys, tmp_path, flags, message):
    (tmp_path / 'in.jsonl').write_text('nonsense\n')
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / 'examples' / 'convert_data.py'))['main']
    monkeypatch.setattr(sys, 'argv', ['convert_data.py', *flags])
    with pytest.raises(SystemExit) as stop:
        run_main(main)
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and message in lines[0], lines
    assert ('--skip_bad_records' in lines[0]) == ('JSON' in message)


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (
            ['model', '--memory=24Gibberish'],
            "error: argument --memory: '24Gibberish' is not an amount of memory; write it like 24GiB or 80GB",
        ),
        (
            ['model', '--strategy=magic'],
            "error: argument --strategy: strategy='magic' is not known; choose one of naive, ddp, ",
        ),
    ],
)
def test_plan(capsys, flags, message):
    from chatgpt.plan.__main__ import main

    with pytest.raises(SystemExit) as stop:
        main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith(message)
