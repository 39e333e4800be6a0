"""Every run with a folder leaves a report.html: when it ends, is stopped, is interrupted or fails."""

from __future__ import annotations

import os
import signal

import pytest
from fake_trainer import FakeTrainer
from tiny_runs import StopAfter, ppo

from chatgpt.trainer.callbacks import Callback, RunRecorder, SaveCheckpoint, WriteReport

PROMPTS = ['abc', 'de', 'fg', 'hij']


class Interrupt(Callback):
    def on_phase_end(self, trainer, step, metrics):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ('callback', 'said'),
    [(None, ['ended', '2 phases']), (Interrupt(), ['stopped', '1 of 2 ph']), (StopAfter(1), ['stopped', '1 of 2 ph'])],
)
def test_a_run_that_ends_is_interrupted_or_stopped_has_a_page_of_its_last_state(tmp_path, callback, said):
    trainer = ppo(run_dir=tmp_path, callbacks=[callback] if callback else [])
    try:
        trainer.fit(PROMPTS, max_timesteps=2, update_timesteps=1)
    except KeyboardInterrupt:
        assert isinstance(callback, Interrupt)
    text = (tmp_path / 'report.html').read_text()
    assert f'>{said[0]}</span>' in text and said[1] in text and 'rollout/score_mean' in text


def test_a_run_that_fails_says_why_on_top(tmp_path, capsys):
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


def test_a_trainer_with_a_folder_has_one_that_comes_last(tmp_path):
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
