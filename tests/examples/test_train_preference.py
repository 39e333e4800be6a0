"""examples/train_preference.py as its users run it."""

from __future__ import annotations

import pytest
import torch
from example_script import error_of, metrics_of, script


@pytest.mark.parametrize(
    ('method', 'flags'),
    [('kto', ['--desirable_weight=1.3']), ('simpo', ['--gamma=0.5']), ('dpo', ['--lora_rank=2', '--beta=0.5'])],
)
def test_each_method_learns_from_a_file(monkeypatch, capsys, data, tmp_path, method, flags):
    from transformers import AutoModelForCausalLM

    out = tmp_path / 'run'
    given = f'{data}/pairs.jsonl --pretrain {data}/base --method={method} --save_path {out} --lr=3e-3'.split()
    given += '--train_batch_size=6 --max_epochs=3 --log_interval=3 --validation_percentage=25'.split()
    script('train_preference', monkeypatch, *given, *flags)
    assert '18 examples to learn from, 6 to evaluate on' in capsys.readouterr().out
    first, last = metrics_of(out)[0], metrics_of(out)[-1]
    assert last[f'{method}/loss'] < first[f'{method}/loss']
    assert f'{method}/val_loss' in last
    trained = AutoModelForCausalLM.from_pretrained(out / 'actor').state_dict()
    base = AutoModelForCausalLM.from_pretrained(data / 'base').state_dict()
    assert any(not torch.equal(trained[name], base[name]) for name in base)


@pytest.mark.parametrize(
    ('method', 'source', 'first_loss', 'more'),  # the policy is the reference: log 2, and 1 − σ(0)
    [('dpo', 'ranked', 0.6931, []), ('kto', 'ranked', 0.5, []), ('kto', 'labels', 0.5, ['--positive_label=pos'])],
)
def test_ranked_and_labelled_answers(monkeypatch, data, tmp_path, method, source, first_loss, more):
    given = f'{data}/{source}.jsonl --pretrain {data}/base --method={method} --max_steps=2 --log_interval=1'.split()
    script('train_preference', monkeypatch, *given, '--save_path', str(tmp_path), *more)
    losses = [row[f'{method}/loss'] for row in metrics_of(tmp_path)]
    assert len(losses) == 2 and losses[0] == pytest.approx(first_loss, abs=0.01)


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        ('{pairs} --method=ppo', "method='ppo' learns from no preferences; choose dpo, kto, orpo or simpo"),
        ('{pairs} --method=orpo --beta=1', "unknown argument '--beta'"),
        ('{pairs} --label_smoothing=0.2', 'label_smoothing=0.2 belongs to the losses cdpo and robust'),
        (
            '{rewards} --method=kto',
            'rewards.jsonl: KTO needs the columns prompt, response and label (or text and label), where label is '
            'true or false, 1 or 0, good or bad, or a name with --positive_label NAME; or prompt, chosen and '
            'rejected. Found the columns prompt, response, reward, and 0.73 where a label is needed',
        ),
        ('{labels} --method=kto --positive_label=other', 'KTO needs good and bad answers, and there are 0 good'),
        ('{labels}', 'dpo learns from pairs, and these are labelled answers; use kto'),
    ],
)
def test_mistakes(monkeypatch, capsys, data, tmp_path, flags, sentence):
    places = {name: data / f'{name}.jsonl' for name in ('pairs', 'labels', 'rewards', 'stories')}
    given = f'{flags.format(**places)} --pretrain {data}/base --save_path {tmp_path}/run'.split()
    assert sentence in error_of('train_preference', monkeypatch, capsys, *given)
    assert not (tmp_path / 'run').exists()
