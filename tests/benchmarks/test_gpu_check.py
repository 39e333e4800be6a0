"""gpu_check.py: budgets, what a failing part means, wheels, and one real part on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import gpu_check
from gpu_check import Part

ROOT = Path(__file__).resolve().parents[2]
WRITE = 'import json, sys; json.dump({content}, open(sys.argv[1], "w"))'


def writes(name: str, content: object, budget_s: int = 30) -> Part:
    return Part(name, ('-c', WRITE.format(content=repr(content)), '{out}'), budget_s)


def run(parts: list[Part], tmp_path: Path, budget_s: float = 100.0, site: str | None = None) -> dict:
    content = gpu_check.check(parts, device='cpu', out=tmp_path, budget_s=budget_s, site=site)
    (path,) = tmp_path.glob('*.json')
    assert json.loads(path.read_text()) == content
    return content


def test_parts_that_pass(tmp_path):
    memory = {'planned_peak': 90, 'peak': 100, 'planner_error': -0.1}
    content = run(
        [writes('device', {'machine': {'device': 'Some GPU (8 GB)'}}), writes('one', {'memory': memory})], tmp_path
    )
    assert content['passed'] and content['device'] == 'Some GPU (8 GB)'
    assert (tmp_path / f'some-gpu-8-gb-{time.strftime("%Y-%m-%d")}.json').is_file()
    assert content['planner'] == [{'run': 'one', 'planned': 90, 'measured': 100, 'error': -0.1}]
    assert content['parts'][1]['result'] == {'memory': memory}


def test_a_part_that_fails_is_told_and_the_others_go_on(tmp_path):
    content = run([Part('bad', ('-c', 'print("so sad"); raise SystemExit(3)'), 30), writes('good', 1)], tmp_path)
    bad, good = content['parts']
    assert not content['passed']
    assert (bad['status'], bad['exit_code'], bad['output']) == ('failed', 3, 'so sad\n')
    assert good['status'] == 'passed' and 'output' not in good


def test_a_part_over_its_budget_is_ended_with_its_children(tmp_path):
    child = tmp_path / 'child'
    code = (
        'import os, subprocess, sys, time; p = subprocess.Popen([sys.executable, "-c", "import time; '
        f'time.sleep(100)"]); open({str(child)!r}, "w").write(str(p.pid)); time.sleep(100)'
    )
    start = time.monotonic()
    content = run([Part('slow', ('-c', code), 3)], tmp_path / 'out')
    assert time.monotonic() - start < 30
    assert content['parts'][0]['status'] == 'out of time' and not content['passed']
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
    content = gpu_check.check(
        [writes('a', 1)], device='cpu', out=tmp_path, budget_s=100.0, site=None, begun=time.monotonic() - 90.0
    )
    assert content['parts'][0]['status'] == 'not reached' and content['wall_s'] >= 90.0


def test_setting_up_ends_in_time(tmp_path, monkeypatch):
    env = gpu_check.environment('cpu', None)
    assert gpu_check.answers('raise SystemExit(0)', env, 60.0) and not gpu_check.answers(
        'raise SystemExit(1)', env, 60.0
    )
    start = time.monotonic()
    assert not gpu_check.answers('import time; time.sleep(60)', env, 0.5)
    (tmp_path / 'a.whl').touch()
    slow = tmp_path / 'python'
    slow.write_text('#!/bin/sh\nexec sleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(slow))
    with pytest.raises(ValueError, match='did not install the wheels of .* within 1 s'):
        gpu_check.install_wheels(tmp_path, str(tmp_path / 'site'), 0.6)
    assert time.monotonic() - start < 30


def test_optional_packages(tmp_path):
    content = run([Part('extra', ('-c', 'raise SystemExit(1)'), 30, ('json', 'no_such_package_of_ours'))], tmp_path)
    assert content['passed']
    assert content['parts'][0]['reason'] == 'not installed: no_such_package_of_ours; WHEELS=folder brings them'


def test_marked_tests_have_to_run_where_there_is_a_gpu(tmp_path):
    xml = '<testsuites><testsuite tests="5" failures="0" errors="0" skipped="{}"/></testsuites>'
    for skipped, status in ((5, 'failed'), (1, 'passed')):
        code = f'import sys; open(sys.argv[1], "w").write({xml.format(skipped)!r})'
        record = gpu_check.run_part(
            Part('tests', ('-c', code, '{out}'), 30), 30.0, gpu_check.environment('cpu', None), 'cuda'
        )
        assert record['status'] == status
        assert record['result'] == {'tests': 5, 'failures': 0, 'errors': 0, 'skipped': skipped, 'passed': 5 - skipped}


def test_planner_errors_of_a_sweep():
    tried = {'s': {'trained': True, 'planned': 150, 'peak': 100}, 'm': {'trained': False, 'planned': 300}}
    sweep = {
        'name': 'capacity',
        'result': {'memory': 7, 'rows': [{'strategy': 'naive', 'option': 'full', 'tried': tried}]},
    }
    found = gpu_check.planner_errors([sweep, {'name': 'failed'}])
    assert found == [{'run': 'capacity naive full s', 'planned': 150, 'measured': 100, 'error': 0.5}]


def test_wheels_are_there_for_the_parts_alone(tmp_path):
    wheels, site = tmp_path / 'wheels', tmp_path / 'site'
    wheels.mkdir()
    with zipfile.ZipFile(wheels / 'tiny_wheel_of_ours-1.0-py3-none-any.whl', 'w') as file:
        file.writestr('tiny_wheel_of_ours.py', 'answer = 42\n')
        info = 'tiny_wheel_of_ours-1.0.dist-info'
        file.writestr(f'{info}/METADATA', 'Metadata-Version: 2.1\nName: tiny-wheel-of-ours\nVersion: 1.0\n')
        file.writestr(
            f'{info}/WHEEL', 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n'
        )
        file.writestr(f'{info}/RECORD', '')
    gpu_check.install_wheels(wheels, str(site))
    code = 'import tiny_wheel_of_ours as t, sys, json; json.dump(t.answer, open(sys.argv[1], "w"))'
    content = run([Part('uses', ('-c', code, '{out}'), 30, ('tiny_wheel_of_ours',))], tmp_path / 'out', site=str(site))
    assert content['parts'][0]['result'] == 42
    with pytest.raises(ValueError, match='holds no wheels'):
        gpu_check.install_wheels(tmp_path / 'nowhere', str(site))


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / 'benchmarks' / 'gpu_check.py'), *flags], capture_output=True, text=True, timeout=110
    )


@pytest.mark.system
def test_the_command_on_a_cpu(tmp_path):
    done = command('--device', 'cpu', '--parts', 'device', 'decode', '--out', str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob('*.json')
    content = json.loads(path.read_text())
    assert content['device_type'] == content['machine']['device_type'] == 'cpu'
    assert content['parts'][0]['result']['matmul_tflops']['fp32'] > 1e-4
    assert [(d['model'], d['lengths']) for d in content['decode']] == [('tiny', 'fixed'), ('tiny', 'varying')]
    for entry in content['decode']:
        assert 0 < entry['times']['min'] <= entry['times']['median'] <= entry['times']['max']
        assert entry['tokens_per_s'].keys() == {'local', 'generate'}
    assert f'passed: {path}' in done.stdout


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        (['--parts', 'everything'], "there is no part 'everything'; there are device, tests"),
        (['--device', 'cpu', '--wheels', 'nowhere'], 'nowhere holds no wheels'),
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
            assert part.command[0] == '-m' or (ROOT / part.command[0]).is_file()
            assert any('{out}' in word for word in part.command)
    # What the targets are measured by comes first, and is reached even where every part takes all it may and setting up
    # takes a minute.
    targets = ('device', 'tests', 'gpt-s-bf16', 'decode', 'gpt-xl-bf16', 'opt-1.3b-lora')
    first = gpu_check.cuda_parts()[: len(targets)]
    assert tuple(p.name for p in first) == targets and not any(p.needs for p in first)
    assert sum(p.budget_s for p in first) + 60 <= 530
    assert gpu_check.file_name(None).startswith('unknown-')
