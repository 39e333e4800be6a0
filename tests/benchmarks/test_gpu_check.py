"""gpu_check.py: time budgets, and a run at tiny sizes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ('zero1', 'zero2_cpu', 'gemini_cpu')


@pytest.mark.system
def test_a_run_on_a_cpu(tmp_path):
    names = ['device', 'tests', 'decode-gpt2', 'decode-qwen2', 'ppo-s', 'trunk-7b', 'ddp', 'fsdp_cpu', 'capacity']
    names += ['trl-1.12', *UPSTREAM, 'compiled-blocks']
    script = str(ROOT / 'benchmarks' / 'gpu_check.py')
    command = [sys.executable, script, '--device', 'cpu', '--parts', *names, '--out', str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob('*.json')
    content = json.loads(path.read_text())
    assert content['device_type'] == content['machine']['device_type'] == 'cpu'
    parts = {p['name']: p for p in content['parts']}
    assert parts['trl-1.12']['reason'] == 'WHEELS=folder has no folder trl_ppo of its wheels'
    for name in ('trl-1.12', 'trunk-7b', *UPSTREAM):  # optional packages
        if parts[name]['status'] == 'left out':
            del parts[name]
    results = {name: p['result'] for name, p in parts.items()}
    assert results['tests']['finished'] and results['tests']['skipped'] and not results['tests']['failed']
    assert results['device']['matmul_tflops']['float32'] > 1e-4
    assert [d['model'] for d in content['decode']] == ['tiny-gpt2', 'tiny-qwen2']
    generated = results['decode-qwen2']['generate']['without cuDNN']
    assert generated['tokens_per_s'] == pytest.approx(4 * 16 / generated['seconds'])
    for name in {'ppo-s', 'ddp', 'fsdp_cpu', *UPSTREAM} & results.keys():
        assert results[name]['rung'] == 'tiny' and 0 < results[name]['share_of_peak']['learn'] < 1
        assert results[name]['memory']['planned_peak'] > 0
    assert results['capacity']['rows'][0]['rung'] is not None
    assert results['compiled-blocks']['difference'] < 1e-3 and '| compiled blocks |' in done.stdout
    assert f'passed: {path}' in done.stdout and '| PPO | rung | part |' in done.stdout
