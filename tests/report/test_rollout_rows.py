"""Recorded sequences for a page: rounded, and as many as it has room for."""

from __future__ import annotations

import json
import math
from typing import Any

from recorded import recorded_row

from chatgpt.monitor.report.rollouts import page_row, phases_for_page, rows_for_page


def row(phase: int, index: int, tokens: int = 2, **more: Any) -> dict[str, Any]:
    given = {'score': 1.23456, 'weighted_scores': [[0.5, 1 / 3]], 'advantages': [0.123456] * tokens}
    return recorded_row(phase, index, ['r'] * tokens, **given | more)


def size(rows: list[dict[str, Any]]) -> int:
    return len(json.dumps(rows, ensure_ascii=False, separators=(',', ':')).encode())


def test_numbers_are_rounded_after_the_log_ratio_was_taken():
    given = row(3, 5, old_logprobs=[-12.34567, -1.0], ref_logprobs=[-12.34512, -3.0], entropy=None, score=math.nan)
    made = page_row(given | {'values': [123456.0, -1e-7], 'rewards': [math.inf, 0.0]})
    assert made['log_ratio'] == [-0.00055, 2.0]
    assert (made['values'], made['rewards'], made['entropy']) == ([123500.0, -1e-7], [None, 0.0], None)
    assert (made['advantages'], made['weighted_scores'], made['score']) == ([0.1235, 0.1235], [[0.5, 0.3333]], None)
    assert (made['mask'], made['token_ids'], made['index']) == ([True, True], [7, 7], 5)
    assert not {'old_logprobs', 'ref_logprobs', 'returns', 'prompt_ids', 'columns'} & set(made)


def test_first_groups_of_all_phases_before_second_ones_and_never_over_the_budget():
    rows = [row(phase, 4 * phase + i) for phase in range(1, 6) for i in range(4)]
    one = size([page_row(rows[0])]) - 1  # with its comma
    assert rows_for_page(rows, 10**9) == [page_row(r) for r in rows]
    # Room for three groups of two: of the last phase, the first and the one in the middle.
    chosen = rows_for_page(rows, 6 * one + 20)
    assert [(r['phase'], r['index']) for r in chosen] == [(1, 4), (1, 5), (3, 12), (3, 13), (5, 20), (5, 21)]
    chosen = rows_for_page(rows, 12 * one + 20)
    assert [r['index'] for r in chosen] == [4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 22, 23]
    for budget in (2, one, 3 * one, 7 * one, 50_000):
        assert size(rows_for_page(rows, budget)) <= max(budget, 2)
    assert rows_for_page(rows, 10) == rows_for_page([], 1000) == []


def test_phases_of_a_page_are_spread():
    assert phases_for_page([], 3) == [] and phases_for_page([1, 2], 3) == [1, 2]
    assert phases_for_page(list(range(1, 10)), 5) == [1, 3, 5, 7, 9]
    assert phases_for_page([1, 2, 3], 1) == [3]
