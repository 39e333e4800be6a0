"""gpu_check.py: budgets, shared processes, failing parts, interruptions; and a rehearsal on the
CPU. What its parts do on CUDA alone: tests/pretend_cuda/test_gpu_parts_on_pretend_cuda.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from limits import until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import gpu_check
import gpu_parts
import gpu_tests
from gpu_check import Part

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ('zero1', 'zero2_cpu', 'gemini_cpu')
WRITE = 'import json, sys; json.dump({content}, open(sys.argv[1], "w"))'
FAKE_WORKER = """
import json, os, sys, time
print(json.dumps({'ready': {'device': 'Some GPU (8 GB)', 'device_memory': 8 * 2**30}}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    print('doing', task['function'], file=sys.stderr, flush=True)
    json.dump({'pid': os.getpid(), **task['options']}, open(task['out'], 'w'))
    if task['function'] == 'die':
        os._exit(7)
    if task['function'] == 'hang':
        time.sleep(100)
    status = {'status': 'failed', 'reason': 'so sad'} if task['function'] == 'fail' else {'status': 'passed'}
    print(json.dumps(status | {'held': 2**30 if task['function'] == 'hold' else 0}), flush=True)
"""


def writes(name: str, content: object, budget_s: int = 30, **fields) -> Part:
    return Part(name, ('-c', WRITE.format(content=repr(content)), '{out}'), budget_s, **fields)


def run(parts, tmp_path, budget_s=300.0, site=None, machine=None, begun=None, device='cpu') -> dict:
    runner = gpu_check.Runner(device, site)
    runner.machine = machine or {}
    try:
        content = gpu_check.check(parts, runner, out=tmp_path, budget_s=budget_s, begun=begun)
    finally:
        runner.close()
    (path,) = tmp_path.glob('*.json')
    assert json.loads(path.read_text()) == content
    assert not runner.folder.exists()
    return content


@pytest.fixture
def fake_worker(tmp_path, monkeypatch):
    script = tmp_path / 'fake_worker.py'
    script.write_text(FAKE_WORKER)
    monkeypatch.setattr(gpu_check.Worker, 'script', script)


# ---------------------------------------------------------------------- parts


def test_parts_that_pass(tmp_path):
    memory = {'planned_peak': 90, 'peak': 100, 'planner_error': -0.1}
    content = run(
        [writes('one', {'memory': memory}), writes('two', 2)], tmp_path, machine={'device': 'Some GPU (8 GB)'}
    )
    assert content['passed'] and content['device'] == 'Some GPU (8 GB)'
    assert (tmp_path / f'some-gpu-8-gb-{time.strftime("%Y-%m-%d")}.json').is_file()
    assert content['planner'] == [{'run': 'one', 'planned': 90, 'measured': 100, 'error': pytest.approx(-0.1)}]
    assert content['parts'][0]['result'] == {'memory': memory}


def test_a_part_that_fails_is_told_and_the_others_go_on(tmp_path):
    content = run([Part('bad', ('-c', 'print("so sad"); raise SystemExit(3)'), 30), writes('good', 1)], tmp_path)
    bad, good = content['parts']
    assert not content['passed']
    assert (bad['status'], bad['exit_code'], bad['output']) == ('failed', 3, 'so sad\n')
    assert good['status'] == 'passed' and 'output' not in good


def test_a_part_over_its_budget_is_ended_with_its_children_and_keeps_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, 'LEAST_S', 1)
    child = tmp_path / 'child'
    code = (
        'import os, subprocess, sys, time; p = subprocess.Popen([sys.executable, "-c", "import time; '
        f'time.sleep(3600)"]); open({str(child)!r}, "w").write(str(p.pid)); open(sys.argv[1], "w").write("[1]"); '
        'time.sleep(3600)'
    )
    content = run([Part('slow', ('-c', code, '{out}'), 3)], tmp_path / 'out')
    assert content['parts'][0]['status'] == 'out of time' and not content['passed']
    assert content['parts'][0]['result'] == [1]
    status = Path('/proc', child.read_text(), 'status')

    def is_gone() -> bool:
        try:
            return 'State:\tZ' in status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(is_gone)  # the kernel may take a while to carry it out


def test_a_part_may_take_what_others_left_over_and_never_what_they_need():
    parts = [Part('a', (), 10), Part('b', (), 20), Part('c', (), 30), Part('d', (), 40, extra=True)]
    assert gpu_check.limits(parts, 0, 60.0) == 10.0  # all that there is is needed
    assert gpu_check.limits(parts, 0, 65.0) == 15.0  # 5 s too many
    assert gpu_check.limits(parts, 0, 500.0) == 20.0  # twice its budget and no more
    assert gpu_check.limits(parts, 1, 40.0) == 20.0  # its own budget, though a slow start has eaten into the last one's
    assert gpu_check.limits(parts, 2, 12.0) == 12.0
    assert gpu_check.limits(parts, 3, 25.0) == 25.0 and gpu_check.limits(parts, 3, 100.0) == 40.0


def test_optional_packages_cards_and_wheels(tmp_path):
    ends = ('-c', 'raise SystemExit(1)')
    parts = [
        Part('extra', ends, 30, ('json', 'no_such_package_of_ours')),
        Part('large', ends, 30, memory=12 * 2**30),
        Part('peer', ends, 30, wheels='trl_ppo'),
        writes('fits', 1, memory=8 * 2**30),
    ]
    content = run(parts, tmp_path, machine={'device': 'card', 'device_memory': int(7.9 * 2**30)})
    assert content['passed']
    assert [p['status'] for p in content['parts']] == ['left out'] * 3 + ['passed']
    assert [p['reason'] for p in content['parts'][:3]] == [
        'not installed: no_such_package_of_ours; WHEELS=folder brings them',
        'it needs a card of 12 GiB, and this one has 7.9',
        'WHEELS=folder has no folder trl_ppo of its wheels',
    ]


# ---------------------------------------------------------------------- processes that parts share


def test_parts_share_a_process_until_one_fails(tmp_path, fake_worker):
    functions = ['a', 'b', 'fail', 'c', 'die', 'd', 'hold', 'e']
    parts = [gpu_check.measure(name, name, 30, number=7) for name in functions]
    content = run(parts, tmp_path / 'out')
    statuses = {p['name']: p['status'] for p in content['parts']}
    assert statuses == dict.fromkeys(functions, 'passed') | {'fail': 'failed', 'die': 'failed'}
    pids = {p['name']: p['result']['pid'] for p in content['parts']}
    assert pids['a'] == pids['b'] == pids['fail'] and pids['c'] == pids['die'] and pids['d'] == pids['hold']
    assert len(set(pids.values())) == 4  # after the failure, the end, and a gibibyte that stayed
    fail, die = content['parts'][2], content['parts'][4]
    assert (fail['reason'], die['reason']) == ('so sad', 'the process ended with 7')
    assert fail['output'] == 'doing fail\n' and fail['result']['number'] == 7
    assert content['device'] == 'Some GPU (8 GB)'


def test_a_function_over_its_budget_keeps_its_numbers(tmp_path, fake_worker, monkeypatch):
    monkeypatch.setattr(gpu_check, 'LEAST_S', 1)
    content = run([gpu_check.measure('hang', 'hang', 2, kept=5), gpu_check.measure('next', 'a', 30)], tmp_path / 'out')
    hang, after = content['parts']
    assert hang['status'] == 'out of time' and hang['result']['kept'] == 5
    assert after['status'] == 'passed' and after['result']['pid'] != hang['result']['pid']


def test_an_interruption_writes_what_there_is(tmp_path, fake_worker):
    before = signal.signal(signal.SIGUSR1, gpu_check.stop_like_ctrl_c)
    timer = threading.Timer(3.0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        content = run([gpu_check.measure(n, n, 60, kept=5) for n in ('a', 'hang', 'b')], tmp_path / 'out')
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)
    assert [p['status'] for p in content['parts']] == ['passed', 'interrupted', 'not reached']
    assert content['parts'][1]['result']['kept'] == 5 and not content['passed']
    assert content['parts'][2]['reason'] == 'the run was interrupted'
    assert not Path('/proc', str(content['parts'][1]['result']['pid'])).exists()


def test_only_files_with_the_mark_are_collected():
    grep = subprocess.run(
        ['git', 'grep', '-l', '-F', 'pytest.mark' + '.gpu', 'tests'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = gpu_tests.marked_files()
    assert sorted(found) == sorted(path for path in grep.stdout.split() if Path(path).name.startswith('test_'))
    assert found[0].startswith('tests/gpu/') and len(found) < 20


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / 'benchmarks' / 'gpu_check.py'), *flags],
        capture_output=True,
        text=True,
    )


@pytest.mark.system
def test_the_rehearsal_on_a_cpu(tmp_path):
    names = ['device', 'decode-gpt2', 'decode-qwen2', 'ppo-s', 'trunk-7b', 'ddp', 'fsdp_cpu', 'capacity', 'trl-1.12']
    names += [*UPSTREAM, 'compiled-blocks']
    done = command('--device', 'cpu', '--parts', *names, '--out', str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob('*.json')
    content = json.loads(path.read_text())
    assert content['device_type'] == content['machine']['device_type'] == 'cpu'
    parts = {p['name']: p for p in content['parts']}
    left_out = parts.pop('trl-1.12')
    assert (left_out['status'], left_out['reason']) == ('left out', 'WHEELS=folder has no folder trl_ppo of its wheels')
    if parts['trunk-7b']['status'] == 'left out':
        assert 'bitsandbytes' in parts.pop('trunk-7b')['reason']
    for name in UPSTREAM:
        if parts[name]['status'] == 'left out':
            assert 'not installed' in parts.pop(name)['reason']
    results = {name: p['result'] for name, p in parts.items()}
    assert results['device']['matmul_tflops']['float32'] > 1e-4
    assert [d['model'] for d in content['decode']] == ['tiny-gpt2', 'tiny-qwen2']
    for name in ('decode-gpt2', 'decode-qwen2'):
        generated = results[name]['generate']['without cuDNN']
        assert generated['tokens_per_s'] == pytest.approx(4 * 16 / generated['seconds'])
    for name in {'ppo-s', 'ddp', 'fsdp_cpu', *UPSTREAM} & results.keys():
        assert results[name]['rung'] == 'tiny' and 0 < results[name]['share_of_peak']['learn'] < 1
        assert results[name]['memory']['planned_peak'] > 0
    assert results['capacity']['rows'][0]['rung'] is not None
    assert 'planned' in results.get('trunk-7b', {'planned': {}})
    assert results['compiled-blocks']['difference'] < 1e-3 and '| compiled blocks |' in done.stdout
    assert f'passed: {path}' in done.stdout and '| PPO | rung | part |' in done.stdout


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


def test_budgets_and_names():
    for parts in (gpu_check.cuda_parts(), gpu_check.cpu_parts()):
        names = [p.name for p in parts]
        assert len(set(names)) == len(names) and names[0] == 'device'
        for part in parts:
            if part.function:
                assert part.function in gpu_parts.FUNCTIONS and not part.command
            else:
                assert (ROOT / part.command[0]).is_file() and '{out}' in part.command
        # all parts together, each at its budget, and the start
        assert sum(p.budget_s for p in parts if not p.extra) + gpu_check.START_S <= gpu_check.BUDGET_S == 530
        assert [p.extra for p in parts] == sorted(p.extra for p in parts)  # extra ones come last
    assert {p.name for p in gpu_check.cpu_parts()} <= {p.name for p in gpu_check.cuda_parts()}
    first = [p.name for p in gpu_check.cuda_parts()][:6]
    assert first == ['device', 'tests', 'decode-gpt2', 'decode-qwen2', 'ppo-s', 'ppo-large']
    assert gpu_check.file_name(None).startswith('unknown-')
