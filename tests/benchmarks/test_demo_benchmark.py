"""The page of the demo: rows of runs that are there already, means by hand, and the text around them left alone."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch) -> Any:
    monkeypatch.setattr(sys, 'path', list(sys.path))
    spec = importlib.util.spec_from_file_location('demo_benchmark', ROOT / 'benchmarks' / 'demo.py')
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop('demo', None)


def test_page(benchmark, monkeypatch, tmp_path):
    for name in benchmark.SETTINGS:
        for seed, rate in ((0, 0.9), (1, 0.95)):
            folder = tmp_path / 'runs' / name.replace(',', '').replace(' ', '_') / f'seed-{seed}'
            for stage in ('sft', 'reward_model', 'ppo'):
                (folder / f'{stage}_run').mkdir(parents=True)
                (folder / f'{stage}_run' / 'metrics.jsonl').write_text('{"step": 1}\n')
            numbers = dict.fromkeys((key for key, _ in benchmark.COLUMNS.values()), 1.0)
            (folder / 'measured.json').write_text(json.dumps(numbers | {'win_rate': rate, 'stories': ['it sat .']}))
    page = tmp_path / 'demo.md'
    page.write_text('before\n' + benchmark.MARKS[0] + 'old\n' + benchmark.MARKS[1] + 'after\n')
    monkeypatch.setattr(
        sys, 'argv', ['demo.py', '--seeds', '0', '1', '--runs', str(tmp_path / 'runs'), '--out', str(page)]
    )
    benchmark.main()
    lines = page.read_text().splitlines()
    assert lines[0] == 'before' and lines[-1] == 'after' and 'old' not in lines
    rows = [line for line in lines if line.startswith('| the demo |')]
    assert [row.split(' | ')[1:3] for row in rows] == [
        ['0', '90.0%'],
        ['1', '95.0%'],
        ['mean (least, greatest)', '**92.5%** (90.0%, 95.0%)'],
    ]
    assert lines.count('- it sat .') == 2 and lines.count('- seed 1: nothing') == 2
