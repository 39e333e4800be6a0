"""A script's ranks are guarded from the moment they have joined: loading and preparing included."""

from __future__ import annotations

from scripts_on_ranks import run_source

SCRIPT = """
import time, torch
from types import SimpleNamespace
from chatgpt.launch.arguments import strategy_of
run = SimpleNamespace(strategy='ddp', seed=1, precision='fp32', trust_remote_code=False, rank_timeout_s=20.0)
with strategy_of(run) as strategy:
    strategy.barrier()
    late = time.monotonic()
    if strategy.rank == 1:
        {what}
    strategy.prepare(torch.nn.Linear(3, 3))
"""


# Rank 1 does not come, and seconds of rank 0's patience pass in tenths of a second.
HANGS = 'time.sleep(3600)\n    strategy.ranks.whereabouts.clock = lambda: 10 * time.monotonic() - 9 * late'


def test_a_rank_that_fails_while_it_loads():
    results = run_source(SCRIPT.format(what="raise OSError('a torn file')"))
    assert [code for code, _ in results] == [1, 1]
    assert 'stopped, because rank 1 failed: OSError: a torn file' in results[0][1]


def test_a_rank_that_hangs_while_it_loads():
    results = run_source(SCRIPT.format(what=HANGS))
    assert [code for code, _ in results] == [1, 1]
    for _, text in results:
        assert 'no progress for 18 s (before the run): rank 1 is in ' in text and 'Waiting: 0.' in text
