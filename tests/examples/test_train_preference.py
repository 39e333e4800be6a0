"""examples/train_preference.py as its users run it."""

from __future__ import annotations

import pytest
import torch
from example_script import metrics_of, script


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
