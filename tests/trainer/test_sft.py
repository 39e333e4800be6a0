"""SFT: the loss by hand, prompts outside it, learning, evaluation, resuming."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from phase_log import Log, sequence

from chatgpt.nn import GPTActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import SFTTrainer
from chatgpt.types import Sequence


def make(
    data: list[Sequence],
    eval_data: list[Sequence] | None = None,
    *,
    dropout: float = 0.0,
    lr: float = 3e-3,
    **kwargs: Any,
) -> tuple[SFTTrainer, Log]:
    strategy = NaiveStrategy(seed=5)
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16, hidden=16, positions=32, dropout=dropout))
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=lr)))
    log = Log()
    return SFTTrainer(strategy, actor, optim, data, eval_data, callbacks=[log], **kwargs), log


def counting(num: int = 32) -> list[Sequence]:
    """Responses that count upwards from the prompt: learnable."""
    return [sequence([3 + i % 6], [3 + (i % 6 + 1 + j) % 6 for j in range(3)] + [2]) for i in range(num)]


def test_loss_is_the_mean_over_response_tokens_of_the_whole_batch():
    data = [sequence([3, 4], [5, 6, 2]), sequence([7], [8], [True]), sequence([3], [4, 5, 6], [True, False, True])]
    trainer, log = make(data, train_batch_size=3, max_epochs=1, log_interval=1, shuffle=False)
    # By hand: log-softmax of the model's own logits at the states before each counted token, in float64.
    model = trainer.strategy.unwrap(trainer.model).model.eval()
    total, count = 0.0, 0
    prompts_too: list[float] = []
    means: list[float] = []
    for s in data:
        ids = torch.cat([s.prompt_ids, s.response_ids])
        logp = model(ids[None]).logits[0].double().log_softmax(-1)
        losses = [-float(logp[k - 1, ids[k]].detach()) for k in range(1, len(ids))]
        own = [x for x, counts in zip(losses[len(s.prompt_ids) - 1 :], s.response_mask.tolist(), strict=True) if counts]
        total, count = total + sum(own), count + len(own)
        prompts_too += losses[: len(s.prompt_ids) - 1] + own
        means.append(sum(own) / len(own))
    trainer.fit()
    assert count == 6
    assert log.phases[0]['sft/loss'] == pytest.approx(total / count, rel=1e-5)
    assert log.phases[0]['sft/perplexity'] == pytest.approx(math.exp(total / count), rel=1e-5)
    # Negative controls: with prompts counted, or each sequence's mean averaged, the number is another.
    assert len(prompts_too) == 7
    assert log.phases[0]['sft/loss'] != pytest.approx(sum(prompts_too) / len(prompts_too), rel=1e-4)
    assert log.phases[0]['sft/loss'] != pytest.approx(sum(means) / len(means), rel=1e-4)


def test_learns_and_evaluates_on_eval_data():
    data = counting()
    trainer, log = make(data, data[:6], train_batch_size=8, max_epochs=25, log_interval=4, lr=1e-2)
    trainer.fit()
    assert log.phases[0]['sft/loss'] > 1.5
    assert log.phases[-1]['sft/loss'] < 0.3
    last = [p for p in log.phases if 'sft/val_loss' in p][-1]
    assert last['sft/val_loss'] < 0.3
    assert last['sft/val_perplexity'] == pytest.approx(math.exp(last['sft/val_loss']))


def test_micro_batches_do_not_change_the_step():
    def run(max_tokens: int | None) -> tuple[list[dict[str, float]], torch.Tensor]:
        trainer, log = make(
            counting(), train_batch_size=16, max_epochs=1, log_interval=1, max_tokens_per_batch=max_tokens
        )
        trainer.fit()
        return log.phases, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    (a, wa), (b, wb) = run(None), run(10)
    for x, y in zip(a, b, strict=True):
        assert x['sft/loss'] == pytest.approx(y['sft/loss'], rel=1e-5)
        assert x['sft/grad_norm'] == pytest.approx(y['sft/grad_norm'], rel=1e-4)
    assert (wa - wb).abs().max() < 0.05 * 3e-3 * 2


def test_resume_to_the_bit_with_dropout(tmp_path):
    def run(stop_after: int | None, resume: bool) -> tuple[list[dict[str, float]], torch.Tensor]:
        trainer, log = make(
            counting(),
            train_batch_size=8,
            max_epochs=4,
            log_interval=2,
            dropout=0.2,
            run_dir=tmp_path / str(stop_after is None and not resume),
        )
        if resume:
            torch.manual_seed(123)
            assert trainer.load_checkpoint('auto')
        if stop_after is not None:

            class Stop(Log):
                def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
                    if step == stop_after:
                        trainer.save_checkpoint()
                        trainer.request_stop()

            trainer.callbacks.callbacks.append(Stop())
        trainer.fit()
        return log.phases, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    straight, weights = run(None, False)
    first, _ = run(3, False)
    rest, resumed = run(None, True)
    assert first + rest == straight
    assert torch.equal(weights, resumed)


def test_linear_schedule_decays_to_zero_and_warms_up():
    _, log = (
        pair := make(
            counting(),
            train_batch_size=8,
            max_epochs=2,
            log_interval=1,
            lr=1.0e-3,
            lr_schedule='linear',
            warmup_steps=2,
        )
    )
    pair[0].fit()
    rates = [p['sft/lr'] for p in log.phases]
    assert rates[:2] == pytest.approx([0.5e-3, 1e-3])
    assert rates[2:] == pytest.approx([1e-3 * (1 - k / 6) for k in range(6)])


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'train_batch_siz': 4}, "SFTConfig has no setting 'train_batch_siz'; did you mean train_batch_size"),
        ({'lr_schedule': 'step'}, "lr_schedule='step' is not known"),
        ({'max_epochs': 0}, 'max_epochs=0 must be positive'),
    ],
)
def test_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(counting(4), **kwargs)


def test_refuses_no_data():
    with pytest.raises(ValueError, match='no training data'):
        make([])
