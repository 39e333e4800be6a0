"""A comparison of two layouts that ends in its first phase has compared nothing, and fails."""

from __future__ import annotations

import layout_runs
import pytest
from layouts import BF16, Log


@pytest.mark.parametrize('first', [0, 3])
def test_an_edge_in_the_first_phase_is_a_failure_and_in_a_later_one_a_warning(first, tmp_path, monkeypatch):
    runs = layout_runs.Runs(tmp_path)
    runs.logs = {'a': Log(), 'b': Log()}

    def compare(phase: int) -> None:
        monkeypatch.setattr(layout_runs, 'compare_logs', lambda *_, **__: f'phase {phase}: a draw next to an edge')
        with pytest.warns(UserWarning, match='b was compared with a up to a draw next to an edge'):
            runs.compare('a', 'b', first=first, phases=2, tolerance=BF16)

    compare(first + 2)
    with pytest.raises(AssertionError, match=f'phase {first + 1}:'):
        compare(first + 1)
