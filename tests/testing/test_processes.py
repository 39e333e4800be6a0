"""Ranks forked from the server see the caller's settings, and do not see the effects of earlier jobs."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from scripts_on_ranks import run_source

from chatgpt.testing.processes import run_distributed

MARKS: list[str] = []


def place() -> dict[str, object]:
    """Returns the state that a job finds, and then changes it."""
    total = torch.ones(1)
    dist.all_reduce(total)
    found: dict[str, object] = {
        'pid': os.getpid(),
        'sum': total.item(),
        'marks': list(MARKS),
        'draw': torch.rand(1).item(),
    }
    found |= {'word': os.environ.get('WORD'), 'left': os.environ.get('LEFT'), 'folder': os.getcwd()}
    found |= {'paths': list(sys.path), 'threads': torch.get_num_threads()}
    found |= {'rank': (os.environ['RANK'], dist.get_rank(), dist.get_world_size())}
    MARKS.append('here')
    os.environ['LEFT'] = 'something'
    torch.set_default_dtype(torch.float64)
    return found


def test_a_job_finds_what_the_caller_has_set_and_nothing_of_the_job_before(monkeypatch, tmp_path):
    first = run_distributed(place, 2, init_group=True)
    monkeypatch.setenv('WORD', 'set later than the server')
    monkeypatch.chdir(tmp_path)
    second = run_distributed(place, 2, init_group=True)
    assert [f['word'] for f in first + second] == [None, None, *['set later than the server'] * 2]
    assert [f['folder'] for f in second] == [str(tmp_path)] * 2
    for rank, found in enumerate([*first, *second]):
        assert found['rank'] == (str(rank % 2), rank % 2, 2) and found['sum'] == 2.0
        assert found['marks'] == [] and found['left'] is None and found['threads'] == 1
        assert found['paths'] == sys.path
    assert len({f['pid'] for f in first + second} | {os.getpid()}) == 5
    assert len({f['draw'] for f in first + second}) == 1  # the generator has not been used


def fresh_or_not() -> tuple[int, int]:
    return hash('a word'), os.getppid()


def test_fresh_ranks_are_interpreters_of_their_own():
    ranks = run_distributed(fresh_or_not, 2, fresh=True)
    assert {parent for _, parent in ranks} == {os.getpid()}
    if 'PYTHONHASHSEED' not in os.environ:
        assert ranks[0][0] != ranks[1][0]


def fails(how: str) -> str:
    if dist.get_rank() == 1:
        if how == 'raises':
            raise LookupError('no such shelf')
        if how == 'killed':
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
    return 'well'


def test_a_job_that_fails_is_told_and_the_next_one_is_well():
    with pytest.raises(Exception, match='(?s)fails.*LookupError: no such shelf'):
        run_distributed(fails, 2, 'raises', init_group=True)
    with pytest.raises(Exception, match='SIGKILL'):
        run_distributed(fails, 2, 'killed', init_group=True)
    with pytest.raises(TimeoutError, match='fails on 2 processes did not end within 0.5 s'):
        run_distributed(fails, 2, 'hangs', init_group=True, timeout_s=0.5)
    assert run_distributed(fails, 1, 'raises', init_group=True) == ['well']


def test_a_script_gives_its_output_and_its_exit_code():
    results = run_source("""
import os, sys
print('rank', os.environ['RANK'], __name__)
os.system('echo from a child')
if os.environ['RANK'] == '1':
    raise KeyError('no such shelf')
sys.exit(3)
""")
    assert [code for code, _ in results] == [3, 1]
    assert all('from a child\n' in text and f'rank {rank} __main__\n' in text for rank, (_, text) in enumerate(results))
    assert 'Traceback' in results[1][1] and "KeyError: 'no such shelf'" in results[1][1]
    with pytest.raises(TimeoutError, match='1 processes did not end within 0.2 s'):
        run_source('import time\ntime.sleep(50)', world_size=1, timeout_s=0.2)
