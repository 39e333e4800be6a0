"""The harness of the benchmarks: turns, results that are taken up again, tables in pages, and the scripts' imports."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import harness

ROOT = harness.ROOT


def test_ways_take_turns_and_warm_ups_do_not_count():
    order: list[str] = []
    ways = {name: lambda number, n=name: order.append(f'{n}{number}') or number for name in 'ab'}
    assert harness.alternate(ways, rounds=2) == {'a': [1, 2], 'b': [1, 2]}
    assert order == ['a0', 'b0', 'a1', 'b1', 'a2', 'b2']
    assert harness.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert harness.spread([3.0, 1.0, 2.0, 10.0]) == {'min': 1.0, 'median': 2.5, 'max': 10.0}
    assert harness.mean_and_spread([1.0, 2.0, 6.0]) == '3.000 (1.000, 6.000)'


def test_the_end_probability_gives_the_mean_length():
    p = harness.end_probability(1 / 3, 48)
    mean = (
        sum(k * p * (1 - p) ** (k - 1) for k in range(1, 48)) + 48 * (1 - p) ** 47
    )  # min(geometric, 48), term by term
    assert mean == pytest.approx(16)


def test_results_are_measured_once(tmp_path):
    for number in (1, 2):
        assert harness.Results(tmp_path / 'r.json').measure('a', lambda n=number: n) == 1
    assert json.loads((tmp_path / 'r.json').read_text()) == {'a': 1}


def test_a_table_is_filled_in_and_the_words_around_it_stay(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('# Title\n\n<!-- one -->\n| old |\n<!-- end of one -->\n\nWords.\n')
    harness.write_page(page, one=harness.markdown('a | b', [[1, 'x']]))
    table = '| a | b |\n|---|---|\n| 1 | x |'
    assert page.read_text() == f'# Title\n\n<!-- one -->\n\n{table}\n\n<!-- end of one -->\n\nWords.\n'
    with pytest.raises(ValueError, match='lacks the lines <!-- two -->'):
        harness.write_page(page, two='')


def test_every_table_of_a_script_has_its_place_on_a_page():
    for script in (ROOT / 'benchmarks').glob('*.py'):
        for name in re.findall(r"write_page\(\s*PAGES / '([\w.]+)'", script.read_text()):
            assert '<!-- end of ' in (ROOT / 'docs' / 'results' / name).read_text(), script.name
