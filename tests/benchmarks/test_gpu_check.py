"""gpu_check.py: budgets, the shared process, failing parts, interruptions; and a rehearsal on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from limits import until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import gpu_check
import gpu_parts
import gpu_tests
from gpu_check import Part, measure

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ('zero1', 'zero2_cpu', 'gemini_cpu')
FAKE_WORKER = """
import json, os, subprocess, sys, time
print(json.dumps({'ready': {'device': 'Some GPU (8 GB)', 'device_memory': int(7.9 * 2**30)}}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    print('doing', task['function'], file=sys.stderr, flush=True)
    child = subprocess.Popen(['sleep', '3600']).pid if task['function'] == 'hang' else None
    json.dump({'pid': os.getpid(), 'child': child, **task['options']}, open(task['out'], 'w'))
    if task['function'] == 'die':
        os._exit(7)
    if task['function'] == 'hang':
        time.sleep(3600)
    status = {'status': 'failed', 'reason': 'so sad'} if task['function'] == 'fail' else {'status': 'passed'}
    print(json.dumps(status | {'held': 2**30 if task['function'] == 'hold' else 0}), flush=True)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Parts by a process that measures nothing; what the file holds."""
    script = tmp_path / 'fake_worker.py'
    script.write_text(FAKE_WORKER)
    monkeypatch.setattr(gpu_check, 'SCRIPT', script)
    monkeypatch.setattr(gpu_check, 'LEAST_S', 1)

    def run(parts: list[Part]) -> dict:
        runner = gpu_check.Runner('cpu')
        try:
            runner.start_worker('main', 60)
            content = gpu_check.check(parts, runner, out=tmp_path / 'out', budget_s=300.0)
        finally:
            runner.close()
        (path,) = (tmp_path / 'out').glob('some-gpu-8-gb-*.json')
        assert json.loads(path.read_text()) == content and content['device'] == 'Some GPU (8 GB)'
        assert not runner.folder.exists()
        return content

    return run


def is_gone(pid: int) -> bool:
    try:
        return 'State:\tZ' in Path('/proc', str(pid), 'status').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_parts_share_a_process_until_one_fails(run):
    functions = ['a', 'b', 'fail', 'c', 'die', 'd', 'hold', 'e']
    memory = {'planned_peak': 90, 'peak': 100, 'planner_error': -0.1}
    content = run([measure(name, name, 30, number=7, memory=memory) for name in functions])
    statuses = {p['name']: p['status'] for p in content['parts']}
    assert statuses == dict.fromkeys(functions, 'passed') | {'fail': 'failed', 'die': 'failed'}
    pids = {p['name']: p['result']['pid'] for p in content['parts']}
    assert pids['a'] == pids['b'] == pids['fail'] and pids['c'] == pids['die'] and pids['d'] == pids['hold']
    assert len(set(pids.values())) == 4  # after the failure, the end, and a gibibyte that stayed
    fail, die = content['parts'][2], content['parts'][4]
    assert (fail['reason'], die['reason']) == ('so sad', 'the process ended with 7') and not content['passed']
    assert fail['output'] == 'doing fail\n' and fail['result']['number'] == 7
    assert content['planner'][0] == {'run': 'a', 'planned': 90, 'measured': 100, 'error': pytest.approx(-0.1)}


def test_a_part_over_its_budget_is_ended_with_its_children_and_keeps_its_numbers(run):
    hang, after = run([measure('hang', 'hang', 2, kept=5), measure('next', 'a', 30)])['parts']
    assert hang['status'] == 'out of time' and hang['result']['kept'] == 5
    assert after['status'] == 'passed' and after['result']['pid'] != hang['result']['pid']
    until(lambda: is_gone(hang['result']['child']))  # the kernel may take a while to carry it out


def test_an_interruption_writes_what_there_is(run):
    before = signal.signal(signal.SIGUSR1, gpu_check.stop_like_ctrl_c)
    timer = threading.Timer(3.0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        content = run([measure(n, n, 60, kept=5) for n in ('a', 'hang', 'b')])
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)
    assert [p['status'] for p in content['parts']] == ['passed', 'interrupted', 'not reached']
    assert content['parts'][1]['result']['kept'] == 5 and not content['passed']
    assert is_gone(content['parts'][1]['result']['pid'])


def test_optional_packages_cards_and_wheels(run):
    parts = [
        measure('extra', 'fail', 30, part={'needs': ('json', 'no_such_package_of_ours')}),
        measure('large', 'fail', 30, 12),
        measure('peer', 'fail', 30, part={'wheels': 'trl_ppo'}),
        measure('fits', 'a', 30, 8),
    ]
    content = run(parts)
    assert content['passed'] and [p['status'] for p in content['parts']] == ['left out'] * 3 + ['passed']
    assert [p['reason'] for p in content['parts'][:3]] == [
        'not installed: no_such_package_of_ours; WHEELS=folder brings them',
        'it needs a card of 12 GiB, and this one has 7.9',
        'WHEELS=folder has no folder trl_ppo of its wheels',
    ]


def test_a_part_may_take_what_others_left_over_and_never_what_they_need():
    parts = [
        measure('a', '', 10),
        measure('b', '', 20),
        measure('c', '', 30),
        measure('d', '', 40, part={'extra': True}),
    ]
    assert gpu_check.limits(parts, 0, 60.0) == 10.0  # all that there is is needed
    assert gpu_check.limits(parts, 0, 65.0) == 15.0  # 5 s too many
    assert gpu_check.limits(parts, 0, 500.0) == 20.0  # twice its budget and no more
    assert gpu_check.limits(parts, 1, 40.0) == 20.0  # its own budget, though a slow start has eaten into the last one's
    assert gpu_check.limits(parts, 2, 12.0) == 12.0
    assert gpu_check.limits(parts, 3, 25.0) == 25.0 and gpu_check.limits(parts, 3, 100.0) == 40.0


def test_only_files_with_the_mark_are_collected():
    mark = 'pytest.mark' + '.gpu'
    holding = {str(p.relative_to(ROOT)) for p in ROOT.glob('tests/**/test_*.py') if mark in p.read_text()}
    found = gpu_tests.marked_files()
    assert set(found) == holding and found[0].startswith('tests/gpu/')


def test_budgets_and_names():
    for parts in (gpu_check.cuda_parts(), gpu_check.cpu_parts()):
        names = [p.name for p in parts]
        assert len(set(names)) == len(names) and names[:2] == ['device', 'tests']
        assert {part.function for part in parts} <= set(gpu_parts.FUNCTIONS)
        # all parts together, each at its budget, and the start
        assert sum(p.budget_s for p in parts if not p.extra) + gpu_check.START_S <= gpu_check.BUDGET_S
        assert [p.extra for p in parts] == sorted(p.extra for p in parts)  # extra ones come last


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / 'benchmarks' / 'gpu_check.py')
    return subprocess.run([sys.executable, script, *flags], capture_output=True, text=True)


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        (['--parts', 'everything'], "there is no part 'everything'; there are device, tests"),
        (['--device', 'cpu', '--wheels', 'nowhere'], 'nowhere holds no wheels'),
        (['--page', 'nowhere.json'], 'nowhere.json: there is no such file'),
    ],
)
def test_mistakes_of_the_command(flags, sentence):
    done = command(*flags)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert sentence in done.stderr


@pytest.mark.system
def test_the_rehearsal_on_a_cpu(tmp_path):
    names = ['device', 'tests', 'decode-gpt2', 'decode-qwen2', 'ppo-s', 'trunk-7b', 'ddp', 'fsdp_cpu', 'capacity']
    names += ['trl-1.12', *UPSTREAM, 'compiled-blocks']
    done = command('--device', 'cpu', '--parts', *names, '--out', str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob('*.json')
    content = json.loads(path.read_text())
    assert content['device_type'] == content['machine']['device_type'] == 'cpu'
    parts = {p['name']: p for p in content['parts']}
    assert parts['trl-1.12']['reason'] == 'WHEELS=folder has no folder trl_ppo of its wheels'
    for name in ('trl-1.12', 'trunk-7b', *UPSTREAM):  # packages that need not be there
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
