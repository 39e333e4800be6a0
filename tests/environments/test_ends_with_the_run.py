"""However a run ends, its environments end with it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from episode_runs import fit, make
from limits import until
from small_environments import Interrupts, Letters

from chatgpt.environments import EnvironmentSettings
from chatgpt.trainer.callbacks import Callback


def workers():
    found = []
    for task in Path('/proc/self/task').iterdir():
        try:
            found += (task / 'children').read_text().split()
        except FileNotFoundError:  # the thread has ended
            pass
    return found


def settings(kind):
    return EnvironmentSettings(max_turn_tokens=4, workers=kind, num_workers=2, step_timeout_s=600)


class Watch(Callback):
    """Counts worker processes while the run goes on, and may raise."""

    def __init__(self, raises=False):
        self.seen, self.raises = 0, raises

    def on_phase_end(self, trainer, phase, metrics):
        self.seen = len(workers())
        if self.raises:
            raise RuntimeError('a callback')


@pytest.mark.parametrize('raises', [False, True])
@pytest.mark.parametrize('kind', ['threads', 'processes'])
def test_nothing_is_left(kind, raises):
    threads, files, own = threading.active_count(), len(os.listdir('/proc/self/fd')), workers()
    watch = Watch(raises)
    trainer = make(None, Letters, settings=settings(kind), callbacks=[watch])
    if raises:
        with pytest.raises(RuntimeError, match='a callback'):
            fit(trainer)
    else:
        fit(trainer)
    assert watch.seen - len(own) == (2 if kind == 'processes' else 0), 'they stay from phase to phase'
    assert workers() == own and len(os.listdir('/proc/self/fd')) <= files
    until(lambda: threading.active_count() <= threads, threading.enumerate)


@pytest.mark.parametrize('kind', ['threads', 'processes'])
def test_ctrl_c_twice_does_not_wait_for_a_step(kind):
    """The first asks for a stop at the next safe point, which a step that hangs keeps away; the second ends at once."""
    own = workers()
    one = {'experience_batch_size': 1, 'num_samples_per_prompt': 1, 'train_batch_size': 1}
    trainer = make(None, Interrupts, settings=settings(kind), **one)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    assert workers() == own
