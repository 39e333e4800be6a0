"""Streams on real Ray actors: a worker and a trainer that are killed, several ranks. Each free run is followed again by
workers in this process, to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_runs import PHASES, check_counts, check_samples, cluster, fit, learned, make, on_ranks, stream_engine
from tiny_runs import weights

from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks import Callback
from chatgpt.trainer.checkpointing import schedules

pytest.importorskip('ray')
pytestmark = pytest.mark.system
HERE = Path(__file__).resolve().parent


class Disturbs(Callback):
    """Adds a worker after the first phase, and then kills the first one that is asked for samples."""

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if step > 1:
            return
        trainer.engine.add_worker()
        workers = trainer.engine.workers
        pids, submit = workers.ray.get([actor.pid.remote() for actor in workers.actors]), workers.submit

        def killing(worker: int, request: Any) -> Any:
            workers.submit = submit
            os.kill(pids[worker], signal.SIGKILL)
            return submit(worker, request)

        workers.submit = killing


def test_workers_serve_a_stream_beside_the_trainer_and_lose_nothing():
    with cluster() as address, stream_engine(address) as engine:
        free = make(Disturbs(), engine=engine)
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='rollout worker . died')
            fit(free)
        assert engine.num_replaced == 1 and engine.workers.num_workers == 3
    check_counts(free)
    again = fit(make(), schedule=free.collector.draws.queue.schedule)
    assert learned(again) == learned(free) and again.log.phases == free.log.phases
    assert torch.equal(weights(again), weights(free))


KILLED = """
import json, os, signal, sys
from pathlib import Path
from stream_runs import cluster, fit, learned, make, stream_engine
from chatgpt.trainer.callbacks import Callback, SaveCheckpoint
from chatgpt.trainer.stream import Stream

folder, kill = Path(sys.argv[1]), sys.argv[2] == 'kill'

class Writes(Callback):
    def on_phase_end(self, trainer, step, metrics):
        row = {'learned': learned(trainer)[-1], 'metrics': trainer.log.phases[-1]}
        with (folder / 'phases.jsonl').open('a') as file:
            file.write(json.dumps([step, row]) + '\\n')

receive = Stream._receive

def killing(stream, request):  # an answer arrives after the first checkpoint
    if kill and (folder / 'checkpoints' / 'step-00000001').is_dir():
        assert stream.open and stream.queue.entries
        os.kill(os.getpid(), signal.SIGKILL)
    receive(stream, request)

Stream._receive = killing
with cluster() as address, stream_engine(address) as engine:
    trainer = make(Writes(), SaveCheckpoint(interval=1, keep_last=9), engine=engine, run_dir=folder)
    print('resumed', trainer.load_checkpoint('auto'), trainer.phase)
    fit(trainer)
"""


def killed_run(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE)))
    environment = os.environ | {'PYTHONPATH': paths, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
    command = [sys.executable, '-c', KILLED, str(folder), what]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_trainer_that_is_killed_in_a_stream_goes_on_from_its_checkpoint(tmp_path):
    """SIGKILL while answers arrive. Phases of the run that is resumed have every prompt once, and the schedule of its
    last checkpoint is that of both parts: a run that follows it from the beginning, without a death, has their bits."""
    killed = killed_run(tmp_path, 'kill')
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = killed_run(tmp_path, 'resume')
    assert resumed.returncode == 0, resumed.stderr
    begun = int(next(line for line in resumed.stdout.splitlines() if line.startswith('resumed')).split()[-1])
    assert begun >= 1
    rows = [json.loads(line) for line in (tmp_path / 'phases.jsonl').read_text().splitlines()]
    kept = [row for step, row in rows[: rows.index(next(r for r in rows if r[0] == begun)) + 1]]
    kept += [row for step, row in rows[-(PHASES - begun) :]]
    found = [[tuple(sample) for sample in row['learned']] for row in kept]
    check_samples(found)
    last = tmp_path / 'checkpoints' / f'step-{PHASES:08d}'
    (schedule,) = schedules(last)
    again = fit(make(), schedule=schedule)
    assert learned(again) == found and again.log.phases == [row['metrics'] for row in kept]
    trained = make()
    trained.load_checkpoint(last)
    assert torch.equal(weights(again), weights(trained))


def test_two_ranks_have_actors_of_their_own(tmp_path):
    with cluster() as address:
        free = run_distributed(on_ranks, 2, str(tmp_path / 'free'), address, None)
    assert free[0] == free[1]
    check_samples(free[0][0])
    assert run_distributed(on_ranks, 2, str(tmp_path / 'again'), None, str(tmp_path / 'free')) == free
