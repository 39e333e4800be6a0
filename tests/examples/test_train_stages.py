"""train_sft.py, train_reward_model.py and train_preference.py from the command line."""

from __future__ import annotations

import shutil

import pytest
from example_script import error_of, metrics_of, script

from chatgpt.launch import demo_world


def test_without_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo_world, 'NUM_STORIES', 32)
    monkeypatch.setattr(demo_world, 'NUM_EXAMPLES', 40)
    monkeypatch.chdir(tmp_path)
    for name, kind in (('train_sft', 'actor'), ('train_reward_model', 'reward_model'), ('train_preference', 'actor')):
        script(name, monkeypatch, '--log_interval=1', '--max_steps=2')
        assert (tmp_path / 'outputs' / name / kind / 'config.json').is_file()
    assert capsys.readouterr().out.count('38 examples to learn from, 2 to evaluate on') == 3
    first = metrics_of(tmp_path / 'outputs' / 'train_preference')[0]['dpo/loss']
    assert first == pytest.approx(0.6931, abs=1e-4)  # log 2 before the first update


def test_a_trained_model_is_not_replaced(monkeypatch, capsys, data, tmp_path):
    flags = f'{data}/sft.jsonl --pretrain {data}/base --save_path {tmp_path}'.split()
    flags += '--max_steps=1 --log_interval=1 --checkpoint_minutes=0'.split()
    script('train_sft', monkeypatch, *flags)
    before = (tmp_path / 'actor' / 'model.safetensors').stat().st_mtime_ns
    capsys.readouterr()
    error = error_of('train_sft', monkeypatch, capsys, *flags)
    assert f'{tmp_path} holds the trained model of an earlier run, actor/, and no checkpoints to go on from' in error
    assert (tmp_path / 'actor' / 'model.safetensors').stat().st_mtime_ns == before
    shutil.rmtree(tmp_path / 'actor')
    script('train_sft', monkeypatch, *flags)
    assert f'{tmp_path} holds an earlier run without checkpoints: its lines are kept' in capsys.readouterr().out
    assert len(metrics_of(tmp_path)) == 1 and (tmp_path / 'metrics.previous.jsonl').is_file()


@pytest.mark.parametrize(
    ('method', 'source', 'first_loss', 'more'),  # the policy equals the reference: log 2, and 1 − σ(0)
    [('dpo', 'ranked', 0.6931, []), ('kto', 'ranked', 0.5, []), ('kto', 'labels', 0.5, ['--positive_label=pos'])],
)
def test_ranked_and_labelled_answers(monkeypatch, data, tmp_path, method, source, first_loss, more):
    given = f'{data}/{source}.jsonl --pretrain {data}/base --method={method} --max_steps=2 --log_interval=1'.split()
    script('train_preference', monkeypatch, *given, '--save_path', str(tmp_path), *more)
    losses = [row[f'{method}/loss'] for row in metrics_of(tmp_path)]
    assert len(losses) == 2 and losses[0] == pytest.approx(first_loss, abs=0.01)
