"""Capacity under a cap: the way of the sweep against made-up machines, and real children that fit and that do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chatgpt.launch.arguments import run_main

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import capacity
import capacity_page
import capacity_rung
from dummy import DummyRun

MIB = 2**20
RUNGS = ['a', 'b', 'c', 'd', 'e', 'f']
NEEDS = {rung: (i + 1) * 100 * MIB for i, rung in enumerate(RUNGS)}


class Machine(capacity.Sweep):
    """Rungs that need 100, 200, ... MiB, of which the planner says `factor` times as much."""

    def __init__(self, memory: int, factor: float = 1.0, broken: tuple[str, ...] = ()) -> None:
        super().__init__(DummyRun(), 'tiny', RUNGS, capacity.Cap(memory, None, False, 1.5, 10.0))
        self.factor, self.broken = factor, broken
        self.measured: list[str] = []

    def plan(self, settings: DummyRun, rung: str) -> tuple[int | None, bool | None]:
        planned = int(NEEDS[rung] * self.factor)
        return planned, planned <= self.cap.memory

    def measure(self, settings: DummyRun, rung: str) -> dict[str, Any]:
        self.measured.append(rung)
        if rung in self.broken:
            return {'trained': False, 'limit': None, 'message': 'a\nValueError: broken'}
        if NEEDS[rung] > self.cap.memory:
            return {'trained': False, 'limit': 'memory', 'message': 'm'}
        return {
            'trained': True,
            'limit': None,
            'peak': NEEDS[rung],
            'parameters': {'actor': NEEDS[rung] // 4},
            'seconds': 1.0,
        }


@pytest.mark.parametrize(
    ('factor', 'measured', 'wrong'),
    [
        (1.0, ['c', 'd'], []),
        (0.7, ['e', 'd', 'c'], ['e', 'd']),  # 350 and 280 MiB planned, 500 and 400 needed
        (2.0, ['a', 'b'], ['b']),  # c is planned at 600 MiB: hopeless
        (10.0, ['a'], ['a']),
    ],
)
def test_the_sweep_finds_the_largest_rung(factor, measured, wrong):
    machine = Machine(350 * MIB, factor)
    row = machine.row('naive', 'full')
    assert machine.measured == measured
    assert [text.split()[0] for text in row.disagreements()] == wrong
    if factor <= 1:
        assert (row.rung, row.limit, row.limit_at) == ('c', 'memory', 'd')
        assert row.parameters == 75 * MIB
    elif factor == 2.0:
        assert (row.rung, row.limit, row.limit_at) == ('b', 'planned 600 MiB', 'c')


def test_ends_of_the_ladder():
    everything = Machine(10**12).row('naive', 'full')
    assert (everything.rung, everything.limit) == ('f', None)
    nothing = Machine(50 * MIB).row('naive', 'full')
    assert (nothing.rung, nothing.limit, nothing.limit_at) == (None, 'memory', 'a')
    broken = Machine(350 * MIB, broken=('c',)).row('naive', 'full')
    assert (broken.rung, broken.limit, broken.limit_at) == (None, 'error', 'c')
    assert broken.disagreements() == []  # an error says nothing about memory


def test_what_the_planner_says_alone():
    machine = Machine(350 * MIB)
    machine.rungs = ['1m', '2m', '3m']
    NEEDS.update({'1m': 100 * MIB, '2m': 300 * MIB, '3m': 500 * MIB})
    row = machine.planned_row('naive', 'full')
    assert (row.rung, row.limit, row.limit_at, machine.measured) == ('2m', 'planned 500 MiB', '3m', [])
    d = 192  # of 2m, which has 4 blocks
    assert row.parameters == 4 * (12 * d**2 + 13 * d) + 2 * d + 2 * 1024 * d


def test_options_of_a_run():
    sweep = capacity.Sweep(
        DummyRun(prompt_length=32, max_length=64), 'tiny', RUNGS, capacity.Cap(MIB, None, False, 1.5, 10.0)
    )
    lean = sweep.settings('fsdp', 'lean')
    assert (lean.strategy, lean.lora_rank, lean.critic, lean.reward, lean.max_tokens_per_batch) == (
        'fsdp',
        16,
        'shared',
        'function',
        64,
    )
    for option in capacity.OPTIONS:
        sweep.settings('naive', option).check(1)


def test_the_command_is_shown_without_files():
    given = ['--memory', '1GiB', '--json', '/somewhere/a', '--options', 'full', 'lora', '--page', 'b']
    assert capacity.shown_command(given) == 'python benchmarks/capacity.py --memory 1GiB --options full lora'


@pytest.mark.parametrize(
    ('error', 'on_cuda', 'limit'),
    [
        (torch.OutOfMemoryError('CUDA out of memory. Tried ...'), True, 'device memory'),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True, 'host memory'),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), False, 'memory'),
        (MemoryError(), False, 'memory'),
        (OSError(12, 'Cannot allocate memory'), False, 'memory'),
        (ValueError('prompt 3 is too long'), False, None),
    ],
    ids=str,
)
def test_what_an_error_means(error, on_cuda, limit):
    assert capacity_rung.outcome_of(error, on_cuda)['limit'] == limit


@pytest.mark.system
def test_children_under_a_cap(monkeypatch, capsys, tmp_path):
    """The smallest rung (1 million, four networks: 37 MiB and more) trains under 400 MiB and not under 24."""
    flags = [
        '--ladder=tiny',
        '--device=cpu',
        '--strategies',
        'naive',
        '--options',
        'full',
        '--prompt_length=4',
        '--max_length=8',
        '--batch_size=2',
        '--hopeless=0.001',
    ]
    monkeypatch.setitem(capacity.ladders.FAMILIES, 'tiny', ('GPT', {'1m': (128, 4, 4)}))
    contents = []
    for memory in ('24MiB', '400MiB'):
        monkeypatch.setattr(
            sys,
            'argv',
            [
                'capacity.py',
                '--memory',
                memory,
                *flags,
                '--json',
                str(tmp_path / 'out.json'),
                '--page',
                str(tmp_path / 'page.md'),
            ],
        )
        run_main(capacity.main)
        contents.append(json.loads((tmp_path / 'out.json').read_text()))
    short, enough = (c['rows'][0] for c in contents)
    assert (short['rung'], short['limit'], short['limit_at']) == (None, 'memory', '1m')
    assert enough['rung'] == '1m' and enough['limit'] is None
    # 4 blocks of 12 d² + 13 d, the last norm, embeddings of 1,024 tokens and as many positions, d = 128
    assert enough['parameters'] == 4 * (12 * 128**2 + 13 * 128) + 2 * 128 + 2 * 1024 * 128
    outcome = enough['tried']['1m']
    assert 20 * MIB < outcome['peak'] < 400 * MIB
    assert outcome['planned'] > 37 * MIB
    page = (tmp_path / 'page.md').read_text()
    assert 'Measured on a CPU' in page and 'not on a GPU' in page and '| naive | full | 1m | 1.1 M |' in page
    monkeypatch.setattr(
        sys, 'argv', ['capacity.py', '--report', str(tmp_path / 'out.json'), '--page', str(tmp_path / 'again.md')]
    )
    run_main(capacity.main)
    assert (tmp_path / 'again.md').read_text() == page


def test_the_page_says_what_went_wrong(tmp_path):
    rows = []
    for machine in (Machine(350 * MIB, 0.7), Machine(350 * MIB, broken=('c',))):
        row = machine.row('naive', 'full')
        rows.append(capacity.asdict(row) | {'disagreements': row.disagreements()})
    content = {
        'rows': rows,
        'smallest': 'a',
        'memory': MIB,
        'host_memory': None,
        'device_type': 'cpu',
        'ladder': 'tiny',
        'machine': None,
        'command': 'the command',
        'settings': capacity.asdict(DummyRun()),
    }
    capacity_page.write(tmp_path / 'page.md', content)
    page = (tmp_path / 'page.md').read_text()
    assert '- naive, full: e was to fit and did not (planned 350 MiB); d was' in page
    assert '- naive, full, c: ValueError: broken' in page
    assert '| naive | 1 | -30% | -30% | -30% |' in page
    assert '| does not train |' in page


def content_of(command: str, option: str, rung: str, error: float, **changed: Any) -> dict[str, Any]:
    tried = {rung: {'trained': True, 'limit': None, 'peak': 100 * MIB, 'planned': int(100 * MIB * (1 + error))}}
    row = {'strategy': 'naive', 'option': option, 'tried': tried, 'rung': rung, 'parameters': 10, 'limit': 'memory'}
    return {
        'rows': [row | {'limit_at': 'd', 'disagreements': []}],
        'smallest': None,
        'memory': MIB,
        'host_memory': None,
        'device_type': 'cpu',
        'ladder': 'tiny',
        'machine': {'device': 'a CPU'},
        'command': command,
        'settings': capacity.asdict(DummyRun()),
    } | changed


def test_sweeps_are_combined_and_compared(tmp_path):
    first, second = content_of('one', 'full', 'a', -0.5), content_of('two', 'micro', 'b', 0.04)
    again = content_of('three', 'full', 'c', -0.02)
    whole = capacity_page.combined([first, second, again])
    assert [(r['option'], r['rung']) for r in whole['rows']] == [('full', 'c'), ('micro', 'b')]
    assert whole['command'].splitlines() == ['one', 'two', 'three']
    capacity_page.write(tmp_path / 'page.md', whole, before=first)
    page = (tmp_path / 'page.md').read_text()
    assert '| naive | 2 | -2% | +4% | +4% | -50% | -50% | -50% |' in page
    assert '`one`\n\n`two`' in page
    with pytest.raises(ValueError, match='differ in memory'):
        capacity_page.combined([first, content_of('two', 'micro', 'b', 0.0, memory=2 * MIB)])
    with pytest.raises(ValueError, match='of different machines'):
        capacity_page.combined([first, content_of('two', 'micro', 'b', 0.0, machine={'device': 'another'})])


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        (['--memory', 'lots'], 'invalid parse_bytes value'),
        (['--device', 'cuda'], 'torch sees none'),
        (['--prompt_length', '512'], 'must be above prompt_length=512'),
        (['--option', 'full'], 'did you mean --options'),
    ],
)
def test_mistakes(monkeypatch, capsys, flags, sentence):
    if flags == ['--device', 'cuda'] and torch.cuda.is_available():
        pytest.skip('there is one')
    monkeypatch.setattr(sys, 'argv', ['capacity.py', *flags])
    with pytest.raises(SystemExit) as ended:
        run_main(capacity.main)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
