"""The numbers of TRL 0.11.4, recorded by compat/benchmarks/compat_trl.py, for the same weights, prompts and scores."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl_page import KEYS

BENCHMARKS = Path(__file__).resolve().parents[1] / 'benchmarks'
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / 'peers')]
from compat_ours import differences, run  # noqa: E402
from compat_work import CASES, make_folder  # noqa: E402

GOLDEN = json.loads((Path(__file__).parent / 'trl_classic_numbers.json').read_text())
TOLERANCE = 1e-5


@pytest.fixture(scope='module')
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    at = tmp_path_factory.mktemp('numbers')
    return make_folder(str(at / 'policy'), 0.0), make_folder(str(at / 'reference'), 0.37)


def test_they_are_of_the_last_classic_version() -> None:
    assert GOLDEN['versions']['trl'] == '0.11.4'
    assert set(GOLDEN['cases']) == set(CASES)


@pytest.mark.parametrize('name', CASES)
@pytest.mark.filterwarnings('ignore')
def test_numbers(name: str, folders: tuple[str, str]) -> None:
    found = differences(run(name, *folders), GOLDEN['cases'][name])
    assert {kind: size for kind, size in found.items() if not size < TOLERANCE} == {}


def flipped(row: list[float]) -> list[float]:
    return [-x for x in row]


def shifted(row: list[float]) -> list[float]:
    return row[1:] + row[:1]


@pytest.mark.parametrize('spoil', [flipped, shifted])
def test_the_comparison_can_fail(spoil: Callable[[list[float]], list[float]]) -> None:
    """Negative control: a wrong sign or mask changes every kind of number per token."""
    theirs = GOLDEN['cases']['plain']
    wrong: Any = copy.deepcopy(theirs)
    wrong['tokens'] = {kind: [spoil(row) for row in rows] for kind, rows in theirs['tokens'].items()}
    found = differences(wrong, theirs)
    assert min(found[kind] for kind in theirs['tokens']) > 0.1


def test_every_number_among_their_statistics_is_in_the_table() -> None:
    numbers = {name for case in GOLDEN['cases'].values() for stats in case['stats'] for name in stats}
    same = {name for name, text in KEYS.items() if text.startswith('the same') and not name.startswith('time/')}
    arrays = {'objective/kl_dist', 'tokens/queries_dist', 'tokens/responses_dist'}
    assert numbers == same - arrays
