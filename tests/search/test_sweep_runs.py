"""Sweeps of real runs: the page's example finds a better learning rate, kills and signals, launchers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_trials import table
from limits import until

from chatgpt.strategies.checkpoint import CheckpointError, claim_folder

pytest.importorskip('optuna', reason='sweeps need optuna: make dev')
pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
TINY = {'max_steps': 4, 'log_interval': 2, 'train_batch_size': 4}


def start(folder: Path, content: dict[str, Any], *flags: str) -> subprocess.Popen[str]:
    (folder / 'sweep.yaml').write_text(yaml.safe_dump(content))
    return subprocess.Popen(
        [sys.executable, '-m', 'chatgpt', 'sweep', 'sweep.yaml', *flags],
        cwd=folder,
        env=os.environ | {'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def is_free(folder: Path) -> bool:
    try:
        claim_folder(folder).close()
    except CheckpointError:
        return False
    return True


def test_the_example_of_the_page_finds_a_better_learning_rate_than_the_worst(tmp_path):
    page = (ROOT / 'docs' / 'sweep.md').read_text()
    (text,) = re.findall(r'```yaml\n(.*?)```', page, re.DOTALL)
    command = re.search(r'^    python -m chatgpt sweep sweep.yaml (--jobs 2)$', page, re.MULTILINE)
    content = yaml.safe_load(text)
    process = start(tmp_path, content, *command[1].split())
    output, _ = process.communicate()
    assert process.returncode == 0, output
    folder = tmp_path / content['save_path']
    rows = table(folder)
    assert len(rows) == 6 and {row['state'] for row in rows} <= {'complete', 'pruned'}
    for row in rows:  # the table says what the runs have logged
        logged = {
            line['step']: line['sft/loss'] for line in lines(folder / f'trial-{int(row["number"]):04d}/metrics.jsonl')
        }
        assert float(row['value']) == logged[int(row['step'])]
        config = yaml.safe_load((folder / f'trial-{int(row["number"]):04d}' / 'config.yaml').read_text())
        assert float(config['lr']) == float(row['lr']) and config['max_steps'] == 30
    complete = [row for row in rows if row['state'] == 'complete']
    best, worst = min(complete, key=lambda r: float(r['value'])), max(rows, key=lambda r: float(r['value']))
    assert f'best: trial {best["number"]} with sft/loss' in output
    assert float(best['value']) < float(worst['value']) - 0.5  # nats per token, of about 4 at the start
    assert float(best['lr']) > 10 * float(worst['lr'])  # new weights want a large one
    assert (folder / 'curves.png').read_bytes().startswith(b'\x89PNG')


def test_two_sweeps_in_a_folder_and_a_killed_sweep(tmp_path):
    content = {
        'method': 'dpo',
        'metric': 'dpo/loss',
        'direction': 'min',
        'trials': 1,
        'parameters': {'beta': {'min': 0.05, 'max': 0.5}},
        'config': TINY | {'max_steps': 200},
        'save_path': 'out',
    }
    both = [start(tmp_path, content), start(tmp_path, content)]
    run = tmp_path / 'out' / 'trial-0000'
    until(lambda: len(lines(run / 'metrics.jsonl')) >= 1 and any(p.poll() is not None for p in both))
    (second,) = [p for p in both if p.poll() is not None]
    (first,) = [p for p in both if p is not second]
    said, _ = second.communicate()
    assert second.returncode == 2 and said.count('\n') == 1
    assert re.match(rf'error: out: process {first.pid} on \S+ is writing here', said)
    assert not is_free(run)
    first.kill()
    first.communicate()
    until(lambda: is_free(run))
    phases = len(lines(run / 'metrics.jsonl'))
    process = start(tmp_path, content)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert 'trial 0 goes on' in output and phases < 100
    assert f'going on from {run}/checkpoints/step-{phases:08d}' in (run / 'output.log').read_text()
    (row,) = table(tmp_path / 'out')
    assert row['state'] == 'complete' and row['step'] == '100' and 0.05 <= float(row['beta']) <= 0.5
