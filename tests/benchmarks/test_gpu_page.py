"""gpu_page.py: the tables of a run, and docs/gpu.md filled from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import gpu_page

ROOT = Path(__file__).resolve().parents[2]


def rate(tokens_per_s, seconds, **more):
    return {'tokens_per_s': tokens_per_s, 'seconds': seconds, **more}


def content_of_a_run() -> dict:
    decode = {
        'model': 'gpt2',
        'batch': 64,
        'prompt': 64,
        'new': 512,
        'precision': 'bf16',
        'first_phase': rate(8000.0, 4.096),
        'engine': rate(32768.0, 1.0),
        'generate': {
            'with cuDNN': rate(4096.0, 8.0, new=512),
            'without cuDNN': rate(8192.0, 0.5, new=64, reason='no time'),
        },
        'times': {'with cuDNN': 8.0, 'without cuDNN': 4.0},
    }
    memory = {'peak': 10 * 2**30, 'planned_peak': 9 * 2**30, 'planner_error': -0.1}
    numbers = {'collect': 1.0, 'score': 0.5, 'learn': 2.0}
    ppo = {
        'rung': 'xl',
        'memory': memory,
        'seconds_per_phase': numbers,
        'tflops_per_device': {n: 100 * v for n, v in numbers.items()},
        'share_of_peak': {'collect': 0.01, 'score': 0.3, 'learn': 0.45},
    }
    case = {'ratio_wall': {'min': 3.0, 'median': 3.5, 'max': 4.0}, 'ours': {'wall_s': 1.5}, 'theirs': {'wall_s': 5.25}}
    trunk = {'peak': 15 * 2**30, 'planned_peak': 14 * 2**30}
    rows = [
        {
            'cap': 8 * 2**30,
            'option': 'lean',
            'rung': 'xl',
            'parameters': 1557 * 10**6,
            'limit_at': '2b',
            'limit': 'planned 12 GiB',
        },
        {'cap': 2**34, 'option': 'lean', 'left_out': 'the cap of 16 GiB is more than the card has'},
    ]
    parts = [
        {
            'name': 'device',
            'function': 'device',
            'status': 'passed',
            'seconds': 3.0,
            'budget_s': 12,
            'result': {'matmul_tflops': {'bfloat16': 788.2}},
        },
        {
            'name': 'tests',
            'status': 'failed',
            'seconds': 60.0,
            'budget_s': 75,
            'result': {
                'passed': 50,
                'failures': 1,
                'errors': 0,
                'skipped': 2,
                'failed': {'tests/a.py::test_b (call)': 'text'},
            },
        },
        {
            'name': 'decode-gpt2',
            'function': 'decode',
            'status': 'passed',
            'seconds': 20.0,
            'budget_s': 22,
            'result': decode,
        },
        {'name': 'ppo-large', 'function': 'ppo', 'status': 'passed', 'seconds': 20.0, 'budget_s': 35, 'result': ppo},
        {
            'name': 'trl-1.12',
            'function': 'peer',
            'status': 'out of time',
            'reason': 'ended after 35 s',
            'seconds': 35.0,
            'budget_s': 35,
            'result': {'cases': {'eos': case}},
        },
        {'name': 'trunk-7b', 'function': 'trunk', 'status': 'passed', 'seconds': 40.0, 'budget_s': 55, 'result': trunk},
        {
            'name': 'capacity',
            'function': 'capacity',
            'status': 'passed',
            'seconds': 40.0,
            'budget_s': 40,
            'result': {'rows': rows},
        },
        {
            'name': 'ddp',
            'function': 'ppo',
            'status': 'failed',
            'reason': 'RuntimeError: no',
            'seconds': 1.0,
            'budget_s': 12,
        },
        {'name': 'zero2', 'status': 'left out', 'reason': 'not installed: colossalai'},
        {'name': 'ppo-s-fp32', 'status': 'not reached', 'reason': '0 s', 'extra': True},
    ]
    planner = [{'run': 'ppo-large', 'planned': 9 * 2**30, 'measured': 10 * 2**30, 'error': -0.1}]
    return {
        'device': 'NVIDIA H200',
        'device_type': 'cuda',
        'machine': {'torch': '2.11.0', 'transformers': '5.17.0'},
        'date': '2026-11-30',
        'commit': '0123456789abcdef',
        'budget_s': 530.0,
        'wall_s': 400.0,
        'start_s': 20.0,
        'passed': False,
        'planner': planner,
        'parts': parts,
    }


def test_the_table_tells_what_came_out():
    shown, times = gpu_page.table(content_of_a_run()), '8.0 times with cuDNN, 4.0 times without cuDNN'
    for line in (
        'NVIDIA H200, torch 2.11.0, transformers 5.17.0, 2026-11-30: '
        '400 s of 530, the first 20 for the start, commit 0123456789',
        '| device | passed | 3 / 12 | matrix products: bfloat16 788 TFLOPS |',
        '| tests | failed | 60 / 75 | failed, 50 passed, 1 failed, 2 skipped |',
        f'| decode-gpt2 | passed | 20 / 22 | 32768 tokens/s; of `model.generate` {times} |',
        '| ppo-large | passed | 20 / 35 | xl: learn at 45% of the matrix product; 10.00 GiB, planned -10% |',
        '| trl-1.12 | out of time | 35 / 35 | out of time, ended after 35 s, eos 3.5 times |',
        '| ddp | failed | 1 / 12 | failed, RuntimeError: no |',
        '| zero2 | left out | 0 / 0 | left out, not installed: colossalai |',
        '| `tests/a.py::test_b (call)` |',
        '| gpt2, 64 x 64 + 512, bf16 | local engine, first phase | 8000 | 4.10 |',
        '| gpt2, 64 x 64 + 512, bf16 | `model.generate` without cuDNN, 64 new tokens | 8192 | 0.50 |',
        '| ppo-large | xl | learn | 2.00 | 200.0 | 45.0% |',
        '| trl-1.12 | eos | 1.50 | 5.25 | 3.00 / 3.50 / 4.00 |',
        '| ppo-large | 9.00 GiB | 10.00 GiB | -10.0% |',
        '| 8 GiB | lean | xl | 1557 M | 2b: planned 12 GiB |',
        '| 16 GiB | lean |  |  | the cap of 16 GiB is more than the card has |',
    ):
        assert line in shown.splitlines()


PAGE = f"""# On a GPU

| what | how it would be run | on a CPU | on a GPU |
|---|---|---|---|
| decode | parts `decode-gpt2` and `decode-qwen2` | 1.4 times | not run |
| many | part `zero2` | tested | not run |
| others | `torchrun x.py` | tested | not run |

{gpu_page.BEGIN}
old
{gpu_page.END}

## The rest
| a | `decode-gpt2` | b | not run |
"""


def test_the_page_is_filled_and_what_did_not_run_stays(tmp_path):
    page, file = tmp_path / 'gpu.md', tmp_path / 'run.json'
    page.write_text(PAGE)
    file.write_text(json.dumps(content_of_a_run()))
    assert gpu_page.write_page(page, gpu_page.newest(tmp_path)) == f'{page}: results of {file}'
    text = page.read_text()
    came = '32768 tokens/s; of `model.generate` 8.0 times with cuDNN, 4.0 times without cuDNN'
    row = '| decode | parts `decode-gpt2` and `decode-qwen2` | 1.4 times | NVIDIA H200, 2026-11-30. decode-gpt2: '
    assert f'{row}{came} |' in text.splitlines()
    assert (
        '| many | part `zero2` | tested | not run |' in text
        and '| others | `torchrun x.py` | tested | not run |' in text
    )
    assert '\nold\n' not in text and '| ppo-large | 9.00 GiB | 10.00 GiB | -10.0% |' in text
    assert text.endswith('## The rest\n| a | `decode-gpt2` | b | not run |\n')
    gpu_page.write_page(page, file)
    assert page.read_text() == text  # again is the same


def test_what_cannot_fill_the_page_is_said(tmp_path):
    with pytest.raises(ValueError, match='holds no results; make gpu-check writes them'):
        gpu_page.newest(tmp_path)
    file = tmp_path / 'cpu.json'
    file.write_text(json.dumps(content_of_a_run() | {'device_type': 'cpu'}))
    with pytest.raises(ValueError, match='says nothing about a GPU'):
        gpu_page.write_page(tmp_path / 'gpu.md', file)
    with pytest.raises(ValueError, match='the page lacks the lines'):
        gpu_page.filled('# On a GPU\n', content_of_a_run())


def test_our_page_can_be_filled():
    text = gpu_page.filled((ROOT / 'docs/gpu.md').read_text(), content_of_a_run())
    assert text.count('NVIDIA H200, 2026-11-30') >= 6  # the decode, tests, PPO, trunk, capacity and TRL rows
