"""quoted.py: numbers of README, guides and pages of results equal those of the JSON files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'benchmarks'))

import harness  # noqa: E402
import quoted  # noqa: E402

WORDS = 'from {:.1f} to {:.1f} % of answers'


def test_no_number_of_the_repository_differs(capsys):
    quoted.main(['--check'])
    assert capsys.readouterr().out == 'every number is that of its results\n'


def test_a_changed_digit_is_found_and_written_again():
    text, found = 'It rose from 0.2 to 63.4\n% of answers.', []
    new = quoted.fill('page.md', text, WORDS, [0.2, 63.3], found)
    assert found == [f'page.md: 63.4 is 63.3 by its results, in {WORDS!r}']
    assert new == 'It rose from 0.2 to 63.3\n% of answers.'
    assert quoted.fill('page.md', new, WORDS, [0.2, 63.3], found) == new and len(found) == 1


@pytest.mark.parametrize('text', ['', 'from 0.2 to 63.3 percent of answers', 2 * 'from 0.2 to 63.3 % of answers; '])
def test_words_that_are_not_there_once_are_found(text):
    found = []
    assert quoted.fill('page.md', text, WORDS, [0.2, 63.3], found) == text
    assert quoted.ABSENT in found[0]


def test_a_changed_digit_in_a_quoted_page_fails(monkeypatch, capsys):
    monkeypatch.setattr(quoted, 'quotes', lambda: [('README.md', 'Python {:.2f} or newer', [3.12])])
    monkeypatch.setattr(quoted, 'PAGES', [])
    with pytest.raises(SystemExit) as ended:
        quoted.main(['--check'])
    assert ended.value.code == 1
    assert capsys.readouterr().out == "README.md: 3.11 is 3.12 by its results, in 'Python {:.2f} or newer'\n"


def test_a_changed_table_is_found(monkeypatch, tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('<!-- runs -->\n\n| a |\n| 1 |\n\n<!-- end of runs -->\n')
    monkeypatch.setattr(harness, 'ROOT', tmp_path)
    monkeypatch.setattr(harness, 'differences', [])
    monkeypatch.setattr(harness, 'checking', True)
    harness.write_page(page, runs='| a |\n| 1 |\n')
    assert not harness.differences
    harness.write_page(page, runs='| a |\n| 2 |\n| 3 |')
    assert harness.differences == ["page.md, table runs: has '| 1 |', its results give '| 2 |'"]
    assert '| 2 |' not in page.read_text()
    with pytest.raises(ValueError, match='lacks one'):
        harness.Results(None).measure('one', lambda: 1)
