"""Callbacks with visible output: progress, samples, TensorBoard, and report.html."""

from __future__ import annotations

import os
import signal

import pytest
from fake_trainer import FakeTrainer, experience
from stop_after import StopAfter
from tiny_runs import ppo

from chatgpt.trainer import callbacks as cb
from chatgpt.trainer.callbacks import Callback, RunRecorder, SaveCheckpoint, WriteReport


def test_lines_without_a_terminal(capsys):
    trainer = FakeTrainer([cb.ProgressBar()], num_phases=2)
    trainer.fit([{'rollout/score_mean': 0.123456, 'rollout/kl_mean': -5.575e-7}, {'sft/loss': 3.5, 'other': 1.0}])
    assert capsys.readouterr() == ('phase 1/2  score 0.1235  kl 0\nphase 2/2  loss 3.5\n', '')
    # no negative zero
    shown = cb.format_table([{'a': -0.0002}, {'a': -0.0}, {'a': -0.0006}], ('a',))
    assert shown.splitlines()[2:] == ['0.000', '0.000', '-0.001']


def test_lines_show_the_remaining_time(capsys, monkeypatch):
    """Two phases of four in 100 s leave 100 s. After a resume only the phases of this start count."""
    clock = iter([0.0, 40.0, 100.0, 150.0, 1000.0, 1007.0])
    monkeypatch.setattr('chatgpt.trainer.callbacks.progress.time.monotonic', lambda: next(clock))
    row = {'perf/new_tokens_per_s': 1234.5, 'perf/learn_tokens_per_s': 9.0}
    FakeTrainer([cb.ProgressBar()], num_phases=4).fit([row, row, row])
    resumed = FakeTrainer([cb.ProgressBar()], num_phases=1004)
    resumed.phase = 3
    resumed.fit([{'perf/learn_tokens_per_s': 13580.4}])
    assert capsys.readouterr().out.splitlines() == [
        'phase 1/4  tokens/s 1234  left 2 min',  # 3 x 40 s
        'phase 2/4  tokens/s 1234  left 2 min',  # 2 x 50 s
        'phase 3/4  tokens/s 1234  left 50 s',
        'phase 4/1004  tokens/s 13580  left 1 h 57 min',  # 1000 x 7 s
    ]


def test_bars_show_phases_with_numbers_and_continue_after_a_resume(capsys):
    bar = cb.ProgressBar(bars=True)
    trainer = FakeTrainer([bar], num_phases=5)
    trainer.phase, trainer.total_updates = 3, 10
    trainer.fit([{'rollout/score_mean': 0.25}, {'rollout/score_mean': 0.75}], batches=2)
    out = capsys.readouterr()
    assert out.out == '' and all(text in out.err for text in ('3/5', '5/5', 'score=0.75', 'learn', 'collect'))
    trainer.callbacks.on_fit_start(trainer)
    trainer.callbacks.on_make_experience_start(trainer)
    shown = [bar._phases, bar._inner]
    trainer.callbacks.on_exception(trainer, KeyboardInterrupt())
    assert bar._phases is None and bar._inner is None and all(b.disable for b in shown)


def test_progress_is_silent_on_other_ranks_and_when_disabled(capsys):
    for bars in (False, True):
        FakeTrainer([cb.ProgressBar(bars=bars)], rank=1).fit([{'sft/loss': 1.0}])
        FakeTrainer([cb.ProgressBar(enabled=False, bars=bars)]).fit([{'sft/loss': 1.0}])
    assert capsys.readouterr() == ('', '')


def test_sample_table_is_printed_and_written_every_n_phases_the_first_and_the_last(tmp_path, capsys):
    trainer = FakeTrainer([cb.SampleTable(every=3, num_rows=2)], tmp_path, num_phases=4)
    trainer.last_experiences = [
        experience(7, [3, 4], [5, 6, 1], 2.0, gap=0.5, prompt_text='a b', response_text='c\nd'),
        experience(8, [3], [9, 1], -1.0, gap=0.0),
        experience(9, [3], [9, 1], 5.0),
    ]
    trainer.fit([{'rollout/kl_mean': 0.0}] * 4)
    rows = cb.read_jsonl(tmp_path / 'samples.jsonl')
    assert [r['step'] for r in rows] == [1, 1, 3, 3, 4, 4]
    texts = {'prompt': 'a b', 'response': 'c\nd'}
    assert rows[0] == {'step': 1, 'index': 7, 'score': 2.0, 'kl': 1.5, 'num_tokens': 3, 'ended': True} | texts
    # ids if there is no tokenizer
    assert (rows[1]['prompt'], rows[1]['response'], rows[1]['score']) == ('3', '9 1', -1.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'samples of phase 1' and lines[1].split() == ['score', 'kl', 'prompt', 'response']
    assert lines[3].split() == ['2.000', '1.500', 'a', 'b', 'c⏎d']
    assert sum(line.startswith('samples of phase') for line in lines) == 3
    # and a trainer without a folder or samples shows nothing
    idle = FakeTrainer([cb.SampleTable()], rank=1)
    idle.fit([{}])
    assert capsys.readouterr().out == ''


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
    FakeTrainer([cb.TensorBoard()], tmp_path).fit([{'ppo/x': 5.0}])  # another run in this folder
    for name, values in (('tensorboard', [5.0]), ('tensorboard.previous', [1.0, 20.0])):
        events = EventAccumulator(str(tmp_path / name))
        events.Reload()
        assert [e.value for e in events.Scalars('ppo/x')] == values
    with pytest.raises(ValueError, match='nowhere to write: give it log_dir'):
        FakeTrainer([cb.TensorBoard()]).fit([])


@pytest.mark.parametrize(
    ('make', 'package'),
    [(cb.TensorBoard, 'tensorboard'), (cb.WandB, 'wandb'), (cb.Trackio, 'trackio'), (cb.MLflow, 'mlflow')],
)
def test_a_missing_package_is_named_with_its_command(make, package, monkeypatch):
    monkeypatch.setattr('chatgpt.trainer.callbacks.base.find_spec', lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install {package}, or from a checkout pip install '\.\[{package}\]'"):
        make()


PROMPTS = ['abc', 'de', 'fg', 'hij']


class Interrupt(Callback):
    def on_phase_end(self, trainer, step, metrics):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ('callback', 'expected'),
    [(None, ['ended', '2 phases']), (Interrupt(), ['stopped', '1 of 2 ph']), (StopAfter(1), ['stopped', '1 of 2 ph'])],
)
def test_a_run_that_ends_is_interrupted_or_stopped_has_a_page_of_its_last_state(tmp_path, callback, expected):
    trainer = ppo(run_dir=tmp_path, callbacks=[callback] if callback else [])
    try:
        trainer.fit(PROMPTS, max_timesteps=2, update_timesteps=1)
    except KeyboardInterrupt:
        assert isinstance(callback, Interrupt)
    text = (tmp_path / 'report.html').read_text()
    assert f'>{expected[0]}</span>' in text and expected[1] in text and 'rollout/score_mean' in text


def test_the_report_of_a_failed_run_begins_with_the_error(tmp_path, capsys):
    calls = []

    def reward(prompts, responses):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError('no <b> today')
        return [1.0] * len(responses)

    with pytest.raises(Exception, match='no <b> today'):
        ppo(run_dir=tmp_path, reward=reward).fit(PROMPTS, max_timesteps=3, update_timesteps=1)
    text = (tmp_path / 'report.html').read_text()
    assert '>failed</span>' in text
    main = text[text.index('<main') :]
    assert f'report: {tmp_path}' in capsys.readouterr().out
    assert main.index('The run failed in phase 2.') < main.index('no &lt;b&gt; today') < main.index('<h2>Findings</h2>')


def test_a_trainer_with_a_folder_writes_the_report_last(tmp_path):
    trainer = FakeTrainer([WriteReport(), RunRecorder(), SaveCheckpoint(interval=None)])
    assert isinstance(list(trainer.callbacks)[-1], WriteReport)
    for settings, count in (
        ({}, 0),
        ({'run_dir': tmp_path}, 1),
        ({'run_dir': tmp_path, 'callbacks': [WriteReport()]}, 1),
    ):
        assert sum(isinstance(c, WriteReport) for c in ppo(**settings).callbacks) == count


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path):
    trainer = ppo(run_dir=tmp_path)
    (tmp_path / 'report.html').mkdir()
    with pytest.warns(UserWarning, match='no report: .*report.html is a folder'):
        trainer.fit(PROMPTS, max_timesteps=1, update_timesteps=1)
