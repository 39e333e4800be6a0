"""Every run with a folder leaves a report.html: when it ends, is stopped, is interrupted or fails."""

from __future__ import annotations

import os
import signal

import pytest
from fake_trainer import FakeTrainer
from online_runs import make

from chatgpt.trainer.callbacks import Callback, RunRecorder, SaveCheckpoint, WriteReport

PROMPTS = ['abc', 'de', 'fg', 'hij']


def test_a_run_that_ends_has_a_page_of_its_last_state(tmp_path):
    make(run_dir=tmp_path).fit(PROMPTS, max_timesteps=2, update_timesteps=1)
    text = (tmp_path / 'report.html').read_text()
    assert '>ended</span>' in text and '2 phases' in text and 'rollout/score_mean' in text


def raises(prompts, responses):
    raise RuntimeError('no reward')


def test_a_run_that_fails_says_why_on_top(tmp_path, capsys):
    calls = []

    def reward(prompts, responses):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError('no <b> today')
        return [1.0] * len(responses)

    with pytest.raises(Exception, match='no <b> today'):
        make(run_dir=tmp_path, reward=reward).fit(PROMPTS, max_timesteps=3, update_timesteps=1)
    text = (tmp_path / 'report.html').read_text()
    assert '>failed</span>' in text
    main = text[text.index('<main') :]
    assert f'report: {tmp_path}' in capsys.readouterr().out
    assert main.index('The run failed in phase 2.') < main.index('no &lt;b&gt; today') < main.index('<h2>Findings</h2>')


class Interrupt(Callback):
    def on_phase_end(self, trainer, step, metrics):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)


class Stop(Callback):
    def on_phase_end(self, trainer, step, metrics):
        trainer.request_stop()


@pytest.mark.parametrize('callback', [Interrupt, Stop])
def test_a_run_that_is_interrupted_or_stopped_has_a_page(tmp_path, callback):
    trainer = make(run_dir=tmp_path, more=[callback()])
    if callback is Interrupt:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(PROMPTS, max_timesteps=4, update_timesteps=1)
    else:
        trainer.fit(PROMPTS, max_timesteps=4, update_timesteps=1)
    text = (tmp_path / 'report.html').read_text()
    assert '>stopped</span>' in text and '1 of 4 phases' in text


def test_it_comes_after_all_others_and_once():
    trainer = FakeTrainer([WriteReport(), RunRecorder(), SaveCheckpoint(interval=None)])
    assert isinstance(list(trainer.callbacks)[-1], WriteReport)


@pytest.mark.parametrize('given', [(), (WriteReport(),)])
def test_a_trainer_has_one_without_being_asked_where_there_is_a_folder(tmp_path, given):
    found = [c for c in make(run_dir=tmp_path, more=list(given)).callbacks if isinstance(c, WriteReport)]
    assert len(found) == 1
    assert not [c for c in make().callbacks if isinstance(c, WriteReport)]


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path):
    trainer = make(run_dir=tmp_path)
    (tmp_path / 'report.html').mkdir()
    with pytest.warns(UserWarning, match='no report: .*report.html is a folder'):
        trainer.fit(PROMPTS, max_timesteps=1, update_timesteps=1)
