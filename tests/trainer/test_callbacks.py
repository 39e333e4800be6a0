"""The list of callbacks, metrics.jsonl, and callbacks that measure a run: evaluations, stopping, performance."""

from __future__ import annotations

import inspect
import json
import math
import os
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fake_trainer import FakeTrainer, experience
from ppo_on_ids import make, prompts

from chatgpt.trainer import callbacks as cb
from chatgpt.trainer.callbacks.base import metric_value
from chatgpt.trainer.callbacks.jsonl import json_safe
from chatgpt.trainer.callbacks.trackers import Tracker


class Recorder(cb.Callback):
    def __init__(self, name, log):
        self.name, self.log = name, log


HOOKS = {name: getattr(cb.Callback, name) for name in vars(cb.Callback) if name.startswith('on_')}


def test_every_hook_reaches_every_callback_with_its_arguments_and_does_nothing_by_default():
    assert len(HOOKS) > 12
    for hook, method in HOOKS.items():
        log = []
        spy = type('Spy', (Recorder,), {hook: lambda self, *args, log=log: log.append((self.name, *args))})
        both = cb.CallbackList([spy('first', log), cb.Callback(), spy('second', log)])
        arguments = tuple(list(inspect.signature(method).parameters)[1:])
        assert getattr(both, hook)(*arguments) is None
        assert log == [('first', *arguments), ('second', *arguments)], hook


def test_order_puts_added_metrics_first_and_saves_last(tmp_path):
    orders = {'d': 1, 'b': 0, 'a': -1, 'c': 0}
    given = [type('Ordered', (Recorder,), {'order': order})(name, []) for name, order in orders.items()]
    assert [c.name for c in cb.CallbackList(given)] == ['a', 'b', 'c', 'd']
    chosen = [cb.SaveCheckpoint(tmp_path), cb.MetricsWriter(), cb.EarlyStopping('x', above=1), cb.Evaluator(dict)]
    names = [type(c).__name__ for c in cb.CallbackList(chosen)]
    assert names == ['Evaluator', 'MetricsWriter', 'EarlyStopping', 'SaveCheckpoint']


def test_states_load_into_their_callbacks_and_others_are_ignored():
    def make():
        first, second = (cb.EarlyStopping(name, above=1, patience=9) for name in 'ab')
        return [first, cb.MetricsWriter(), second]

    old = cb.CallbackList(make())
    old.callbacks[0].num_bad, old.callbacks[2].num_bad = 3, 5
    state = json.loads(json.dumps(old.state_dict()))
    new = cb.CallbackList([cb.Callback(), *make(), cb.EarlyStopping('c', above=1)])
    new.load_state_dict(state | {'Gone.0': {'x': 1}})
    assert [c.num_bad for c in new if isinstance(c, cb.EarlyStopping)] == [3, 5, 0]


def test_an_object_that_is_no_callback_is_refused_by_position():
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


def test_an_incomplete_last_line_is_truncated_and_not_read(tmp_path):
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


def test_a_file_that_cannot_be_opened_is_a_warning(tmp_path):
    """In a stepwise run, which opens its files in the first phase."""
    trainer = FakeTrainer([cb.MetricsWriter()], tmp_path / 'file' / 'run')
    (tmp_path / 'file').write_text('in the way')
    with pytest.warns(UserWarning, match='metrics.jsonl: step 1 could not be written'):
        trainer.run_phase({'x': 1.0})
    (tmp_path / 'file').unlink()
    trainer.run_phase({'x': 2.0})
    path = tmp_path / 'file' / 'run' / 'metrics.jsonl'
    assert cb.read_jsonl(path) == [{'step': 2, 'x': 2.0}]


def test_metrics_on_a_full_disk_are_a_warning(tmp_path, monkeypatch):
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


def test_evaluation_before_during_and_after_joins_the_metrics_and_remembers_the_best(tmp_path, capsys):
    values = iter([0.1, 0.7, 0.4, 0.6])
    evaluator = cb.Evaluator(lambda trainer: {'win': next(values)}, interval=2, metric='win')
    FakeTrainer([cb.MetricsWriter(), evaluator], tmp_path).fit([{} for _ in range(5)])
    found = [(r['step'], r['eval/win'], r['eval/win_best']) for r in cb.read_jsonl(tmp_path / 'eval.jsonl')]
    assert found == [(0, 0.1, 0.1), (2, 0.7, 0.7), (4, 0.4, 0.7), (5, 0.6, 0.7)]
    assert [r.get('eval/win') for r in cb.read_jsonl(tmp_path / 'metrics.jsonl')] == [None, 0.7, None, 0.4, None]
    assert (evaluator.best, evaluator.best_step) == (0.7, 2)
    shown = capsys.readouterr().out
    assert 'evaluation before training  eval/win 0.1' in shown and 'evaluation after phase 5  eval/win 0.6' in shown
    # with mode 'min' the smallest is best; a NaN never is
    values = iter([3.0, math.nan, 2.0, 5.0])
    settings = {'interval': 1, 'before': False, 'metric': 'eval/loss', 'mode': 'min'}
    evaluator = cb.Evaluator(lambda trainer: {'eval/loss': next(values)}, **settings)
    FakeTrainer([evaluator]).fit([{}] * 4)
    assert (evaluator.best, evaluator.best_step) == (2.0, 3)


def test_a_resumed_run_keeps_its_best_and_does_not_evaluate_before():
    evaluator = cb.Evaluator(lambda trainer: {'win': 0.3}, interval=1, metric='win')
    trainer = FakeTrainer([evaluator], num_phases=3)
    trainer.callbacks.load_state_dict({'Evaluator.0': {'best': 0.9, 'best_step': 2, 'last_step': 2}})
    trainer.phase = 2
    trainer.callbacks.on_fit_start(trainer)
    assert evaluator.last == {}
    trainer.run_phase({})
    assert evaluator.best == 0.9 and evaluator.last == {'eval/win': 0.3, 'eval/win_best': 0.9}


def test_two_evaluations_in_one_file_keep_that_before_training(tmp_path):
    (tmp_path / 'eval.jsonl').write_text('{"step": 0, "eval/old": 1}\n')
    statuses = []

    def evaluate(name: str) -> dict[str, float]:
        statuses.append(json.loads((tmp_path / 'run.json').read_text())['status'])
        return {name: 1.0}

    pair = [cb.Evaluator(lambda trainer, name=name: evaluate(name), interval=5) for name in ('x', 'y')]
    make(callbacks=pair, run_dir=tmp_path, max_epochs=1).fit(prompts(), 1, 2, 1)
    assert statuses == ['running'] * 4 and json.loads((tmp_path / 'run.json').read_text())['status'] == 'ended'
    rows = [(row['step'], *(name for name in row if name != 'step')) for row in cb.read_jsonl(tmp_path / 'eval.jsonl')]
    assert rows == [(0, 'eval/x'), (0, 'eval/y'), (2, 'eval/x'), (2, 'eval/y')]
    assert 'eval/old' in (tmp_path / 'eval.previous.jsonl').read_text()


def test_a_finished_run_is_not_evaluated_again(tmp_path):
    def trainer() -> FakeTrainer:
        return FakeTrainer([cb.Evaluator(lambda t: {'win': 1.0}, interval=5)], tmp_path, num_phases=3)

    first = trainer()
    first.fit([{}] * 3)
    again = trainer()
    again.phase = 3
    again.callbacks.load_state_dict(
        {'Evaluator.0': {'best': None, 'best_step': None, 'last_step': 0, 'names': ['eval/win']}}
    )
    again.callbacks.on_fit_start(again)
    again.callbacks.on_fit_end(again)
    assert [row['step'] for row in cb.read_jsonl(tmp_path / 'eval.jsonl')] == [0, 3]
    (evaluator,) = again.callbacks
    assert evaluator.last == {'eval/win': 1.0}
    evaluator.load_state_dict({'best': None, 'best_step': None, 'last_step': 0, 'names': ['eval/other']})
    again.callbacks.on_fit_start(again)
    again.callbacks.on_fit_end(again)  # the other's results are not there
    assert [row['step'] for row in cb.read_jsonl(tmp_path / 'eval.jsonl')] == [0, 3, 3]


def test_a_misspelt_metric_of_evaluation_is_a_warning():
    with pytest.warns(
        UserWarning, match="no evaluation of this phase measured 'eval/wni'; if it is misspelt, did you mean eval/win"
    ):
        assert metric_value({'eval/win': 1.0}, 'eval/wni') is None
    with pytest.warns(UserWarning, match='did you mean eval/score_mean'):
        assert metric_value({'eval/score_mean': 1.0}, 'eval/score_maen') is None


def test_an_evaluation_without_the_tracked_metric_or_numbers_is_refused():
    with pytest.raises(ValueError, match="no 'eval/win'; it returned eval/loss"):
        FakeTrainer([cb.Evaluator(lambda trainer: {'loss': 1.0}, metric='win')]).fit([])
    with pytest.raises(ValueError, match='must return a dict'):
        FakeTrainer([cb.Evaluator(lambda trainer: 3.0)]).fit([])
    with pytest.raises(ValueError, match='must be a function'):
        cb.Evaluator({'win': 1.0})


def stopped_after(values, patience=1, **bounds):
    trainer = FakeTrainer([cb.EarlyStopping('eval/m', patience=patience, **bounds)], num_phases=len(values))
    trainer.fit([{} if v is None else {'eval/m': v} for v in values])
    return trainer.phase if trainer.stop else None


def test_stopping_needs_consecutive_phases_beyond_the_bound(capsys):
    assert stopped_after([1, 6, 6, 1, 6, 6, 6, 1], above=5.0, patience=3) == 7
    assert 'stopping after phase 7: eval/m is 6, above 5 in 3 phases in a row' in capsys.readouterr().out
    assert stopped_after([5, 5, 5], above=5.0) is None  # on the bound is within it
    assert stopped_after([5, 4.9], below=5.0) == stopped_after([0.0, 3.0], above=2.0, below=-2.0) == 2
    assert stopped_after([0.0, math.nan], above=2.0) == stopped_after([0.0, math.nan], below=-2.0) == 2
    # phases without an evaluation neither count nor break the row
    assert stopped_after([2.0, None, 2.0, None], above=1.0, patience=2) == 3


def test_bad_bounds_and_names_are_refused():
    with pytest.raises(ValueError, match='has no bound'):
        cb.EarlyStopping('m')
    with pytest.raises(ValueError, match='below=3.0 must be smaller than above=1.0'):
        cb.EarlyStopping('m', above=1.0, below=3.0)
    with pytest.raises(ValueError, match="no metric 'rollout/kl'"):
        FakeTrainer([cb.EarlyStopping('rollout/kl', above=1.0)]).fit([{'rollout/kl_mean': 1.0}])


def test_flop_match_the_formulas():
    """Two sequences, 2 + 3 and 4 + 2 tokens: 11 tokens, of which 11 − 2 are inputs of the decoder."""
    records = [experience(0, [1, 1], [1, 1, 1], 0.0), experience(1, [1, 1, 1, 1], [1, 1], 0.0)]
    flop = cb.PerformanceEvaluator(100, 30, 20, 10).phase_flop(records, passes=2.0)
    assert flop == {'collect': 2 * 100 * 9, 'score': 2 * 60 * 11, 'learn': 2 * 6 * 130 * 11}
    with_actor = cb.PerformanceEvaluator(100, 30, 20, 10).phase_flop(records, passes=2.0, recompute_logprobs=True)
    assert with_actor['score'] == 2 * 160 * 11
    checkpointed = cb.PerformanceEvaluator(100, 30, 20, 10, True, frozen_share=1.0).phase_flop(records, passes=1.0)
    assert checkpointed['learn'] == (2 + 2 + 0 + 2) * 130 * 11


@pytest.mark.parametrize(
    ('batches', 'settings', 'passes'),
    [
        (6, {}, 2.0),  # 5 samples in batches of 2 are 3 batches a pass
        (4, {}, 4 / 3),  # stopped early in the second pass
        (2, {'buffer_limit': 4}, 4 / 5),  # one pass over the 4 that the buffer held of 5
        (3, {'sample_replay_buffer': True}, 6 / 5),  # three batches of 2 sampled from 5
    ],
)
def test_passes_are_counted_from_train_batches(batches, settings, passes):
    evaluator = cb.PerformanceEvaluator(10**9, 0, 0, 0)
    trainer = FakeTrainer([evaluator], train_batch_size=2, **settings)
    trainer.last_experiences = [experience(i, [1], [1, 1, 1], 0.0) for i in range(5)]
    metrics = {'perf/collect_s': 2.0, 'perf/score_s': 0.0, 'perf/learn_s': 4.0}
    trainer.fit([metrics], batches=batches)
    assert metrics['perf/collect_tflops'] == pytest.approx(2 * 10**9 * 15 / 2 / 1e12)
    assert metrics['perf/learn_tflops'] == pytest.approx(passes * 6 * 10**9 * 20 / 4 / 1e12)
    assert metrics['perf/total_tflops'] == pytest.approx((2 * 10**9 * 15 + passes * 6 * 10**9 * 20) / 6 / 1e12)
    assert metrics['perf/samples_per_s'] == pytest.approx(5 / 6)
    assert 'perf/score_tflops' not in metrics


def test_the_summary_leaves_out_the_first_phases(capsys):
    trainer = FakeTrainer([cb.PerformanceEvaluator(10**12, 0, 0, 0, ignore_phases=1)], train_batch_size=1)
    slow, fast = ({'perf/collect_s': s, 'perf/learn_s': s} for s in (100.0, 1.0))
    trainer.fit([slow, fast])
    # one sample of 2 + 3 tokens: collect 2 · 4, learn 6 · 5 TFLOP, in a second each
    assert capsys.readouterr().out.strip() == 'performance: 0.5 samples/s, 19 TFLOPS per device (collect 8, learn 30)'
    first, second = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=True)
    second.weight = first.weight
    assert cb.num_parameters(torch.nn.Sequential(first, second)) == 12 + 4  # shared parameters count once


def test_a_critic_with_passes_of_its_own_counts_apart():
    records = [experience(i, [1], [1, 1, 1], 0.0) for i in range(4)]
    evaluator = cb.PerformanceEvaluator(100, 30, 0, 0)
    together = evaluator.phase_flop(records, passes=2.0)['learn']
    assert evaluator.phase_flop(records, passes=2.0, critic_passes=2.0)['learn'] == together == 2 * 6 * 130 * 16
    assert evaluator.phase_flop(records, passes=2.0, critic_passes=3.0)['learn'] == (2 * 100 + 3 * 30) * 6 * 16


def test_learning_is_counted_by_the_batches_that_ran():
    """Tokens, and FLOP of a critic with passes of its own, which learn as much as passes together."""

    def learned(**settings: Any) -> tuple[float, float]:
        trainer = make(callbacks=[cb.PerformanceEvaluator(10**6, 10**6, 0, 0)], max_epochs=1, **settings)
        metrics = first_phase(trainer)
        return tuple(
            metrics[f'perf/{name}'] * metrics['perf/learn_s'] for name in ('learn_tokens_per_s', 'learn_tflops')
        )

    together, apart, sampled = learned(), learned(critic_epochs=1), learned(sample_replay_buffer=True)
    assert apart[1] == pytest.approx(together[1], rel=1e-3)
    assert apart[0] == pytest.approx(2 * together[0], rel=1e-3)  # each model reads every token
    assert sampled[0] < 0.9 * together[0]  # one of two batches


def first_phase(trainer: Any) -> dict[str, float]:
    trainer.set_prompts(prompts())
    with pytest.raises(ValueError, match='there is none: give num_timesteps'):
        trainer.collect()
    trainer.collect(1)
    return trainer.learn()


def test_a_tracker_logs_phases_without_a_fit(tmp_path):
    class Mine(Tracker):
        logged: ClassVar[list[Any]] = []

        def start(self, trainer: Any, run_id: str | None) -> Any:
            self.logged.append('start')
            return self, None

        def log(self, metrics: Any, rows: Any, step: int) -> None:
            self.logged.append(step)

        def finish(self, *, failed: bool) -> None:
            self.logged.append('end')

    first_phase(make(callbacks=[Mine()]))
    assert Mine.logged == ['start', 1]
