"""The fixed runs repeat themselves to the bit, and see a change in the fifth digit of a learning rate."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import record
import runs

FEW = ['shared_trunk', 'sft_resumed', 'kto']
LOGGED = 'dynamic_sampling rft nlpo hydra ptx dpo orpo simpo ilql reward_model sft_evaluated'.split()


@cache
def recorded(name: str) -> runs.Record:
    return runs.record_run(name)


@pytest.mark.parametrize('name', FEW)
def test_a_run_repeats_itself_and_a_perturbation_is_seen(name):
    assert runs.first_difference(recorded(name), runs.record_run(name)) is None
    found = runs.first_difference(recorded(name), runs.record_run(name, lr_scale=1.0001))  # the negative control
    assert found is not None and ' against ' in found


@pytest.mark.parametrize('name', ['shared_trunk', 'nlpo', 'hydra', 'ptx', 'kto', 'dpo', 'reward_model'])
def test_a_run_learns_something(name):
    """Weights that stand still, or metrics that are all 0, would agree with everything."""
    found = recorded(name)
    norms = [float.fromhex(value) for key, value in found.items() if key.endswith('grad_norm')]
    assert len(norms) >= 2 and all(norm > 1e-3 for norm in norms)
    losses = {value for key, value in found.items() if key.endswith('loss')}
    assert len(losses) >= 2


@pytest.mark.parametrize('name', [*FEW, *LOGGED])
def test_every_metric_of_a_run_has_its_formula(name):
    """On docs/metrics.md; an evaluation's own numbers have the names that its function gives."""
    page = (Path(__file__).resolve().parents[2] / 'docs' / 'metrics.md').read_text()
    documented = set(re.findall(r'`([a-z_]+(?:/[a-z_0-9]+)+)`', page))
    logged = {key.split()[-1] for key in recorded(name) if key.startswith('phase ')}
    assert len(logged) > 2
    common = ('grad_norm', 'grad_norm_max', 'lr', 'epoch')  # described once, under sft/
    names = {m.replace('/val_', '/') for m in logged if not m.startswith('eval/') and m.split('/')[1] not in common}
    assert names <= documented


def test_the_run_before_does_not_matter():
    before = recorded('dpo')
    runs.record_run('simpo')
    assert runs.first_difference(before, runs.record_run('dpo')) is None


@pytest.mark.parametrize(
    ('a', 'b', 'want'),
    [
        ({'x': '0x1.8p+0'}, {'x': '0x1.8p+0'}, None),
        (
            {'x': '0x1.8p+0'},
            {'x': '0x1.8000000000001p+0'},
            'x: 0x1.8p+0 (1.5) against 0x1.8000000000001p+0 (1.5000000000000002)',
        ),
        ({'x': 'nan'}, {'x': 'nan'}, None),
        ({'x': '0x0.0p+0'}, {}, 'x: 0x0.0p+0 (0.0) against nothing'),
        ({}, {'sha256 w': 'zz'}, 'sha256 w: nothing against zz'),
    ],
)
def test_the_first_difference(a, b, want):
    assert runs.first_difference(a, b) == want


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, 'argv', ['record.py', *arguments])
    monkeypatch.setattr(sys, 'path', list(sys.path))
    for name, value in record.VARIABLES.items():
        monkeypatch.setenv(name, value)
    return record.main()


def test_the_command_records_and_compares(tmp_path, monkeypatch, capsys):
    path = tmp_path / 'before.json'
    assert run_main(monkeypatch, '--only', 'simpo', '--out', str(path)) == 0
    assert run_main(monkeypatch, '--only', 'simpo', '--against', str(path)) == 0
    assert 'all 1 runs are the same to the bit' in capsys.readouterr().out
    recording = json.loads(path.read_text())
    missing = next(key for key in recording['runs']['simpo'] if key.startswith('phase 2'))
    value = recording['runs']['simpo'].pop(missing)
    path.write_text(json.dumps(recording))
    assert run_main(monkeypatch, '--only', 'simpo', '--against', str(path)) == 0
    assert f'only in this code: {missing.split()[-1]}\n' in capsys.readouterr().out
    recording['runs']['simpo'][missing] = value
    changed = missing
    recording['runs']['simpo'][changed] = '0x1.0p+9'
    recording['runs']['gone'] = {}
    path.write_text(json.dumps(recording))
    assert run_main(monkeypatch, '--only', 'simpo', '--against', str(path)) == 1
    told, count = capsys.readouterr().out, len(recording['runs']['simpo'])
    assert f'simpo differs: 1 of {count} entries, first {changed}: 0x1.0p+9 (512.0) against' in told
    assert run_main(monkeypatch, '--only', '[sg][io][mn][pe]*', '--against', str(path)) == 1
    assert 'gone differs: only in the recording' in capsys.readouterr().out
    recording['machine']['vectors'] = 'SVE'
    path.write_text(json.dumps(recording))
    assert run_main(monkeypatch, '--only', 'simpo', '--against', str(path)) == 1
    assert "recorded with vectors 'SVE'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        ([], 'give --out FILE to record'),
        (['--root', '/', '--out', 'x'], 'has no package chatgpt'),
        (['--against', 'missing.json'], 'missing.json is no recording'),
        (['--only', 'pppo', '--out', 'x'], '--only pppo matches no run'),
    ],
)
def test_mistakes_of_the_command(arguments, sentence, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, *arguments)
    assert sentence in capsys.readouterr().err
    assert not list(Path(tmp_path).iterdir())
