"""gpu_check.py: budgets, processes that parts share, what a failing part means, wheels, interruptions; and a rehearsal
on the CPU. What its parts do on CUDA alone: tests/pretend_cuda/test_gpu_parts_on_pretend_cuda.py."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import gpu_check
import gpu_parts
import gpu_tests
import wheels
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
        f'time.sleep(100)"]); open({str(child)!r}, "w").write(str(p.pid)); open(sys.argv[1], "w").write("[1]"); '
        'time.sleep(100)'
    )
    start = time.monotonic()
    content = run([Part('slow', ('-c', code, '{out}'), 3)], tmp_path / 'out')
    assert time.monotonic() - start < 60
    assert content['parts'][0]['status'] == 'out of time' and not content['passed']
    assert content['parts'][0]['result'] == [1]
    status = Path('/proc', child.read_text(), 'status')

    def is_gone() -> bool:
        try:
            return 'State:\tZ' in status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    end = time.monotonic() + 20  # the kernel may take a while to carry it out
    while not is_gone() and time.monotonic() < end:
        time.sleep(0.1)
    assert is_gone()


def test_what_no_time_is_left_for_is_said(tmp_path):
    content = run([writes('a', 1), writes('b', 1)], tmp_path, budget_s=5.0)
    assert [p['status'] for p in content['parts']] == ['not reached', 'not reached'] and not content['passed']


def test_what_came_before_the_parts_counts(tmp_path):
    content = run([writes('a', 1)], tmp_path, budget_s=100.0, begun=time.monotonic() - 95.0)
    assert content['parts'][0]['status'] == 'not reached'
    assert content['wall_s'] >= 95.0 and content['start_s'] >= 95.0


def test_extra_parts_need_not_be_reached(tmp_path):
    content = run([writes('a', 1), writes('b', 1, extra=True)], tmp_path, budget_s=100.0, begun=time.monotonic() - 65.0)
    assert [p['status'] for p in content['parts']] == ['passed', 'passed']
    content = run([writes('a', 1, 85), writes('b', 1, extra=True)], tmp_path / 'again', begun=time.monotonic() - 293.0)
    assert content['parts'][1]['status'] == 'not reached' and 'extra' in content['parts'][1]
    assert gpu_check.is_well(content['parts'][1]) and not gpu_check.is_well({'status': 'not reached'})


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


def test_another_group_of_parts_has_another_process(tmp_path, fake_worker):
    parts = [gpu_check.measure(n, n, 30, part={'worker': w}) for n, w in (('a', 'main'), ('b', 'other'), ('c', 'main'))]
    pids = [p['result']['pid'] for p in run(parts, tmp_path / 'out')['parts']]
    assert len(set(pids)) == 3
    for pid in pids:
        assert not Path('/proc', str(pid)).exists()


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


# ---------------------------------------------------------------------- the marked tests


def test_marked_tests_have_to_run_where_there_is_a_gpu(tmp_path):
    for passed, status in ((0, 'failed'), (1, 'passed')):
        content = run(
            [writes('tests', {'passed': passed, 'failures': 0, 'errors': 0, 'skipped': 4})], tmp_path, device='cuda'
        )
        assert content['parts'][0]['status'] == status


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


def test_counts_of_tests_are_there_after_each(tmp_path):
    mark = '@pytest.mark' + '.gpu'
    (tmp_path / 'test_few_of_ours.py').write_text(f"""
import json, os, pytest
{mark}
def test_a(): pass
{mark}
def test_b(): pytest.skip('no such card')
{mark}
def test_c(): assert 1 == 2
def test_unmarked(): raise AssertionError
{mark}
def test_d():
    found = json.load(open({str(tmp_path / 'out.json')!r}))
    assert (found['passed'], found['skipped'], found['failures'], found['finished']) == (1, 1, 1, False)
""")
    command = [
        sys.executable,
        str(ROOT / 'benchmarks/gpu_tests.py'),
        str(tmp_path / 'out.json'),
        '--files',
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    found = json.loads((tmp_path / 'out.json').read_text())
    assert done.returncode == 1, done.stdout + done.stderr
    counts = {name: found[name] for name in ('tests', 'passed', 'failures', 'errors', 'skipped', 'finished')}
    assert counts == {'tests': 4, 'passed': 2, 'failures': 1, 'errors': 0, 'skipped': 1, 'finished': True}
    ((name, text),) = found['failed'].items()
    assert 'test_c' in name and 'assert 1 == 2' in text
    assert found['skip_reasons'] == {'Skipped: no such card': 1}


# ---------------------------------------------------------------------- numbers of all parts


def test_planner_errors():
    tried = {'s': {'trained': True, 'planned': 150, 'peak': 100}, 'm': {'trained': False, 'planned': 300}}
    row = {'strategy': 'naive', 'option': 'full', 'tried': tried}
    parts = [
        {'name': 'capacity', 'result': {'memory': 7, 'rows': [row | {'cap': 2**33}]}},
        {'name': 'trunk', 'result': {'peaks': {'learn': 50}, 'planned': {'load': 10, 'learn': 60}}},
        {'name': 'failed'},
    ]
    assert gpu_check.planner_errors(parts) == [
        {'run': 'capacity 8 GiB naive full s', 'planned': 150, 'measured': 100, 'error': 0.5},
        {'run': 'trunk learn', 'planned': 60, 'measured': 50, 'error': pytest.approx(0.2)},
    ]


# ---------------------------------------------------------------------- wheels


def write_wheel(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f'{name}-1.0-py3-none-any.whl', 'w') as file:
        file.writestr(f'{name}.py', text)
        info = f'{name}-1.0.dist-info'
        file.writestr(f'{info}/METADATA', f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
        file.writestr(
            f'{info}/WHEEL', 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n'
        )
        file.writestr(f'{info}/RECORD', '')


def test_wheels_are_there_for_the_parts_alone(tmp_path):
    folder, site = tmp_path / 'wheels', tmp_path / 'site'
    write_wheel(folder, 'tiny_wheel_of_ours', 'answer = 42\n')
    wheels.install_wheels(folder, str(site))
    code = 'import tiny_wheel_of_ours as t, sys, json; json.dump(t.answer, open(sys.argv[1], "w"))'
    content = run([Part('uses', ('-c', code, '{out}'), 30, ('tiny_wheel_of_ours',))], tmp_path / 'out', site=str(site))
    assert content['parts'][0]['result'] == 42
    with pytest.raises(ValueError, match='holds no wheels'):
        wheels.install_wheels(tmp_path / 'nowhere', str(site))


def test_the_list_of_wheels_has_what_a_machine_with_torch_and_transformers_lacks():
    """By what the packages say that they need, and in the versions of the requirements files."""
    page = (ROOT / 'docs/gpu.md').read_text()
    listed = dict(re.findall(r'([\w-]+)==([\d.]+)', re.sub(r'get wheels/.*(\n {8}.*)*', '', page)))
    known = {
        canonicalize_name(name): version
        for file in ('requirements.txt', 'requirements-dev.txt', 'requirements-colossalai.txt')
        for name, version in re.findall(r'^([\w.-]+)==(\S+)', (ROOT / file).read_text(), re.M)
    }
    assert listed and {name: known.get(name) for name in listed} == listed

    def needed(*names: str) -> set[str]:
        found: set[str] = set()
        todo = [*names]
        while todo:
            name = canonicalize_name(todo.pop())
            if name not in found:
                found.add(name)
                wants = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
                todo += [r.name for r in wants if r.marker is None or r.marker.evaluate({'extra': ''})]
        return found

    there = needed('torch', 'transformers')
    names = [name.replace('_', '-') for name in gpu_check.REQUIRED]
    assert needed(*names, 'pytest-xdist') - there <= listed.keys()
    # ColossalAI asks for more than it imports: its requirements file is what it really needs
    of_upstream = set(re.findall(r'^([\w.-]+)==', (ROOT / 'requirements-colossalai.txt').read_text(), re.M))
    assert {canonicalize_name(name) for name in of_upstream} - there <= listed.keys()
    assert {canonicalize_name(name) for name in gpu_check.COLOSSALAI} <= listed.keys()


def test_installing_wheels_ends_in_time(tmp_path, monkeypatch):
    (tmp_path / 'a.whl').touch()
    slow = tmp_path / 'python'
    slow.write_text('#!/bin/sh\nexec sleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(slow))
    start = time.monotonic()
    with pytest.raises(ValueError, match='did not install the wheels of .* within 1 s'):
        wheels.install_wheels(tmp_path, str(tmp_path / 'site'), 0.6)
    assert time.monotonic() - start < 30


# ---------------------------------------------------------------------- the command


def command(*flags: str, timeout: float = 110.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / 'benchmarks' / 'gpu_check.py'), *flags],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.system
@pytest.mark.timeout(400)
def test_the_rehearsal_on_a_cpu(tmp_path):
    names = ['device', 'decode-gpt2', 'decode-qwen2', 'ppo-s', 'trunk-7b', 'ddp', 'fsdp_cpu', 'capacity', 'trl-1.12']
    names += [*UPSTREAM, 'compiled-blocks']
    done = command('--device', 'cpu', '--parts', *names, '--out', str(tmp_path), timeout=390)
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


def test_the_page_names_parts_that_there_are():
    page = (ROOT / 'docs/gpu.md').read_text()
    names = {p.name for p in gpu_check.cuda_parts()}
    named = {
        name
        for words in re.findall(r'\bparts? ((?:`[^`]+`(?:, | and )?)+)', page)
        for name in re.findall('`([^`]+)`', words)
    }
    assert named and named <= names
    assert 'tests' in named and len(named) > 8
