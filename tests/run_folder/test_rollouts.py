"""Recorded sequences in parquet: atomic writes, filters, thinning at a limit."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import recorded_row

from chatgpt.monitor.run_folder import RunFolder, rollouts
from chatgpt.monitor.run_folder.rollouts import phases_to_keep, read_rollouts, recorded_phases, write_rollouts


def row(phase: int, index: int, **more: Any) -> dict[str, Any]:
    """Returns a row with two response tokens; the second is masked."""
    numbers = np.array([0.5, -1.0], dtype=np.float32)
    given = {name: numbers * (i + 1) for i, name in enumerate(rollouts.PER_TOKEN)}
    given |= {'prompt': 'A prompt', 'response': f'Answer {index}', 'mask': np.array([True, False])}
    given |= {'weighted_scores': [[0.5, 2.0], [1.0, -1.0]], 'columns': '{"answer": "12"}', 'prompt_ids': [4, 5]}
    return recorded_row(phase, index, ('Answer', f' {index}'), **given | more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes phases 1 to 3 with four sequences in two groups each."""
    for phase in (3, 1, 2):
        first = 4 * (phase - 1)
        write_rollouts(tmp_path / 'rollouts', phase, [row(phase, first + i) for i in range(4)])
    return tmp_path


def indices(found: list[dict[str, Any]]) -> list[int]:
    return [r['index'] for r in found]


def test_what_is_read_is_what_was_written(tmp_path):
    path = write_rollouts(tmp_path, 12, [row(12, 3), row(12, 2, entropy=None, weighted_scores=[])])
    assert path == tmp_path / 'phase-00000012.parquet'
    second, first = (r for r in reversed(read_rollouts(tmp_path)))
    assert list(second) == list(rollouts.COLUMNS)
    assert (first['index'], first['entropy'], first['weighted_scores']) == (2, None, [])
    numbers = {name: [0.5 * (i + 1), -1.0 * (i + 1)] for i, name in enumerate(rollouts.PER_TOKEN)}
    assert second == row(12, 3) | numbers | {'mask': [True, False], 'episode': None, 'last_turn': None}


def test_filters(folder):
    assert recorded_phases(folder) == recorded_phases(folder / 'rollouts') == [1, 2, 3]
    assert indices(read_rollouts(folder)) == list(range(12))
    assert indices(read_rollouts(folder, [3, 1])) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert indices(read_rollouts(folder, score=(2.0, 5.0))) == [2, 3, 4, 5]
    assert indices(read_rollouts(folder, score=(None, 1.0))) == [0, 1]
    assert indices(read_rollouts(folder, text='ANSWER 1')) == [1, 10, 11]
    assert indices(read_rollouts(folder, prompt='a PROMPT', phases=[2], score=(6, None))) == [6, 7]
    assert read_rollouts(folder, prompt='answer') == []
    assert indices(read_rollouts(folder, limit=5)) == [0, 1, 2, 3, 4]
    assert indices(read_rollouts(folder, offset=3, limit=3)) == [3, 4, 5]
    assert indices(read_rollouts(folder, offset=9)) == [9, 10, 11]
    assert indices(read_rollouts(folder, text='1', offset=1, limit=1)) == [10]
    assert read_rollouts(folder, offset=12) == read_rollouts(folder, limit=0) == []
    assert indices(read_rollouts(folder / 'rollouts' / 'phase-00000002.parquet')) == [4, 5, 6, 7]
    (folder / 'metrics.jsonl').write_text('')
    assert indices(RunFolder(folder).rollouts([2], limit=3)) == [4, 5, 6]
    assert read_rollouts(folder / 'nothing') == recorded_phases(folder / 'nothing') == []


def test_torn_and_foreign_files_are_named_and_left_out(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    inside = folder / 'rollouts'
    torn = inside / 'phase-00000002.parquet'
    torn.write_bytes(torn.read_bytes()[:100])
    pq.write_table(pa.table({'a': [1]}), inside / 'phase-00000004.parquet')
    pq.write_table(pa.table({'a': [1]}), inside / 'mine.parquet')
    with pytest.warns(UserWarning) as caught:
        assert indices(read_rollouts(folder)) == [0, 1, 2, 3, 8, 9, 10, 11]
    texts = sorted(str(w.message) for w in caught)
    assert [t.split(':')[0] for t in texts] == [
        str(inside / name) for name in ('mine.parquet', 'phase-00000002.parquet', 'phase-00000004.parquet')
    ]
    assert "no column 'phase'" in texts[2]


def test_a_write_that_fails_leaves_the_file_before_and_nothing_else(folder, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'replace', full)
    with pytest.raises(OSError, match='No space left'):
        write_rollouts(folder / 'rollouts', 2, [row(2, 99)])
    assert sorted(p.name for p in (folder / 'rollouts').iterdir()) == [f'phase-0000000{i}.parquet' for i in (1, 2, 3)]
    assert indices(read_rollouts(folder, [2])) == [4, 5, 6, 7]


def test_a_resume_removes_later_phases(folder):
    (folder / 'rollouts' / 'phase-00000009.parquet.tmp').write_text('torn')
    rollouts.begin(folder / 'rollouts', 2)
    assert sorted(p.name for p in (folder / 'rollouts').iterdir()) == [f'phase-0000000{i}.parquet' for i in (1, 2)]


def test_a_run_from_the_beginning_moves_the_earlier_ones_aside(folder):
    for _ in range(2):  # the second move takes the place of the first
        rollouts.begin(folder / 'rollouts', 0)
        assert recorded_phases(folder) == []
        assert recorded_phases(folder / 'rollouts.previous') == [1, 2, 3]
    write_rollouts(folder / 'rollouts', 1, [row(1, 0)])
    rollouts.begin(folder / 'rollouts', 0)
    assert recorded_phases(folder / 'rollouts.previous') == [1]


@pytest.mark.parametrize(
    ('phases', 'max_bytes', 'max_phases', 'kept'),
    [
        (range(1, 9), 80, 8, [1, 2, 3, 4, 5, 6, 7, 8]),  # within both limits
        (range(1, 10), 80, 100, [1, 2, 4, 6, 8, 9]),  # 90 bytes; with every second, 60 = three quarters of 80
        (range(1, 10), 1000, 8, [1, 2, 4, 6, 8, 9]),
        (range(1, 10), 70, 100, [1, 4, 8, 9]),  # 60 is more than 52
        (range(1, 10), 5, 100, [1, 9]),  # the ends always
        ([4, 8, 9, 10, 11, 12], 50, 5, [4, 8, 12]),
    ],
)
def test_which_phases_stay(phases, max_bytes, max_phases, kept):
    assert sorted(phases_to_keep(dict.fromkeys(phases, 10), max_bytes, max_phases)) == kept


def test_a_long_run_keeps_phases_at_equal_distances():
    sizes: dict[int, int] = {}
    most = 0
    for phase in range(1, 10_001):
        sizes[phase] = 10
        sizes = dict.fromkeys(phases_to_keep(sizes, 1e9, 100), 10)
        most = max(most, len(sizes))
    kept = sorted(sizes)
    gaps = {b - a for a, b in zip(kept[1:-1], kept[2:], strict=False)}
    assert most <= 100 and len(kept) > 40
    assert kept[0] == 1 and kept[-1] == 10_000
    assert max(gaps) <= 256  # 10 000 phases over 100 files
    assert all(phase % 128 == 0 for phase in kept[1:30])


def test_recordings_of_earlier_versions_have_no_episodes_and_are_read(tmp_path):
    import pyarrow.parquet as pq

    path = write_rollouts(tmp_path, 1, [row(1, 0) | {'episode': '{"turns": []}'}])
    assert read_rollouts(tmp_path)[0]['episode'] == '{"turns": []}'
    pq.write_table(pq.read_table(path).drop_columns(['episode']), path)
    assert read_rollouts(tmp_path) == [read_rollouts(tmp_path)[0] | {'episode': None}]
    pq.write_table(pq.read_table(path).drop_columns(['mask']), path)
    with pytest.warns(UserWarning, match="no column 'mask'"):
        assert read_rollouts(tmp_path) == []
