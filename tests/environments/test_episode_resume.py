"""A run that stops within an episode resumes with bitwise equal results; an environment that does not repeat itself is
reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path

import episode_runs
import pytest
import torch
from episode_runs import fit, left, make
from limits import until
from small_environments import Clocked, Interrupts, Letters

from chatgpt.environments import EnvironmentSettings
from chatgpt.strategies import DDPStrategy
from chatgpt.strategies.checkpoint import CheckpointReader
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks import Callback

LINE = re.compile(r'Clocked answers differently when it is played again.*: sample (\d+), turn (\d+): (.*)')


@pytest.fixture(autouse=True)
def _counts_begin_anew():
    Letters.num_steps, Letters.at = 0, None
    yield
    Letters.num_steps, Letters.at = 0, None


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp('episodes') / 'straight'
    Letters.num_steps, Letters.at = 0, None
    fit(make(folder))
    assert Letters.num_steps == 72
    return left(folder)


def stop_in_a_step(folder, environment, at, settings=None):
    """Sends SIGTERM from within a step: the phase is dropped, and a checkpoint written."""
    environment.num_steps, environment.at = 0, at
    with pytest.raises(SystemExit) as stopped:
        fit(make(folder, environment, settings=settings))
    assert stopped.value.code == 143
    environment.at = None


def resumed(folder, environment, settings=None):
    trainer = make(folder, environment, settings=settings)
    assert trainer.load_checkpoint('auto')
    fit(trainer)
    return trainer


@pytest.mark.parametrize('at', [5, 29])
def test_stopped_within_an_episode(undisturbed, tmp_path, at):
    stop_in_a_step(tmp_path, Letters, at)
    assert len((tmp_path / 'metrics.jsonl').read_text().splitlines() if at > 24 else []) == at // 24
    journal = journal_of(tmp_path)
    # the timestep of the stop request
    assert sorted(map(int, journal)) == ([8, 9, 10, 11] if at == 29 else [0, 1, 2, 3])
    assert all(len(entries) == 4 for entries in journal.values()), 'reset and three turns'
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        resumed(tmp_path, Letters)
    assert left(tmp_path) == undisturbed and journal_of(tmp_path) == {}


def journal_of(folder):
    with CheckpointReader(max((folder / 'checkpoints').glob('step-*'))) as reader:
        return reader.json()['trainer']['journal']


def test_in_worker_processes_it_is_the_same_run(undisturbed, tmp_path):
    settings = EnvironmentSettings(max_turn_tokens=4, workers='processes', num_workers=2)
    fit(make(tmp_path, settings=settings))
    assert left(tmp_path) == undisturbed


def on_two_ranks(folder):
    """Stops within an episode of rank 1 and resumes; returns the results of the ranks' runs and their warnings."""
    with DDPStrategy(seed=3, device='cpu') as strategy:
        ends, warned = [], []
        for environment, stopped in ((Letters, False), (Letters, True), (Clocked, True)):
            trainer = make(None, environment, strategy=strategy, num_samples_per_prompt=1)
            environment.num_steps = 0
            # each rank has 3 steps per timestep, 6 per phase
            environment.at = 8 if stopped and strategy.rank == 1 else None
            environment.do = staticmethod(trainer.request_stop)
            fit(trainer, phases=2)
            environment.at = None
            if stopped:
                assert trainer.phase == 1, 'both ranks have dropped the phase'
                path = trainer.save_checkpoint(f'{folder}/{environment.__name__}')
                trainer = make(None, environment, strategy=strategy, num_samples_per_prompt=1)
                trainer.load_checkpoint(path)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter('always')
                    fit(trainer, phases=2)
                warned.append([found.groups() for w in caught if (found := LINE.match(str(w.message)))])
            ends.append(torch.cat([p.detach().flatten() for p in strategy.unwrap(trainer.actor).parameters()]))
        return torch.equal(ends[0], ends[1]), warned


def test_on_two_ranks(tmp_path):
    # Each rank plays its own samples; those of the timestep are 4 and 5.
    for (same, (repeated, differs)), sample in zip(run_distributed(on_two_ranks, 2, str(tmp_path)), '45', strict=True):
        assert same and repeated == []
        ((named, turn, beginnings),) = differs  # one warning, and the run continues
        assert (named, turn) == (sample, '2')
        assert re.fullmatch(r"'<\d{5,}>' before, '<\d{5,}>' now; let it follow from its seed .*", beginnings)


def test_another_environment_is_reported(tmp_path):
    stop_in_a_step(tmp_path, Letters, 29)
    settings = EnvironmentSettings(max_turn_tokens=4, max_turns=2, num_workers=1)
    with pytest.warns(UserWarning) as caught:
        resumed(tmp_path, Letters, settings)
    warned = [str(w.message) for w in caught]
    assert any('environment.max_turns 16 → 2' in line for line in warned)
    assert not any('differently' in line for line in warned), 'what has changed is not the environment'


@pytest.mark.system
def test_killed_within_an_episode(undisturbed, tmp_path):
    """SIGKILL in a step of the second phase, then a resume from the checkpoint of the first."""
    root = Path(episode_runs.__file__).parents[2]
    env = os.environ | {'PYTHONPATH': str(root)}
    program = [sys.executable, episode_runs.__file__, str(tmp_path)]
    assert subprocess.run([*program, '29'], env=env).returncode == -9
    assert subprocess.run(program, env=env).returncode == 0
    assert left(tmp_path) == undisturbed


def workers():
    found = []
    for task in Path('/proc/self/task').iterdir():
        with suppress(FileNotFoundError):  # the thread has ended
            found += (task / 'children').read_text().split()
    return found


def settings(kind):
    return EnvironmentSettings(max_turn_tokens=4, workers=kind, num_workers=2, step_timeout_s=600)


class Watch(Callback):
    """Counts worker processes during the run, and may raise."""

    def __init__(self, raises=False):
        self.seen, self.raises = 0, raises

    def on_phase_end(self, trainer, phase, metrics):
        self.seen = len(workers())
        if self.raises:
            raise RuntimeError('a callback')


@pytest.mark.parametrize(('kind', 'raises'), [('threads', True), ('processes', True), ('processes', False)])
def test_nothing_is_left(kind, raises):
    threads, files, own = threading.active_count(), len(os.listdir('/proc/self/fd')), workers()
    watch = Watch(raises)
    trainer = make(None, Letters, settings=settings(kind), callbacks=[watch])
    with pytest.raises(RuntimeError, match='a callback') if raises else nullcontext():
        fit(trainer)
    assert watch.seen - len(own) == (2 if kind == 'processes' else 0), 'they stay from phase to phase'
    assert workers() == own and len(os.listdir('/proc/self/fd')) <= files
    until(lambda: threading.active_count() <= threads, threading.enumerate)


@pytest.mark.parametrize('kind', ['threads', 'processes'])
def test_ctrl_c_twice_does_not_wait_for_a_step(kind):
    """The first requests a stop at the next safe point, which a hanging step delays; the second stops at once."""
    own = workers()
    one = {'experience_batch_size': 1, 'num_samples_per_prompt': 1, 'train_batch_size': 1}
    trainer = make(None, Interrupts, settings=settings(kind), **one)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    assert workers() == own
