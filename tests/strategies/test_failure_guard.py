"""One rank raising ends all ranks within seconds with that rank's message and a non-zero exit."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest

from chatgpt.testing.processes import run_distributed, run_script
from chatgpt.trainer.strategies import NaiveStrategy

ROOT = Path(__file__).parents[2]
HEAD = """
import sys, time, torch
from chatgpt.trainer.strategies.ddp import DDPStrategy
strategy = DDPStrategy(device='cpu')
rank = strategy.rank
"""


def launch(body: str, world_size: int = 2) -> tuple[list[int], list[str], float]:
    """Run a script on every rank; exit codes, what was printed, and seconds since the ranks were all ready."""
    results = run_script(['-c', HEAD + textwrap.dedent(body)], world_size, timeout_s=60)
    texts = [text for _, text in results]
    assert any('ready ' in t for t in texts), texts
    ready = [float(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith('ready ')]
    return [code for code, _ in results], texts, time.time() - max(ready)


@pytest.mark.parametrize('failing', [1, 0])
def test_other_ranks_end_with_the_message(failing):
    codes, texts, seconds = launch(f"""
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', time.time(), flush=True)
            if rank == {failing}:
                raise KeyError('no such shelf')
            strategy.all_reduce(torch.ones(3))
            time.sleep(50)
    """)
    assert codes == [1, 1], texts
    assert f"because rank {failing} failed: KeyError: 'no such shelf'" in texts[1 - failing]
    assert f'[rank {1 - failing}] stopped' in texts[1 - failing]
    assert 'Traceback' in texts[failing] and 'no such shelf' in texts[failing]
    assert seconds < 30  # of the 50 and more that waiting would take


def test_a_rank_that_is_busy_with_something_else_ends_too():
    codes, texts, seconds = launch("""
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', time.time(), flush=True)
            if rank == 1:
                sys.exit('out of paper')
            time.sleep(50)
    """)
    assert codes == [1, 1]
    assert 'rank 1 failed: SystemExit: out of paper' in texts[0]
    assert seconds < 30  # of the 50 and more that waiting would take


def test_without_a_guard_the_other_rank_does_not_learn_why():
    codes, texts, _ = launch("""
        strategy.barrier()
        print('ready', time.time(), flush=True)
        if rank == 1:
            raise KeyError('no such shelf')
        strategy.all_reduce(torch.ones(3))
    """)
    assert codes[1] == 1
    assert 'no such shelf' not in texts[0]


def test_a_rank_that_has_finished_learns_of_a_late_failure():
    codes, texts, _ = launch("""
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', time.time(), flush=True)
            if rank == 1:
                time.sleep(1.0)
                raise ValueError('late')
        print('left the guard')
    """)
    assert codes == [1, 1]
    assert 'RankFailure: rank 1 failed: ValueError: late' in texts[0]
    assert 'left the guard' not in texts[0] + texts[1]


def _same_mistake_everywhere():
    from chatgpt.trainer.strategies.ddp import DDPStrategy

    said = []
    with DDPStrategy(device='cpu') as strategy:
        for attempt in range(3):  # a guard can be entered again after a failure that every rank survived
            try:
                with strategy.failure_guard(), strategy.failure_guard():
                    if attempt != 1:
                        raise ValueError(f'mistake {attempt}')
                    said.append(strategy.all_gather_object(strategy.rank))
            except ValueError as error:
                said.append(str(error))
            strategy.barrier()
    return said


def test_the_same_mistake_on_every_rank_keeps_its_class():
    assert run_distributed(_same_mistake_everywhere, 2) == [['mistake 0', [0, 1], 'mistake 2']] * 2


def test_one_process_has_nothing_to_guard():
    with pytest.raises(ZeroDivisionError), NaiveStrategy(device='cpu').failure_guard():
        _ = 1 / 0


@pytest.mark.parametrize('collective', ['strategy.all_gather_object(rank)', 'torch.distributed.all_reduce(torch.ones(3))'])
def test_a_rank_that_does_not_come_is_named(collective):
    """Rank 1 sleeps in a function of its own while rank 0 waits; nobody raises, and no collective has an answer."""
    codes, texts, seconds = launch(f"""
        strategy.timeout_s = 10  # of the guard alone: joining the group under load may take longer

        def busy_elsewhere():
            time.sleep(50)

        with strategy.failure_guard():
            strategy.barrier()
            strategy.note_progress('before learning of phase 3')
            print('ready', time.time(), flush=True)
            if rank == 1:
                busy_elsewhere()
            {collective}
    """)
    assert codes == [1, 1], texts
    for text in texts:
        assert 'no progress for 9 s (before learning of phase 3): rank 1 is in ' in text
        assert '(busy_elsewhere)' in text and 'Waiting: 0.' in text
    assert 8 < seconds < 30


@pytest.mark.parametrize('collective', ['strategy.all_reduce(torch.ones(3))', 'torch.distributed.all_reduce(torch.ones(3))'])
def test_it_is_named_before_the_collective_gives_up(collective):
    codes, texts, seconds = launch(f"""
        strategy.close()
        strategy = DDPStrategy(device='cpu', timeout_s=20)
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', time.time(), flush=True)
            if rank == 1:
                time.sleep(50)
            {collective}
    """)
    assert codes == [1, 1], texts
    assert 'no progress for 18 s' in texts[0] and 'rank 1 is in <string>' in texts[0] and 'Timed out' not in texts[0]
    assert 17 < seconds < 40


def test_a_frozen_rank_is_named_too():
    codes, texts, seconds = launch("""
        import os, signal
        strategy.timeout_s = 10  # of the guard alone: joining the group under load may take longer
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', time.time(), flush=True)
            if rank == 1:
                time.sleep(1)
                os.system(f'(sleep 25; kill -KILL {os.getpid()}) >/dev/null 2>&1 &')
                os.kill(os.getpid(), signal.SIGSTOP)
            strategy.all_reduce(torch.ones(3))
    """)
    assert codes[0] == 1
    assert 'rank 1 does not answer. Waiting: 0.' in texts[0]


def test_a_slow_rank_that_comes_in_time_is_let_be():
    codes, texts, _ = launch("""
        strategy.timeout_s = 30  # of the guard alone: joining the group under load may take longer
        with strategy.failure_guard():
            print('ready', time.time(), flush=True)
            if rank == 1:
                time.sleep(3)
            print('sum', strategy.all_reduce(torch.ones(1)).item())
    """)
    assert codes == [0, 0], texts
    assert all('sum 2.0' in text for text in texts)


def test_ranks_that_get_on_are_let_be():
    """Raw collectives one after another, for longer than the timeout, and nothing said of it: as a sharded model scores."""
    codes, texts, _ = launch("""
        import torch.distributed as dist
        strategy.timeout_s = 3
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', time.time(), flush=True)
            end, go = time.time() + 8, True
            while go:
                for _ in range(20):
                    dist.all_reduce(torch.ones(200_000))
                flag = torch.tensor([float(time.time() < end)])
                dist.broadcast(flag, src=0)
                go = bool(flag.item())
        print('well')
    """)
    assert codes == [0, 0], texts
