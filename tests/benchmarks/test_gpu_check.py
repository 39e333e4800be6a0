"""gpu_check.py: time budgets, calls, what it records and decides, and runs at tiny sizes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / 'benchmarks'
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / 'peers')]

import gpu_check  # noqa: E402
import gpu_page  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_steps  # noqa: E402
from cuda_on_cpu import pretend_cuda  # noqa: E402

from chatgpt.functional.logprobs import kind_of_device  # noqa: E402
from chatgpt.nn.compiled import is_compiled  # noqa: E402
from chatgpt.nn.head_kernels import _uses_fused  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ('zero1', 'zero2_cpu', 'gemini_cpu')


@pytest.mark.system
def test_a_run_on_a_cpu(tmp_path):
    names = ['device', 'tests', 'decode-gpt2', 'decode-qwen2', 'ppo-s', 'trunk-7b', 'ddp', 'fsdp_cpu', 'capacity']
    names += ['trl-1.12', *UPSTREAM, 'compiled-blocks', 'decode-ways', 'logprobs', 'opt-1.3b-lora']
    script = str(ROOT / 'benchmarks' / 'gpu_check.py')
    command = [sys.executable, script, '--device', 'cpu', '--parts', *names, '--out', str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob('*.json')
    assert 'short test summary' in (tmp_path / 'logs/worker.log').read_text()
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
    assert results['decode-gpt2']['times'].keys() == results['decode-qwen2']['times'].keys() == {'without cuDNN'}
    engine, spent = results['decode-qwen2']['engine'], results['decode-qwen2']['phases_s']
    assert len(spent) == 5 and engine['seconds'] == sorted(spent[2:])[1]  # the median from the third phase on
    generated = results['decode-qwen2']['generate']['without cuDNN']
    assert generated['tokens_per_s'] == pytest.approx(4 * 16 / generated['seconds'])
    for name in {'ppo-s', 'ddp', 'fsdp_cpu', *UPSTREAM} & results.keys():
        assert results[name]['rung'] == 'tiny' and 0 < results[name]['share_of_peak']['learn'] < 1
        assert results[name]['memory']['planned_peak'] > 0
    assert results['capacity']['rows'][0]['rung'] is not None
    assert results['compiled-blocks']['difference'] < 1e-3 and '| compiled blocks |' in done.stdout
    assert f'passed: {path}' in done.stdout and '| PPO | rung | part |' in done.stdout


def test_each_call_fits_its_budget_and_the_page_names_every_part():
    parts, page = gpu_check.cuda_parts(), (BENCHMARKS.parent / 'docs/gpu_check.md').read_text()
    for call in gpu_check.CALLS:
        assert gpu_check.START_S + sum(p.budget_s for p in parts if p.call == call) <= gpu_check.BUDGET_S
    assert [p.name for p in parts if f'`{p.name}`' not in page] == []


class FakeRunner:
    """Runs nothing: each part takes no time, and what `missing` names lacks something."""

    device, machine = 'cuda', {'device': 'H100'}

    def __init__(self, *missing):
        self.missing, self.given = missing, {}

    def lacks(self, part):
        return 'no wheel' if part.name in self.missing else None

    def run(self, part, limit):
        self.given[part.name] = round(limit)
        return {'name': part.name, 'status': 'passed', 'function': part.function, 'seconds': 0}


def test_a_part_that_lacks_a_wheel_gets_no_share_of_the_time(tmp_path):
    parts = [gpu_check.Part(name, 'device', 30) for name in ('first', 'second', 'third')]
    runner = FakeRunner('second')
    content = gpu_check.check(parts, runner, out=tmp_path, budget_s=80.0)
    assert runner.given == {'first': 50, 'third': 60}  # 80 less the 30 of the third; twice its budget
    assert [(p['name'], p['status']) for p in content['parts']][0] == ('second', 'left out') and content['passed']
    assert [path.name[:5] + path.name[-7:] for path in tmp_path.glob('*.json')] == ['h100--a.json']


@pytest.mark.parametrize('name', ['kernels', 'learn-16k', 'sampler', 'ppo-step'])
def test_parts_that_look_into_a_step_run_on_a_cpu(name, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_steps, 'TOP', 10**6)  # which kernels take the most time is not sure on a busy machine
    part = next(p for p in gpu_check.cpu_parts() if p.name == name)
    task = {'function': part.function, 'options': dict(part.options), 'out': str(tmp_path / 'x.json'), 'seconds': 60}
    assert gpu_parts.do(task, torch.device('cpu')) == {'status': 'passed', 'held': 0}
    found = json.loads((tmp_path / 'x.json').read_text())
    record = {'name': name, 'function': part.function, 'status': 'passed', 'result': found}
    content = {'parts': [record], 'device': 'x', 'date': '', 'wall_s': 0, 'budget_s': 0, 'start_s': 0, 'commit': ''}
    assert name in gpu_page.table(content | {'planner': [], 'decisions': []})
    assert found['watched']['attention'] == ([] if name in ('sampler', 'learn-16k') else ['plain'])
    if name == 'sampler':
        assert found['2']['same'] == 1.0
    if name == 'kernels':
        learn, steps = found['learn'], found['decode']
        assert learn['tflops'] == pytest.approx(
            32 * (6 * learn['parameters'] + 6 * 2 * 64 * 16) / learn['seconds'] / 1e12
        )
        products = {kernel: number for kernel, number, _ in steps['plain']['top']}
        assert products['aten::addmm'] == 2 * 3 and products['aten::mm'] == 2 * 4 + 1  # q, k, v; o, MLP; the head


def test_a_step_is_the_difference_of_two_calls():
    long, short = {'a': (10, 50.0), 'b': (3, 9.0), 'c': (1, 1.0)}, {'a': (4, 20.0), 'c': (1, 4.0)}
    found = gpu_steps.kernel_table(long, short, steps=3)
    assert found == {'launches': 3.0, 'us': 13.0, 'top': [['a', 2.0, 10.0], ['b', 1.0, 3.0]]}


def test_what_falls_back_in_silence_is_recorded(tmp_path):
    note = gpu_parts.Note(torch.device('cpu'), tmp_path / 'x.json', 60.0)
    with pretend_cuda(), pytest.raises(ValueError, match='stop'), gpu_parts.watched(note):
        x = torch.ones(2, device='cuda:0')
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(1)
        warnings.warn('no CUDA graph of this model', stacklevel=1)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            raise ValueError('stop')
    seen = json.loads((tmp_path / 'x.json').read_text())['watched']
    assert (seen['captures'], seen['given_up']) == (1, 1) and seen['capture_ms'] > 0
    assert seen['warnings'] == ['UserWarning: no CUDA graph of this model']


def results(**parts):
    return [{'name': name.replace('_', '-'), 'result': result} for name, result in parts.items()]


def test_measured_parts_decide_defaults():
    rates = {name: {'tokens_per_s': rate} for name, rate in (('plain', 90), ('varlen', 200), ('compiled', 250))}
    heads = [{'case': name, 'seconds': s} for name, s in (('plain', 0.6), ('fused', 0.2), ('liger', 0.19))]
    draws = {'64': {'one_level_ms': 9, 'two_levels_ms': 1}, '256': {'one_level_ms': 1.0, 'two_levels_ms': 2.0}}
    found = gpu_page.decisions(results(decode_ways={'ways': rates}, logprobs={'cases': heads}, sampler=draws))
    assert [(round(d['times'], 2), d['pays']) for d in found] == [
        (1.25, True),
        (0.5, False),
        (3.0, True),
        (1.05, False),
    ]
    content = {'decisions': found}
    assert '| 1.25 | 1.15 | yes | no |' in '\n'.join(gpu_page._decided(content))


def test_defaults_are_those_that_the_table_of_decisions_names():
    """Change both together, by a file of results."""
    states, head = torch.ones(600, 8, device='meta'), torch.nn.Linear(8, 2**17, device='meta')
    assert kind_of_device(states) != 'cpu' and _uses_fused('auto', states, head, 2**17)
    two_levels = gpu_steps.randomness.COLUMNS < 151936
    compiled = gpu_parts.LocalEngine().fixed_steps == 'compiled'
    blocks = is_compiled(torch.nn.Linear(1, 1))
    assert [default for *_, default in gpu_page.DECISIONS] == [compiled, two_levels, True, False, blocks]


def test_the_page_holds_the_calls_of_a_day(tmp_path):
    page, files = tmp_path / 'page.md', []
    page.write_text('| what | part `sampler` | x | not run |\n\n<!-- results -->\n<!-- end of results -->\n')
    common = {'device': 'H100', 'device_type': 'cuda', 'budget_s': 530, 'start_s': 9, 'wall_s': 20, 'commit': 'abc'}
    for day, call, name in (
        ('2026-01-01', 'A', 'old'),
        ('2026-01-02', 'B', 'logprobs'),
        ('2026-01-02', 'A', 'sampler'),
    ):
        files.append(tmp_path / f'{day}{call}.json')
        part = {'name': name, 'status': 'passed', 'function': 'device', 'result': {'matmul_tflops': {'bf16': 700}}}
        content = {'date': day, 'call': call, 'parts': [part], 'planner': [], 'decisions': []}
        files[-1].write_text(json.dumps(common | content))
    assert gpu_page.newest(tmp_path) == [files[2], files[1]]
    gpu_page.fill_page(page, gpu_page.newest(tmp_path))
    text = page.read_text()
    assert '| H100, 2026-01-02. sampler: matrix products: bf16 700 TFLOPS |' in text
    assert '| sampler | passed |' in text and '| logprobs | passed |' in text and 'old' not in text
