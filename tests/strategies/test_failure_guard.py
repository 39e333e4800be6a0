"""The failure guard: an exception on one rank ends all ranks within seconds, with its message and a non-zero exit."""

from __future__ import annotations

import signal
import textwrap

import pytest
from scripts_on_ranks import run_source

from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.guard import STUCK_SHARE, FailureGuard, RankStatus
from chatgpt.testing.processes import run_distributed

HEAD = """
import os, sys, time, torch
import torch.distributed as dist
from chatgpt.strategies.ddp import DDPStrategy
strategy = DDPStrategy(device='cpu')
rank = strategy.rank
"""
HOURS = """
# The guard's clock is 0 until rank 1 sets 'asleep', then an hour passes in a second.
began, asleep = time.monotonic(), dist.distributed_c10d._get_default_store().clone()
strategy.ranks.status.clock = lambda: 3600 * (time.monotonic() - began) if asleep.check(['asleep']) else 0.0
strategy.ranks.status.note('before the run')
"""


def launch(body: str, head: str = '') -> tuple[list[int], list[str]]:
    """Runs a script on two ranks; returns exit codes and outputs."""
    results = run_source(HEAD + head + textwrap.dedent(body))
    texts = [text for _, text in results]
    assert any('ready' in text.splitlines() for text in texts), texts
    return [code for code, _ in results], texts


@pytest.mark.parametrize(
    ('failing', 'failure', 'other', 'message'),
    [
        (1, "raise KeyError('no such shelf')", 'strategy.all_reduce(torch.ones(3))', "KeyError: 'no such shelf'"),
        (0, "raise KeyError('no such shelf')", 'strategy.all_reduce(torch.ones(3))', "KeyError: 'no such shelf'"),
        (1, "sys.exit('out of paper')", 'time.sleep(3600)', 'SystemExit: out of paper'),  # busy with something else
    ],
)
def test_other_ranks_end_with_the_message(failing, failure, other, message):
    codes, texts = launch(f"""
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', flush=True)
            if rank == {failing}:
                {failure}
            {other}
            time.sleep(3600)
    """)
    assert codes == [1, 1], texts
    assert f'[rank {1 - failing}] stopped' in texts[1 - failing]
    assert f'because rank {failing} failed: {message}' in texts[1 - failing]
    assert message.split(': ')[1] in texts[failing] and ('Traceback' in texts[failing]) == ('KeyError' in message)


def test_waiting_for_generation_is_not_timed():
    codes, texts = launch(
        """
        from types import SimpleNamespace
        from chatgpt.rollout import Call, SamplingParams
        from chatgpt.trainer.collect import Collector
        from chatgpt.types import Prompt

        class Slow:
            environment, generator = None, None
            abilities = SimpleNamespace(answers_ahead=False, spans_ranks=False)

            def generate(self, call):
                if rank == 1:
                    asleep.set('asleep', '1')
                    time.sleep(1.5)
                    asleep.set('awake', '1')
                return [len(call.prompts)]

        passing = strategy.ranks.status.clock
        strategy.ranks.status.clock = lambda: 0.0 if asleep.check(['awake']) else passing()
        collector = Collector(strategy, Slow(), SamplingParams(max_new_tokens=2), policy=None)
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', flush=True)
            given = [Prompt(ids=torch.tensor([1]))]
            found = collector._timed(Call.of(given, collector.sampling, seed=0, indices=[0]))
            assert strategy.all_gather_object(found) == [[1], [1]]
            print('generated', collector.generating_s > 1, flush=True)
        """,
        HOURS,
    )
    assert codes == [0, 0], texts
    assert [text.splitlines()[-1] for text in texts] == ['generated False', 'generated True']


def test_a_rank_that_has_finished_learns_of_a_late_failure():
    codes, texts = launch("""
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', flush=True)
            if rank == 1:
                time.sleep(0.5)
                raise ValueError('late')
        print('left the guard')
    """)
    assert codes == [1, 1]
    assert 'RankFailure: rank 1 failed: ValueError: late' in texts[0]
    assert 'left the guard' not in texts[0] + texts[1]


def _same_mistake_everywhere():
    from chatgpt.strategies.ddp import DDPStrategy

    results = []
    with DDPStrategy(device='cpu') as strategy:
        for attempt in range(3):  # a guard can be entered again after a failure that all ranks handled
            try:
                with strategy.failure_guard(), strategy.failure_guard():
                    if attempt != 1:
                        raise ValueError(f'mistake {attempt}')
                    results.append(strategy.all_gather_object(strategy.rank))
            except ValueError as error:
                results.append(str(error))
            strategy.barrier()
    return results


def test_the_same_mistake_on_every_rank_keeps_its_class():
    assert run_distributed(_same_mistake_everywhere, 2) == [['mistake 0', [0, 1], 'mistake 2']] * 2


def test_one_process_has_nothing_to_guard():
    with pytest.raises(ZeroDivisionError), NaiveStrategy(device='cpu').failure_guard():
        _ = 1 / 0


def fake_guard(waits: bool) -> tuple[FailureGuard, RankStatus, list[float]]:
    """Returns a guard with a timeout of 100 s, its status, and a list [time, CPU time] that tests set."""
    time_and_use = [0.0, 0.0]
    here = RankStatus(clock=lambda: time_and_use[0])
    here.is_waiting = lambda: waits  # type: ignore[method-assign]
    here.cpu_s = lambda: time_and_use[1]  # type: ignore[method-assign]
    return FailureGuard(0, 2, timeout_s=100.0, status=here), here, time_and_use


def test_patience_ends_before_the_collective_does():
    guard, here, now = fake_guard(waits=True)
    assert not guard._is_stuck()
    now[0] = 100 * STUCK_SHARE - 0.1
    assert not guard._is_stuck()
    now[0] = 100 * STUCK_SHARE + 0.1
    assert guard._is_stuck() and now[0] < 100
    here.note('the next phase')
    assert not guard._is_stuck()


def test_a_collective_of_the_strategy_counts_from_its_own_start():
    guard, here, now = fake_guard(waits=False)
    now[0] = 500.0
    with here.waiting():
        now[0], now[1] = 500 + 100 * STUCK_SHARE - 0.1, 3.0
        assert not guard._is_stuck()
        now[0] += 0.2
        assert guard._is_stuck(), 'CPU time, as of polling threads, is no progress inside a collective of the strategy'
    assert not guard._is_stuck()


def test_a_main_thread_that_uses_the_processor_gets_on():
    """As while a sharded model scores: collectives of torch, for a long time, without a progress note."""
    guard, _, now = fake_guard(waits=True)
    for step in range(50):
        now[:] = [80.0 * step, 0.01 * step]
        assert not guard._is_stuck()
    now[0] += 100 * STUCK_SHARE + 0.1
    assert guard._is_stuck()


def test_a_main_thread_that_is_still_outside_a_collective_is_let_be():
    """It reads a file or sleeps; the ranks that wait for it report it."""
    guard, _, now = fake_guard(waits=False)
    for step in range(50):
        now[0] = 80.0 * step
        assert not guard._is_stuck()


@pytest.mark.parametrize('collective', ['strategy.all_gather_object(rank)', 'dist.all_reduce(torch.ones(3))'])
def test_a_rank_that_does_not_come_is_named(collective):
    """Rank 1 sleeps in a function while rank 0 waits; no rank raises, and no collective times out."""
    codes, texts = launch(
        f"""
        def busy_elsewhere():
            asleep.set('asleep', '1')
            time.sleep(3600)

        with strategy.failure_guard():
            strategy.barrier()
            strategy.note_progress('before learning of phase 3')
            print('ready', flush=True)
            if rank == 1:
                busy_elsewhere()
            {collective}
        """,
        head=HOURS,
    )
    assert codes == [1, 1], texts
    for text in texts:
        assert 'no progress for 1620 s (before learning of phase 3): rank 1 is in ' in text
        assert '(busy_elsewhere)' in text and 'Waiting: 0.' in text


@pytest.mark.system
def test_it_is_named_before_the_collective_gives_up():
    """Uses the real timeout of the collective."""
    codes, texts = launch("""
        strategy.close()
        strategy = DDPStrategy(device='cpu', timeout_s=20)
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', flush=True)
            if rank == 1:
                time.sleep(3600)
            strategy.all_reduce(torch.ones(3))
    """)
    assert codes == [1, 1], texts
    assert 'no progress for 18 s' in texts[0] and 'rank 1 is in <string>' in texts[0] and 'Timed out' not in texts[0]


def test_a_frozen_rank_is_named_too():
    codes, texts = launch(
        """
        import signal
        pids = strategy.all_gather_object(os.getpid())
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', flush=True)
            if rank == 1:
                os.system(f'(while kill -0 {pids[0]}; do sleep 0.2; done; kill -KILL {pids[1]}) >/dev/null 2>&1 &')
                asleep.set('asleep', '1')
                os.kill(os.getpid(), signal.SIGSTOP)
            strategy.all_reduce(torch.ones(3))
        """,
        head=HOURS,
    )
    assert codes == [1, -signal.SIGKILL], texts
    assert 'rank 1 does not answer. Waiting: 0.' in texts[0]


def test_ranks_that_get_on_are_let_be():
    """As while a sharded model scores: collectives of torch, for longer than the timeout, without a progress note."""
    codes, texts = launch("""
        strategy.ranks.timeout_s = 2
        with strategy.failure_guard():
            strategy.barrier()
            print('ready', flush=True)
            end, go = time.time() + 4, True
            while go:
                for _ in range(20):
                    dist.all_reduce(torch.ones(2_000))
                time.sleep(0.01)
                flag = torch.tensor([float(time.time() < end)])
                dist.broadcast(flag, src=0)
                go = bool(flag.item())
        print('well')
    """)
    assert codes == [0, 0], texts
