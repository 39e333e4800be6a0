"""The addition task: problems and answers as they are defined, and a short run of each method."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import arithmetic


def test_problems_are_right_and_apart():
    train, eval_rows = arithmetic.problems(1)
    assert len(train) + len(eval_rows) == 90 * 90
    assert not {row['prompt'] for row in train} & {row['prompt'] for row in eval_rows}
    for row in train[:50] + eval_rows[:50]:
        first, second = row['prompt'].rstrip('=').split('+')
        assert int(row['answer'][::-1]) == int(first) + int(second)
    assert arithmetic.problems(2)[1] != eval_rows


def test_exact_match_counts_whole_answers(monkeypatch):
    monkeypatch.setattr(arithmetic, 'NUM_SFT', 4)
    monkeypatch.setattr(arithmetic, 'SFT_EPOCHS', 150)
    words = arithmetic.tokenizer()
    train, _ = arithmetic.problems(1)
    actor = arithmetic.pretrained(1, train, words)
    learned = train[:4]
    assert arithmetic.exact_match(actor, learned, words) == 1.0
    assert arithmetic.exact_match(actor, [{**row, 'answer': row['answer'][:-1]} for row in learned], words) == 0.0
    assert arithmetic.exact_match(actor, learned[:2] + [{**row, 'answer': '0'} for row in learned[2:]], words) == 0.5


@pytest.mark.parametrize('method', list(arithmetic.METHODS))
def test_short_runs(monkeypatch, tmp_path, method):
    for name, value in (('SFT_EPOCHS', 1), ('PHASES', 2), ('EVERY', 1)):
        monkeypatch.setattr(arithmetic, name, value)
    arithmetic.run([method], 1, tmp_path)
    content = json.loads((tmp_path / f'{method}-1.json').read_text())
    assert len(content['exact_match']) == 3
    assert content['cpu_s'] > 0
    arithmetic.report(tmp_path, tmp_path / 'report.md')
    assert f'| {method} | 1 |' in (tmp_path / 'report.md').read_text()
    assert (tmp_path / 'report.png').stat().st_size > 1000
