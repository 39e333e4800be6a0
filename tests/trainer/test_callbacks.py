"""Callbacks against a fake trainer that only counts and calls its hooks."""

from __future__ import annotations

import json
import math
import os
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from chatgpt.checkpoint import CheckpointError, list_checkpoints
from chatgpt.trainer import callbacks as cb
from chatgpt.trainer.callbacks.jsonl import json_safe
from chatgpt.types import Experience


def experience(index: int, prompt: list[int], response: list[int], score: float, gap: float = 0.5, **more) -> Experience:
    """One record whose per-token KL to the initial model is `gap`."""
    n = len(response)
    zeros, ones = torch.zeros(n), torch.ones(n, dtype=torch.bool)
    return Experience(
        index=index, group=index, prompt_ids=torch.tensor(prompt), response_ids=torch.tensor(response), response_mask=ones,
        logprobs=zeros, filtered_logprobs=zeros, edge_distances=ones.float(), finish_reason='eos', score=score,
        old_logprobs=zeros, ref_logprobs=zeros - gap, values=zeros, kl=zeros + gap, rewards=zeros, advantages=zeros,
        returns=zeros,
        **more,
    )  # fmt: skip


class FakeTrainer:
    """Counts phases and drives the hooks as a real trainer does; its checkpoints are folders with a manifest."""

    def __init__(self, callbacks, run_dir=None, *, rank=0, num_phases=4, dtype=torch.float32, **config):
        self.strategy = types.SimpleNamespace(
            is_rank_0=rank == 0, rank=rank, world_size=1, dtype=dtype, device=torch.device('cpu')
        )
        self.config = types.SimpleNamespace(**config, to_dict=lambda: dict(config))
        self.callbacks = cb.CallbackList(callbacks)
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.num_phases = num_phases
        self.total_updates = None
        self.phase = 0
        self.tokenizer = None
        self.last_experiences = [experience(7, [3, 4], [5, 6, 1], 2.0, prompt_text='a b', response_text='c\nd')]
        self.stop = False
        self.disk_full = False

    @property
    def checkpoint_dir(self):
        return self.run_dir / 'checkpoints' if self.run_dir is not None else None

    def request_stop(self):
        self.stop = True

    def save_checkpoint(self, path=None, *, score=None):
        if self.disk_full:
            raise CheckpointError(f'{path}: could not be written (No space left on device)')
        path.mkdir(parents=True, exist_ok=True)
        state = {'phase': self.phase, 'callbacks': self.callbacks.state_dict()}
        (path / 'state.json').write_text(json.dumps(state))
        (path / 'manifest.json').write_text(json.dumps({'meta': {'score': score}}))
        self.callbacks.on_checkpoint(self, path)
        return path

    def load_checkpoint(self, path):
        state = json.loads((path / 'state.json').read_text())
        self.phase = state['phase']
        self.callbacks.load_state_dict(state['callbacks'])
        self.callbacks.on_resume(self, path)

    def run_phase(self, metrics, batches=1):
        self.callbacks.on_make_experience_start(self)
        self.callbacks.on_make_experience_end(self, self.last_experiences)
        self.callbacks.on_learn_epoch_start(self, 0)
        for _ in range(batches):
            self.callbacks.on_learn_batch_start(self)
            self.callbacks.on_learn_batch_end(self, {})
        self.callbacks.on_learn_epoch_end(self, 0)
        self.phase += 1
        self.callbacks.on_phase_end(self, self.phase, metrics)

    def fit(self, phases, batches=1):
        """Run the given metrics, a dict per phase, until a stop is asked for."""
        self.callbacks.on_fit_start(self)
        for metrics in phases:
            if self.stop:
                break
            self.run_phase(metrics, batches)
        self.callbacks.on_fit_end(self)


# ---------------------------------------------------------------- the list


class Recorder(cb.Callback):
    def __init__(self, name, log):
        self.name, self.log = name, log


HOOKS = {name: getattr(cb.Callback, name) for name in vars(cb.Callback) if name.startswith('on_')}
ARGUMENTS = {
    'on_episode_start': (3,), 'on_episode_end': (3,), 'on_make_experience_end': ([],), 'on_learn_epoch_start': (1,),
    'on_learn_epoch_end': (1,), 'on_learn_batch_end': ({'a': 1.0},), 'on_phase_end': (2, {'b': 1.0}),
    'on_log': ({}, {}, [1.0], ['query']), 'on_checkpoint': (Path('x'),), 'on_resume': (Path('x'),),
    'on_exception': (KeyError('k'),),
}  # fmt: skip


@pytest.mark.parametrize('hook', HOOKS)
def test_every_hook_reaches_every_callback_with_its_arguments_and_does_nothing_by_default(hook):
    log = []
    spy = type('Spy', (Recorder,), {hook: lambda self, *args: log.append((self.name, *args))})
    both = cb.CallbackList([spy('first', log), cb.Callback(), spy('second', log)])
    arguments = ('trainer', *ARGUMENTS.get(hook, ()))
    assert getattr(both, hook)(*arguments) is None
    assert log == [('first', *arguments), ('second', *arguments)]


def test_order_puts_what_adds_metrics_first_and_what_saves_last(tmp_path):
    log = []
    plain = type('Plain', (Recorder,), {})
    early = type('Early', (Recorder,), {'order': -1})
    late = type('Late', (Recorder,), {'order': 1})
    names = [c.name for c in cb.CallbackList([late('d', log), plain('b', log), early('a', log), plain('c', log)])]
    assert names == ['a', 'b', 'c', 'd']
    chosen = [cb.SaveCheckpoint(tmp_path), cb.MetricsWriter(), cb.EarlyStopping('x', above=1), cb.Evaluator(dict)]
    assert [type(c).__name__ for c in cb.CallbackList(chosen)] == [
        'Evaluator',
        'MetricsWriter',
        'EarlyStopping',
        'SaveCheckpoint',
    ]


def test_states_find_their_callback_again_and_strangers_are_left_alone():
    def make():
        return [cb.EarlyStopping('a', above=1, patience=9), cb.MetricsWriter(), cb.EarlyStopping('b', above=1, patience=9)]

    old = cb.CallbackList(make())
    old.callbacks[0].num_crossed, old.callbacks[2].num_crossed = 3, 5
    state = json.loads(json.dumps(old.state_dict()))
    new = cb.CallbackList([cb.Callback(), *make(), cb.EarlyStopping('c', above=1)])
    new.load_state_dict(state | {'Gone.0': {'x': 1}})
    assert [c.num_crossed for c in new if isinstance(c, cb.EarlyStopping)] == [3, 5, 0]


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


def test_json_safe_takes_tensors_and_numpy_apart():
    import numpy as np

    assert json_safe({'a': torch.tensor([1.0, math.nan]), 1: (np.float32(0.5), np.int64(3), True, 'ü')}) == {
        'a': [1.0, None],
        '1': [0.5, 3, True, 'ü'],
    }


def test_a_metric_named_step_cannot_be_lost_and_other_ranks_write_nothing(tmp_path):
    FakeTrainer([cb.MetricsWriter()], tmp_path / 'other', rank=1).fit([{'a': 1.0}])
    FakeTrainer([cb.MetricsWriter()]).fit([{'a': 1.0}])
    assert not (tmp_path / 'other').exists()


def test_a_resume_cuts_back_to_its_step(tmp_path):
    FakeTrainer([cb.MetricsWriter()], tmp_path).fit([{'a': float(i)} for i in range(5)])
    resumed = FakeTrainer([cb.MetricsWriter()], tmp_path)
    resumed.phase = 3
    resumed.fit([{'a': 30.0}])
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


def test_a_stepwise_run_without_fit_writes_too_and_goes_on_after_a_resume(tmp_path):
    writer = cb.MetricsWriter()
    trainer = FakeTrainer([writer], tmp_path)
    for i in range(3):
        trainer.run_phase({'a': float(i)})
    trainer.phase = 1
    writer.on_resume(trainer, tmp_path)
    trainer.run_phase({'a': 11.0})
    assert [(r['step'], r['a']) for r in cb.read_jsonl(tmp_path / 'metrics.jsonl')] == [(1, 0.0), (2, 11.0)]


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


# ---------------------------------------------------------------- what is shown


def test_lines_where_there_is_no_terminal(capsys):
    trainer = FakeTrainer([cb.ProgressBar()], num_phases=2)
    trainer.fit([{'rollout/score_mean': 0.123456, 'rollout/kl_mean': 2.0}, {'sft/loss': 3.5, 'other': 1.0}])
    out = capsys.readouterr()
    assert out.out.splitlines() == ['phase 1/2  score 0.1235  kl 2', 'phase 2/2  loss 3.5']
    assert out.err == ''


def test_bars_show_phases_with_numbers_and_go_on_where_a_run_was_resumed(capsys):
    trainer = FakeTrainer([cb.ProgressBar(bars=True)], num_phases=5)
    trainer.phase, trainer.total_updates = 3, 10
    trainer.fit([{'rollout/score_mean': 0.25}, {'rollout/score_mean': 0.75}], batches=2)
    out = capsys.readouterr()
    assert '3/5' in out.err and '5/5' in out.err and 'score=0.75' in out.err
    assert 'learn' in out.err and 'collect' in out.err
    assert out.out == ''


def test_progress_is_silent_on_other_ranks_and_when_disabled(capsys):
    FakeTrainer([cb.ProgressBar(bars=True)], rank=1).fit([{'sft/loss': 1.0}])
    FakeTrainer([cb.ProgressBar()], rank=1).fit([{'sft/loss': 1.0}])
    FakeTrainer([cb.ProgressBar(enabled=False)]).fit([{'sft/loss': 1.0}])
    FakeTrainer([cb.ProgressBar(enabled=False, bars=True)]).fit([{'sft/loss': 1.0}])
    assert capsys.readouterr() == ('', '')


def test_an_exception_closes_the_bars():
    bar = cb.ProgressBar(bars=True)
    trainer = FakeTrainer([bar])
    trainer.callbacks.on_fit_start(trainer)
    trainer.callbacks.on_make_experience_start(trainer)
    shown = [bar._phases, bar._inner]
    trainer.callbacks.on_exception(trainer, KeyboardInterrupt())
    assert bar._phases is None and bar._inner is None and all(b.disable for b in shown)


def test_sample_table_is_printed_and_written_every_n_phases_the_first_and_the_last(tmp_path, capsys):
    trainer = FakeTrainer([cb.SampleTable(every=3, num_rows=2)], tmp_path, num_phases=4)
    trainer.last_experiences = [
        experience(7, [3, 4], [5, 6, 1], 2.0, gap=0.5, prompt_text='a b', response_text='c\nd'),
        experience(8, [3], [9, 1], -1.0, gap=0.0),
        experience(9, [3], [9, 1], 5.0),
    ]
    trainer.fit([{}] * 4)
    rows = cb.read_jsonl(tmp_path / 'samples.jsonl')
    assert [r['step'] for r in rows] == [1, 1, 3, 3, 4, 4]
    assert rows[0] == {
        'step': 1,
        'index': 7,
        'prompt': 'a b',
        'response': 'c\nd',
        'score': 2.0,
        'kl': 1.5,
        'num_tokens': 3,
        'ended': True,
    }
    assert (rows[1]['prompt'], rows[1]['response'], rows[1]['score']) == ('3', '9 1', -1.0)  # ids where there is no tokenizer
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'samples of phase 1' and lines[1].split() == ['score', 'kl', 'prompt', 'response']
    assert lines[3].split() == ['2.000', '1.500', 'a', 'b', 'c⏎d']
    assert sum(line.startswith('samples of phase') for line in lines) == 3


def test_table_cuts_long_texts_and_keeps_columns_aligned():
    text = cb.format_table([{'a': 'x' * 50, 'b': 1.0}, {'a': 'y', 'b': -22.5}], ('a', 'b'), width=10)
    assert text.splitlines() == ['a           b', '----------  -------', 'xxxxxxxxx…  1.000', 'y           -22.500']


def test_a_small_negative_number_is_no_negative_zero(capsys):
    assert cb.format_table([{'a': -0.0002}, {'a': -0.0}, {'a': -0.0006}], ('a',)).splitlines()[2:] == ['0.000', '0.000', '-0.001']
    FakeTrainer([cb.ProgressBar(bars=False)]).fit([{'rollout/kl_mean': -0.0}])
    assert 'kl 0' in capsys.readouterr().out


def test_log_stats_shows_the_columns_asked_for(tmp_path, capsys):
    trainer = FakeTrainer([cb.SampleTable(num_rows=2)], tmp_path)
    trainer.phase = 3
    batch = {'query': ['q1', 'q2', 'q3'], 'response': ['r1', 'r2', 'r3'], 'secret': [1, 2, 3]}
    trainer.callbacks.on_log(trainer, {}, batch, [0.5, 1.5, 2.5], ['query', 'response', 'absent'])
    rows = cb.read_jsonl(tmp_path / 'samples.jsonl')
    assert rows == [
        {'step': 3, 'query': 'q1', 'response': 'r1', 'reward': 0.5},
        {'step': 3, 'query': 'q2', 'response': 'r2', 'reward': 1.5},
    ]
    assert capsys.readouterr().out.splitlines()[1].split() == ['reward', 'query', 'response']


# ---------------------------------------------------------------- optional loggers


def test_tensorboard_holds_every_metric_and_a_resume_hides_what_it_undid(tmp_path):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    FakeTrainer([cb.TensorBoard()], tmp_path).fit([{'ppo/x': 1.0}, {'ppo/x': 2.0}, {'ppo/x': 3.0}])
    resumed = FakeTrainer([cb.TensorBoard()], tmp_path)
    resumed.phase = 1
    resumed.fit([{'ppo/x': 20.0}])
    events = EventAccumulator(str(tmp_path / 'tensorboard'))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars('ppo/x')] == [(1, 1.0), (2, 20.0)]
    (text,) = events.Tensors('samples/text_summary')
    assert b'a b' in text.tensor_proto.string_val[0]


def test_tensorboard_needs_somewhere_to_write():
    pytest.importorskip('tensorboard')
    with pytest.raises(ValueError, match='nowhere to write: give it log_dir'):
        FakeTrainer([cb.TensorBoard()]).fit([])


@pytest.mark.parametrize(('make', 'package'), [(cb.TensorBoard, 'tensorboard'), (cb.WandB, 'wandb')])
def test_a_missing_package_is_named_with_its_command(make, package, monkeypatch):
    monkeypatch.setattr(sys.modules[make.__module__], 'find_spec', lambda name: None)
    with pytest.raises(ImportError, match=f'pip install {package}'):
        make()


class FakeWandB(types.ModuleType):
    """The three names of wandb that the callback uses."""

    def __init__(self):
        super().__init__('wandb')
        self.__spec__ = types.SimpleNamespace(name='wandb')
        self.calls = []

    def init(self, **settings):
        self.calls.append(('init', settings))
        return types.SimpleNamespace(
            id='run-1',
            log=lambda metrics, step: self.calls.append(('log', step, metrics)),
            finish=lambda exit_code: self.calls.append(('finish', exit_code)),
        )

    @staticmethod
    def Table(columns, data):
        return columns, data


def test_wandb_logs_phases_and_a_resume_goes_on_in_the_same_run(tmp_path, monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    first = FakeTrainer([cb.WandB('p', name='n')], tmp_path, lr=1.0)
    first.fit([{'a': 1.0}])
    assert fake.calls[0][1] == {'project': 'p', 'config': {'lr': 1.0}, 'dir': str(tmp_path), 'name': 'n'}
    columns, data = fake.calls[1][2].pop('samples')
    assert fake.calls[1] == ('log', 1, {'a': 1.0}) and dict(zip(columns, data[0], strict=True))['prompt'] == 'a b'
    assert fake.calls[2] == ('finish', 0)
    second = FakeTrainer([cb.WandB('p')])
    second.callbacks.load_state_dict(first.callbacks.state_dict())
    second.callbacks.on_fit_start(second)
    assert fake.calls[3][1]['id'] == 'run-1' and fake.calls[3][1]['resume'] == 'allow'
    second.callbacks.on_exception(second, RuntimeError())
    assert fake.calls[4] == ('finish', 1)
    FakeTrainer([cb.WandB()], rank=1).fit([{}])
    assert len(fake.calls) == 5


# ---------------------------------------------------------------- self-check


def ratio(error, kl=0.0):
    return {'ppo/first_ratio_error': error, 'ppo/first_approx_kl': kl}


@pytest.mark.parametrize(
    ('dtype', 'metrics', 'warned'),
    [
        (torch.float32, ratio(5e-5, 5e-5), False),
        (torch.float32, ratio(5e-4), True),
        (torch.float32, ratio(0.0, -5e-4), True),
        (torch.float32, ratio(math.nan), True),
        (torch.float32, {}, False),
        (torch.bfloat16, ratio(0.39, 0.02), False),
        (torch.bfloat16, ratio(0.6, 0.0), True),
        (torch.float16, ratio(0.1, 0.06), True),
    ],
)
def test_a_ratio_that_is_not_one_warns_beyond_what_the_precision_explains(dtype, metrics, warned):
    check = cb.RatioCheck()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        FakeTrainer([check], dtype=dtype).fit([metrics])
    assert [w.category for w in caught] == [cb.RatioWarning] * warned
    assert check.num_offended == warned
    if warned:
        message = str(caught[0].message)
        for cause in ('dropout', 'dtype', 'mask', 'temperature', 'stale', 'train mode'):
            assert cause in message


def test_the_check_repeats_itself_only_when_it_gets_much_worse_and_counts_at_the_end():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        FakeTrainer([cb.RatioCheck()]).fit([ratio(0.01), ratio(0.02), ratio(0.0), ratio(0.5)])
        FakeTrainer([cb.RatioCheck()], rank=1).fit([ratio(0.01)])
    texts = [str(w.message) for w in caught]
    assert len(texts) == 3 and texts[0].startswith('phase 1:') and texts[1].startswith('phase 4:') and '3 of 4 phases' in texts[2]


# ---------------------------------------------------------------- checkpoints


def saved(root: Path) -> list[int]:
    return [int(p.name.removeprefix('step-')) for p in list_checkpoints(root)]


def test_checkpoints_fall_at_the_interval_and_at_the_end(tmp_path):
    FakeTrainer([cb.SaveCheckpoint(interval=2)], tmp_path).fit([{}] * 5)
    assert saved(tmp_path / 'checkpoints') == [2, 4, 5]
    FakeTrainer([cb.SaveCheckpoint(tmp_path / 'elsewhere', interval=9)]).fit([{}])
    assert saved(tmp_path / 'elsewhere') == [1]


def test_a_phase_is_not_saved_twice(tmp_path):
    trainer = FakeTrainer([cb.SaveCheckpoint(interval=9)], tmp_path)
    trainer.callbacks.on_fit_start(trainer)
    trainer.run_phase({})
    trainer.save_checkpoint(tmp_path / 'checkpoints' / 'step-00000001')  # as an interrupted run does
    times = (tmp_path / 'checkpoints' / 'step-00000001' / 'manifest.json').stat().st_mtime_ns
    trainer.callbacks.on_fit_end(trainer)
    assert (tmp_path / 'checkpoints' / 'step-00000001' / 'manifest.json').stat().st_mtime_ns == times
    FakeTrainer([cb.SaveCheckpoint()], tmp_path / 'empty').fit([])
    assert saved(tmp_path / 'empty' / 'checkpoints') == []


@pytest.mark.parametrize('interval', [1, 9, None])
def test_what_a_signal_made_the_trainer_save_counts_among_those_to_keep(tmp_path, interval):
    for step in (1, 2, 3):
        trainer = FakeTrainer([cb.SaveCheckpoint(interval=interval, keep_last=2)], tmp_path)
        trainer.phase = step - 1
        trainer.callbacks.on_fit_start(trainer)
        trainer.run_phase({})
        trainer.save_checkpoint(tmp_path / 'checkpoints' / f'step-{step:08d}')
        trainer.callbacks.on_fit_end(trainer)
    assert saved(tmp_path / 'checkpoints') == [2, 3]


def test_without_an_interval_nothing_is_saved(tmp_path):
    FakeTrainer([cb.SaveCheckpoint(interval=None, keep_last=2)], tmp_path).fit([{}] * 3)
    assert not (tmp_path / 'checkpoints').exists()


def test_a_run_without_an_interval_keeps_as_many_of_its_interruptions_as_asked():
    from chatgpt.launch.learning import make_callbacks
    from chatgpt.launch.runs import SFTRun

    (keeper,) = make_callbacks(SFTRun(checkpoint_interval=0, keep_last=3))
    assert (keeper.interval, keeper.keep_last) == (None, 3)


def test_a_run_that_went_back_keeps_its_own_beside_later_ones(tmp_path):
    FakeTrainer([cb.SaveCheckpoint(interval=2)], tmp_path).fit([{}] * 8)
    back = FakeTrainer([cb.SaveCheckpoint(keep_last=2)], tmp_path)
    back.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000002')
    back.fit([{}] * 3)
    assert saved(tmp_path / 'checkpoints') == [4, 5, 6, 8]


SCORES = [{'rollout/score_mean': s} for s in (5.0, 9.0, 1.0, 2.0, 3.0)]


@pytest.mark.parametrize(('settings', 'kept'), [
    ({'keep_last': 2}, [4, 5]),
    ({'keep_last': 2, 'keep_best': 1}, [2, 4, 5]),
    ({'keep_last': 2, 'keep_best': 1, 'mode': 'min'}, [3, 4, 5]),
    ({'keep_last': 1, 'keep_best': 2}, [1, 2, 5]),
    ({}, [1, 2, 3, 4, 5]),
])  # fmt: skip
def test_the_last_and_the_best_are_kept(tmp_path, settings, kept):
    FakeTrainer([cb.SaveCheckpoint(**settings)], tmp_path).fit(SCORES)
    assert saved(tmp_path / 'checkpoints') == kept


def test_an_unknown_metric_is_named_with_its_neighbours_and_an_evaluation_may_be_missing(tmp_path):
    with pytest.raises(ValueError, match="no metric 'rollout/score_man'.*rollout/score_mean"):
        FakeTrainer([cb.SaveCheckpoint(keep_last=1, keep_best=1, metric='rollout/score_man')], tmp_path).fit(SCORES)
    keeper = cb.SaveCheckpoint(keep_last=1, keep_best=1, metric='eval/win')
    FakeTrainer([keeper], tmp_path / 'b').fit([{}, {'eval/win': 0.5}, {}])
    assert saved(tmp_path / 'b' / 'checkpoints') == [2, 3]


def test_a_failed_save_leaves_the_run_and_the_last_checkpoint(tmp_path):
    trainer = FakeTrainer([cb.SaveCheckpoint(keep_last=1)], tmp_path)
    trainer.callbacks.on_fit_start(trainer)
    trainer.run_phase({})
    trainer.disk_full = True
    with pytest.warns(UserWarning, match='phase 2 was not saved, the run goes on: .*No space left'):
        trainer.run_phase({})
    assert saved(tmp_path / 'checkpoints') == [1]
    trainer.disk_full = False
    trainer.callbacks.on_fit_end(trainer)
    assert saved(tmp_path / 'checkpoints') == [2]


def test_a_checkpoint_holds_the_states_of_callbacks_given_after_it(tmp_path):
    def make():
        return [cb.SaveCheckpoint(), cb.EarlyStopping('a', above=1.0, patience=3)]

    FakeTrainer(make(), tmp_path).fit([{'a': 2.0}, {'a': 2.0}])
    resumed = FakeTrainer(make(), tmp_path)
    resumed.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000002')
    resumed.fit([{'a': 2.0}, {'a': 2.0}])
    assert resumed.phase == 3  # the third crossing in a row, counted over both runs


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'interval': 0}, 'interval=0'),
        ({'keep_last': 0}, 'keep_last=0'),
        ({'keep_best': -1}, 'keep_best=-1'),
        ({'keep_best': 2}, 'give keep_last as well'),
        ({'mode': 'best'}, "mode='best'"),
    ],
)
def test_bad_checkpoint_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cb.SaveCheckpoint(**arguments)


def test_a_checkpoint_callback_without_a_folder_is_refused_before_the_first_phase():
    with pytest.raises(ValueError, match='nowhere to write'):
        FakeTrainer([cb.SaveCheckpoint()]).fit([])


# ---------------------------------------------------------------- evaluation and stopping


def test_evaluation_before_during_and_after_joins_the_metrics_and_remembers_the_best(tmp_path, capsys):
    values = iter([0.1, 0.7, 0.4, 0.6])
    evaluator = cb.Evaluator(lambda trainer: {'win': next(values)}, interval=2, metric='win')
    FakeTrainer([cb.MetricsWriter(), evaluator], tmp_path).fit([{} for _ in range(5)])
    assert [(r['step'], r['eval/win'], r['eval/win_best']) for r in cb.read_jsonl(tmp_path / 'eval.jsonl')] == [
        (0, 0.1, 0.1),
        (2, 0.7, 0.7),
        (4, 0.4, 0.7),
        (5, 0.6, 0.7),
    ]
    assert [r.get('eval/win') for r in cb.read_jsonl(tmp_path / 'metrics.jsonl')] == [None, 0.7, None, 0.4, None]
    assert (evaluator.best, evaluator.best_step) == (0.7, 2)
    assert 'evaluation at phase 0  eval/win 0.1' in capsys.readouterr().out


def test_the_smallest_is_best_when_asked_and_a_nan_never_is():
    values = iter([3.0, math.nan, 2.0, 5.0])
    evaluator = cb.Evaluator(
        lambda trainer: {'eval/loss': next(values)}, interval=1, before=False, metric='eval/loss', mode='min'
    )
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


def test_an_evaluation_without_the_tracked_metric_or_numbers_is_refused():
    with pytest.raises(ValueError, match="no 'eval/win'; it returned eval/loss"):
        FakeTrainer([cb.Evaluator(lambda trainer: {'loss': 1.0}, metric='win')]).fit([])
    with pytest.raises(ValueError, match='must return a dict'):
        FakeTrainer([cb.Evaluator(lambda trainer: 3.0)]).fit([])
    with pytest.raises(ValueError, match='must be a function'):
        cb.Evaluator({'win': 1.0})


def stopped_after(values, **bounds):
    trainer = FakeTrainer([cb.EarlyStopping('m', **bounds)], num_phases=len(values))
    trainer.fit([{'m': v} for v in values])
    return trainer.phase if trainer.stop else None


def test_stopping_needs_the_bound_crossed_in_a_row(capsys):
    assert stopped_after([1, 6, 6, 1, 6, 6, 6, 1], above=5.0, patience=3) == 7
    assert 'stopping after phase 7: m is 6, above 5 in 3 phases in a row' in capsys.readouterr().out
    assert stopped_after([5, 5, 5], above=5.0) is None  # on the bound is within it
    assert stopped_after([5, 4.9], below=5.0) == 2
    assert stopped_after([0.0, 3.0], above=2.0, below=-2.0) == 2
    assert stopped_after([0.0, math.nan, 0.0], above=2.0) == 2
    assert stopped_after([0.0, math.nan, 0.0], below=-2.0) == 2


def test_bad_bounds_and_names_are_refused():
    with pytest.raises(ValueError, match='has no bound'):
        cb.EarlyStopping('m')
    with pytest.raises(ValueError, match='below=3.0 must be smaller than above=1.0'):
        cb.EarlyStopping('m', above=1.0, below=3.0)
    with pytest.raises(ValueError, match="no metric 'rollout/kl'"):
        FakeTrainer([cb.EarlyStopping('rollout/kl', above=1.0)]).fit([{'rollout/kl_mean': 1.0}])


def test_phases_without_an_evaluation_neither_count_nor_break_the_row():
    trainer = FakeTrainer([cb.EarlyStopping('eval/x', above=1.0, patience=2)])
    trainer.fit([{'eval/x': 2.0}, {}, {'eval/x': 2.0}, {}])
    assert trainer.phase == 3


# ---------------------------------------------------------------- performance


def test_flop_are_counted_as_the_formulas_say():
    """Two sequences, 2 + 3 and 4 + 2 tokens: 11 tokens, of which 11 − 2 are fed to the decoder."""
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
        (3, {'sample_replay_buffer': True}, 6 / 5),  # three batches of 2 drawn from 5
    ],
)
def test_passes_come_from_the_batches_really_run(batches, settings, passes):
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


def test_parameters_are_counted_once_where_shared():
    first, second = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=True)
    second.weight = first.weight
    assert cb.num_parameters(torch.nn.Sequential(first, second)) == 12 + 4
