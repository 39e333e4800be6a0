"""The list of callbacks, and metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_trainer import FakeTrainer

from chatgpt.trainer import callbacks as cb
from chatgpt.trainer.callbacks.jsonl import json_safe


class Recorder(cb.Callback):
    def __init__(self, name, log):
        self.name, self.log = name, log


HOOKS = {name: getattr(cb.Callback, name) for name in vars(cb.Callback) if name.startswith('on_')}
ARGUMENTS = {
    'on_episode_start': (3,),
    'on_episode_end': (3,),
    'on_make_experience_end': ([],),
    'on_learn_epoch_start': (1,),
    'on_learn_epoch_end': (1,),
    'on_policy_output': ('batch', 'output'),
    'on_learn_batch_end': ({'a': 1.0},),
    'on_phase_end': (2, {'b': 1.0}),
    'on_log': ({}, {}, [1.0], ['query']),
    'on_checkpoint': (Path('x'),),
    'on_resume': (Path('x'),),
    'on_exception': (KeyError('k'),),
}


def test_every_hook_reaches_every_callback_with_its_arguments_and_does_nothing_by_default():
    assert len(HOOKS) > 12
    for hook in HOOKS:
        log = []
        spy = type('Spy', (Recorder,), {hook: lambda self, *args, log=log: log.append((self.name, *args))})
        both = cb.CallbackList([spy('first', log), cb.Callback(), spy('second', log)])
        arguments = ('trainer', *ARGUMENTS.get(hook, ()))
        assert getattr(both, hook)(*arguments) is None
        assert log == [('first', *arguments), ('second', *arguments)], hook


def test_order_puts_what_adds_metrics_first_and_what_saves_last(tmp_path):
    orders = {'d': 1, 'b': 0, 'a': -1, 'c': 0}
    given = [type('Ordered', (Recorder,), {'order': order})(name, []) for name, order in orders.items()]
    assert [c.name for c in cb.CallbackList(given)] == ['a', 'b', 'c', 'd']
    chosen = [cb.SaveCheckpoint(tmp_path), cb.MetricsWriter(), cb.EarlyStopping('x', above=1), cb.Evaluator(dict)]
    names = [type(c).__name__ for c in cb.CallbackList(chosen)]
    assert names == ['Evaluator', 'MetricsWriter', 'EarlyStopping', 'SaveCheckpoint']


def test_states_find_their_callback_again_and_strangers_are_left_alone():
    def make():
        first, second = (cb.EarlyStopping(name, above=1, patience=9) for name in 'ab')
        return [first, cb.MetricsWriter(), second]

    old = cb.CallbackList(make())
    old.callbacks[0].num_bad, old.callbacks[2].num_bad = 3, 5
    state = json.loads(json.dumps(old.state_dict()))
    new = cb.CallbackList([cb.Callback(), *make(), cb.EarlyStopping('c', above=1)])
    new.load_state_dict(state | {'Gone.0': {'x': 1}})
    assert [c.num_bad for c in new if isinstance(c, cb.EarlyStopping)] == [3, 5, 0]


def test_what_is_no_callback_is_refused_by_position():
    with pytest.raises(ValueError, match=r'callbacks\[1\] is the class MetricsWriter.*write MetricsWriter\(\.\.\.\)'):
        cb.CallbackList([cb.Callback(), cb.MetricsWriter])
    with pytest.raises(ValueError, match=r'callbacks\[0\] is a str'):
        cb.CallbackList(['wandb'])


def test_a_failing_on_exception_does_not_hide_the_error():
    log = []

    class Broken(cb.Callback):
        def on_exception(self, trainer, error):
            raise OSError('disk')

    class Last(cb.Callback):
        def on_exception(self, trainer, error):
            log.append(error)

    error = RuntimeError('the real one')
    with pytest.warns(UserWarning, match='Broken.on_exception failed: OSError: disk'):
        cb.CallbackList([Broken(), Last()]).on_exception(None, error)
    assert log == [error]


# ---------------------------------------------------------------- metrics.jsonl


def test_metrics_are_one_json_object_per_phase_with_step_and_null_for_what_is_not_finite(tmp_path):
    FakeTrainer([cb.MetricsWriter()], tmp_path / 'run').fit([{'a/x': 1.5}, {'a/x': math.nan, 'a/y': math.inf}])
    lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
    strict = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert strict == [{'step': 1, 'a/x': 1.5}, {'step': 2, 'a/x': None, 'a/y': None}]
    FakeTrainer([cb.MetricsWriter()], tmp_path / 'other', rank=1).fit([{'a': 1.0}])
    FakeTrainer([cb.MetricsWriter()]).fit([{'a': 1.0}])
    assert not (tmp_path / 'other').exists()
    odd = {'a': torch.tensor([1.0, math.nan]), 1: (np.float32(0.5), np.int64(3), True, 'ü')}
    assert json_safe(odd) == {'a': [1.0, None], '1': [0.5, 3, True, 'ü']}


@pytest.mark.parametrize('by_fit', [True, False])
def test_a_resume_cuts_back_to_its_step(tmp_path, by_fit):
    """In a new process, or in a stepwise run without fit."""
    first = FakeTrainer([cb.MetricsWriter()], tmp_path)
    resumed = FakeTrainer([cb.MetricsWriter()], tmp_path) if by_fit else first
    for i in range(5):
        first.run_phase({'a': float(i)})
    resumed.phase = 3
    if by_fit:
        resumed.fit([{'a': 30.0}])
    else:
        resumed.callbacks.on_resume(resumed, tmp_path)
        resumed.run_phase({'a': 30.0})
    kept = cb.read_jsonl(tmp_path / 'metrics.jsonl')
    assert [(r['step'], r['a']) for r in kept] == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 30.0)]


def test_a_torn_last_line_is_cut_and_counts_for_no_reader(tmp_path):
    file = cb.JsonLines(tmp_path / 'm.jsonl')
    file.append([{'step': 1}, {'step': 2}])
    with open(file.path, 'ab') as raw:
        raw.write(b'{"step": 3, "a": 1')
    assert [r['step'] for r in cb.read_jsonl(file.path)] == [1, 2]
    assert file.truncate_to(9) == len(b'{"step": 3, "a": 1')
    file.append([{'step': 3}])
    assert [r['step'] for r in cb.read_jsonl(file.path)] == [1, 2, 3]
    assert file.truncate_to(9) == 0 and file.truncate_to(0) > 0 and file.path.read_bytes() == b''


def test_a_new_run_in_an_old_folder_moves_the_old_lines_aside(tmp_path):
    FakeTrainer([cb.MetricsWriter()], tmp_path).fit([{'a': 1.0}, {'a': 2.0}])
    FakeTrainer([cb.MetricsWriter()], tmp_path).fit([{'a': 9.0}])
    assert [r['a'] for r in cb.read_jsonl(tmp_path / 'metrics.jsonl')] == [9.0]
    assert [r['a'] for r in cb.read_jsonl(tmp_path / 'metrics.previous.jsonl')] == [1.0, 2.0]


def test_a_file_that_cannot_be_begun_costs_a_line_and_not_the_run(tmp_path):
    """Of a trainer that is driven by hand, whose files begin with its first phase."""
    trainer = FakeTrainer([cb.MetricsWriter()], tmp_path / 'file' / 'run')
    (tmp_path / 'file').write_text('in the way')
    with pytest.warns(UserWarning, match='metrics.jsonl: step 1 could not be written'):
        trainer.run_phase({'x': 1.0})
    (tmp_path / 'file').unlink()
    trainer.run_phase({'x': 2.0})
    path = tmp_path / 'file' / 'run' / 'metrics.jsonl'
    assert cb.read_jsonl(path) == [{'step': 2, 'x': 2.0}]


def test_a_full_disk_costs_a_line_and_not_the_run(tmp_path, monkeypatch):
    trainer = FakeTrainer([cb.MetricsWriter()], tmp_path)
    trainer.callbacks.on_fit_start(trainer)
    trainer.run_phase({'a': 1.0})
    fsync = os.fsync

    def full(descriptor):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', full)
    with pytest.warns(UserWarning, match='step 2 could not be written .No space left'):
        trainer.run_phase({'a': 2.0})
    monkeypatch.setattr(os, 'fsync', fsync)
    trainer.run_phase({'a': 3.0})
    assert [r['step'] for r in cb.read_jsonl(tmp_path / 'metrics.jsonl')] == [1, 3]
