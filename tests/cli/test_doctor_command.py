"""`doctor RUN` and `rollouts RUN`: output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import call

from chatgpt.monitor.doctor import CHECKS

ROOT = Path(__file__).resolve().parents[2]


def folder(path: Path, **numbers: float) -> Path:
    """Writes the folder of a reward model's run of ten phases."""
    path.mkdir(parents=True)
    row = {'rm/loss': 0.69, 'rm/accuracy': 0.5, 'rm/lr': 1e-5} | numbers
    lines = [
        json.dumps({'step': i, **row, 'rm/loss': row['rm/loss'] - 0.01 * i * row['rm/accuracy']}) for i in range(1, 11)
    ]
    (path / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
    return path


def record(path: Path) -> None:
    content = {
        'format': 1,
        'method': 'reward-model',
        'trainer': 'RewardModelTrainer',
        'models': {'model': {'parameters': 260000, 'trained': 260000}},
        'num_phases': 10,
        'data': {'prompts': 9, 'distinct': 5},
    }
    (path / 'run.json').write_text(json.dumps(content))


def test_a_run_with_a_fault_and_a_good_one(tmp_path, monkeypatch, capsys):
    run, good = folder(tmp_path / 'run'), folder(tmp_path / 'good', **{'rm/accuracy': 0.8})
    record(run)
    assert call(monkeypatch, 'doctor', str(good)) == 0
    out = capsys.readouterr().out
    assert out.startswith(f'{good}: no findings in 10 phases\n') and 'there is no run.json' in out
    assert call(monkeypatch, 'doctor', str(good), str(run), '--json') == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(row['run'], row['finding'], row['step']) for row in rows]
    assert found == [(str(run), 'few-prompts', 3), (str(run), 'nothing-moves', 8)]
    (tmp_path / 'sweep').mkdir()
    assert call(monkeypatch, 'doctor', str(tmp_path / 'sweep'), str(run), '--json') == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2 and err.startswith(f'left out: {tmp_path / "sweep"} is not')
    assert call(monkeypatch, 'doctor', str(run)) == 1
    out = capsys.readouterr().out
    assert out.startswith(f'{run}: 2 findings in 10 phases\n')
    assert 'warning, from phase 8: nothing moves\n  seen    in 8 logged phases' in out
    assert 'change  raise lr to 1e-03' in out and 'more    chatgpt-rlhf doctor --explain nothing-moves' in out


@pytest.mark.parametrize('line', ['garbage', '{"rm/loss": 1}', '\0\0'])
def test_a_damaged_line_is_named(tmp_path, monkeypatch, capsys, line):
    run = folder(tmp_path / 'run')
    with open(run / 'metrics.jsonl', 'a') as file:
        file.write(f'{line}\n' + '{"step": 12}\n')
    for word in ('doctor', 'report'):
        assert call(monkeypatch, word, str(run)) == 2
        assert f'error: {run}/metrics.jsonl, line 11: the line is damaged' in capsys.readouterr().err


def test_a_run_that_failed_is_not_called_good(tmp_path, monkeypatch, capsys):
    failed = {'format': 1, 'method': 'ppo', 'trainer': 'PPOTrainer', 'status': 'failed'}
    failed |= {'error': 'RewardFunctionError: no\nmore of it'}
    (tmp_path / 'run.json').write_text(json.dumps(failed))
    assert call(monkeypatch, 'doctor', str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert out == f'{tmp_path}: no findings in 0 phases; the run failed: RewardFunctionError: no\n'


def test_a_card_that_stayed_idle_is_named(tmp_path, monkeypatch, capsys):
    run = folder(tmp_path / 'run', **{'rm/accuracy': 0.8})
    start = {'at': '2026-01-01T00:00:00Z', 'phase': 0, 'command': [], 'machine': {'unused_card': 'torch sees no card'}}
    content = {'format': 1, 'method': 'reward-model', 'trainer': 'RewardModelTrainer', 'starts': [start]}
    (run / 'run.json').write_text(json.dumps(content))
    assert call(monkeypatch, 'doctor', str(run)) == 0
    assert capsys.readouterr().out == f'{run}: no findings in 10 phases\ntorch sees no card\n'


def test_a_finding_is_explained_without_a_run(monkeypatch, capsys):
    assert call(monkeypatch, 'doctor', '--explain', 'kl-runs-away') == 0
    out = capsys.readouterr().out
    assert out.startswith('kl-runs-away') and 'Why: ' in out and 'Change: ' in out
    assert call(monkeypatch, 'doctor', '--explain') == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(CHECKS)
    assert call(monkeypatch, 'doctor', '--explain', 'kl-run-away') == 2
    assert 'did you mean kl-runs-away' in capsys.readouterr().err


def test_it_serves_runs_that_have_recordings_and_names_one_that_has_none(monkeypatch, capsys, tmp_path):
    served = []
    monkeypatch.setattr('chatgpt.launch.cli.rollouts.serve', lambda app, host, port: served.append((host, port)))
    runs = [tmp_path / name / 'rollouts' for name in ('one', 'two')]
    for run in runs:
        run.mkdir(parents=True)
        (run / 'phase-00000001.parquet').touch()
    assert call(monkeypatch, 'rollouts', *(str(run.parent) for run in runs), '--port=0') == 0
    assert served == [('127.0.0.1', 0)]
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n')
    assert call(monkeypatch, 'rollouts', str(tmp_path)) == 2
    assert f'{tmp_path} has no recorded sequences: give the folder of a run' in capsys.readouterr().err
    assert call(monkeypatch, 'rollouts', str(tmp_path / 'nothing')) == 2
    assert f'{tmp_path / "nothing"}: there is no such folder' in capsys.readouterr().err
    assert call(monkeypatch, 'rollouts') == 2 and len(served) == 1
