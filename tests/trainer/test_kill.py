"""A run that is killed at random moments and started again ends with the bits of one that was not."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from killed_runs import finished, metrics, start

from chatgpt.strategies.checkpoint import CheckpointReader, latest

pytestmark = pytest.mark.system


def done_phases(folder: Path) -> int:
    path = folder / 'metrics.jsonl'
    return path.read_text().count('\n') if path.is_file() else 0


def killed_many_times(
    folder: Path, kills: int, phases: int, seed: int, kind: str = 'NaiveStrategy', ranks: int = 1
) -> None:
    """Kill all ranks of a run at random moments of its saves and phases; every restart goes on from the newest whole
    checkpoint.

    A kill that came after the run's end counts for nothing: it is another attempt.
    """
    rng = random.Random(seed)
    undisturbed = finished(folder / 'straight', phases, kind, ranks)
    run, interrupted, resumed_from = folder / 'killed', 0, 0
    for _ in range(2 * kills):
        processes = start(run, phases, kind, ranks)
        output = processes[0].stdout
        assert output is not None
        assert next(line for line in output if line.startswith('ready')).strip() == f'ready {resumed_from}'
        enough = resumed_from + rng.randrange(phases // kills)
        while done_phases(run) < enough and processes[0].poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.1))
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
        interrupted += all(process.returncode == -signal.SIGKILL for process in processes)
        newest = latest(run / 'checkpoints')
        resumed_from = 0 if newest is None else CheckpointReader(newest).meta['phase']
        if interrupted == kills:
            break
    assert interrupted == kills
    assert finished(run, phases, kind, ranks) == undisturbed
    assert metrics(run) == metrics(folder / 'straight')
    assert [row['step'] for row in metrics(run)] == list(range(1, phases + 1))


def test_five_kills(tmp_path):
    killed_many_times(tmp_path, kills=5, phases=30, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kills', 'phases', 'kind', 'ranks'), [(20, 120, 'NaiveStrategy', 1), (5, 20, 'FSDPStrategy', 2)]
)
def test_many_kills(tmp_path, kills, phases, kind, ranks):
    killed_many_times(tmp_path, kills, phases, seed=1, kind=kind, ranks=ranks)
