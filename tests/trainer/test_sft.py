"""SFT: the loss by hand, excluded prompts, learning, evaluation, resuming."""

from __future__ import annotations

import math

import pytest
import torch
from stop_after import StopAfter
from tiny_runs import sequence, sft, weights


def counting() -> list:
    return [sequence([3 + i % 6], [3 + (i % 6 + 1 + j) % 6 for j in range(3)] + [2]) for i in range(32)]


@pytest.mark.parametrize('max_tokens', [None, 5])
def test_loss_is_the_mean_over_response_tokens_of_the_whole_batch(max_tokens):
    data = [sequence([3, 4], [5, 6, 2]), sequence([7], [8], [True]), sequence([3], [4, 5, 6], [True, False, True])]
    trainer = sft(data, train_batch_size=3, max_epochs=1, shuffle=False, max_tokens_per_batch=max_tokens)
    # By hand: log-softmax of the model's own logits at the states before each counted token, in float64.
    model = trainer.strategy.unwrap(trainer.model).model.eval()
    counted: list[float] = []
    prompts_too: list[float] = []
    means: list[float] = []
    for s in data:
        ids = torch.cat([s.prompt_ids, s.response_ids])
        logp = model(ids[None]).logits[0].double().log_softmax(-1)
        losses = [-float(logp[k - 1, ids[k]].detach()) for k in range(1, len(ids))]
        own = [x for x, counts in zip(losses[len(s.prompt_ids) - 1 :], s.response_mask.tolist(), strict=True) if counts]
        counted += own
        prompts_too += losses[: len(s.prompt_ids) - 1] + own
        means.append(sum(own) / len(own))
    trainer.fit()
    (seen,) = trainer.log.phases
    assert len(counted) == 6 and seen['sft/loss'] == pytest.approx(sum(counted) / 6, rel=1e-5)
    assert seen['sft/perplexity'] == pytest.approx(math.exp(sum(counted) / 6), rel=1e-5)
    # Negative controls: with prompts counted, or each sequence's mean averaged, the number is another.
    assert seen['sft/loss'] != pytest.approx(sum(prompts_too) / 7, rel=1e-4)
    assert seen['sft/loss'] != pytest.approx(sum(means) / len(means), rel=1e-4)


def test_learns_and_evaluates_on_eval_data():
    data = counting()
    trainer = sft(data, data[:6], train_batch_size=8, max_epochs=12, log_interval=4)
    trainer.fit()
    assert trainer.log.phases[0]['sft/loss'] > 1.5 and trainer.log.phases[-1]['sft/loss'] < 0.3
    last = [p for p in trainer.log.phases if 'sft/val_loss' in p][-1]
    assert last['sft/val_loss'] < 0.3
    assert last['sft/val_perplexity'] == pytest.approx(math.exp(last['sft/val_loss']))


def test_resume_to_the_bit_with_dropout(tmp_path):
    def run(folder: str, stop_after: int = 0, resume: bool = False):
        callbacks = [StopAfter(stop_after, save=True)]
        settings = {'train_batch_size': 8, 'log_interval': 2, 'dropout': 0.2, 'run_dir': tmp_path / folder}
        trainer = sft(counting(), callbacks=callbacks, **settings)
        if resume:
            torch.manual_seed(123)
            assert trainer.load_checkpoint('auto')
        trainer.fit()
        return trainer

    straight, first, rest = run('straight'), run('stopped', stop_after=1), run('stopped', resume=True)
    assert len(straight.log.phases) == 4
    assert first.log.phases + rest.log.phases == straight.log.phases
    assert torch.equal(weights(straight), weights(rest))


def test_linear_schedule_decays_to_zero_and_warms_up():
    trainer = sft(counting(), train_batch_size=8, lr=1.0e-3, lr_schedule='linear', warmup_steps=2)
    trainer.fit()
    rates = [p['sft/lr'] for p in trainer.log.phases]
    assert rates[:2] == pytest.approx([0.5e-3, 1e-3])
    assert rates[2:] == pytest.approx([1e-3 * (1 - k / 6) for k in range(6)])


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'train_batch_siz': 4}, "SFTConfig has no setting 'train_batch_siz'; did you mean train_batch_size"),
        ({'lr_schedule': 'step'}, "lr_schedule='step' is not known"),
        ({'data': []}, 'no training data'),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        sft(**settings)


def test_data_of_another_kind_is_refused():
    with pytest.raises(ValueError, match='record 0 is a str among Sequences'):
        sft(['a text'])
