"""The average of weights: against a loop, in checkpoints, over ranks, and as a folder."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from tiny_runs import PROMPTS, fit, ppo, sft, weights
from transformers import AutoModelForCausalLM

from chatgpt.strategies import ColossalAIStrategy, DDPStrategy, FSDPStrategy
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks import EMA, Callback, SaveCheckpoint

DECAY = 0.8


class Loop(Callback):
    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer: Any) -> None:
        self.average = self.weights(trainer)

    def on_learn_batch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        for name, weight in self.weights(trainer).items():
            self.average[name] = DECAY * self.average[name] + (1 - DECAY) * weight

    @staticmethod
    def weights(trainer: Any) -> dict[str, torch.Tensor]:
        return {n: p.detach().double().clone() for n, p in trainer.model.named_parameters()}


def averages(ema: EMA) -> dict[str, torch.Tensor]:
    return {p.name: p.data for p in ema._pieces.values() if p.data.is_floating_point()}


def same(one: EMA, other: EMA) -> bool:
    a, b = averages(one), averages(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_average_equals_a_loop_and_the_weights_do_not_change(tmp_path):
    ema, loop = EMA(DECAY), Loop()
    plain, trainer = sft(), sft(callbacks=[ema, loop], run_dir=tmp_path)
    plain.fit(), trainer.fit()
    mine, current = averages(ema), Loop.weights(trainer)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / 'actor_ema').state_dict()
    assert mine.keys() == loop.average.keys()
    for name, want in loop.average.items():
        assert torch.allclose(mine[name].double().view(want.shape), want, atol=1e-6), name
        assert torch.allclose(exported[name.removeprefix('model.')].double(), want, atol=1e-6), name
    assert any(not torch.allclose(loop.average[n], current[n], atol=1e-3) for n in current)
    assert not list(tmp_path.glob('.*ema*'))
    assert torch.equal(weights(plain), weights(trainer))


def test_a_resume_continues_to_the_bit_with_two_averages_of_a_model(tmp_path):
    whole, rest = [EMA(DECAY), EMA(0.1)], [EMA(DECAY), EMA(0.1)]
    sft(callbacks=[*whole, SaveCheckpoint(interval=3, keep_last=9)], run_dir=tmp_path).fit()
    trainer = sft(callbacks=rest)
    assert trainer.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000003')
    trainer.fit()
    assert all(same(a, b) for a, b in zip(whole, rest, strict=True)) and not same(*rest)


def test_turned_on_later(tmp_path):
    without = sft().save_checkpoint(tmp_path / 'without')
    with pytest.warns(UserWarning, match='has no average of the actor: EMA starts from its weights'):
        sft(callbacks=[EMA(DECAY)]).load_checkpoint(without)


def test_mistakes():
    with pytest.raises(ValueError, match=r'decay=1.0 must lie in \[0, 1\)'):
        EMA(1.0)
    with pytest.raises(ValueError, match="no model 'critic'; it has actor"):
        sft(callbacks=[EMA(model='critic')]).fit()
    with pytest.raises(ValueError, match='a critic that learns in passes of its own cannot be averaged'):
        fit(ppo(callbacks=[EMA(model='critic')], critic_epochs=2), 1)


KINDS = {'ddp': (DDPStrategy, {}), 'fsdp': (FSDPStrategy, {})}
if importlib.util.find_spec('colossalai') is not None:
    KINDS['zero2'] = (ColossalAIStrategy, {'stage': 2, 'precision': 'fp32'})


def run(folder: str) -> None:
    for name, (kind, options) in KINDS.items():
        with kind(seed=5, device='cpu', **options) as strategy:
            callbacks = [EMA(DECAY), SaveCheckpoint(interval=4)]
            sft(strategy=strategy, callbacks=callbacks, run_dir=f'{folder}/{name}').fit()


def test_under_every_strategy(tmp_path):
    loop = Loop()
    sft(callbacks=[loop]).fit()
    run_distributed(run, 2, str(tmp_path), init_group=True)
    for name in KINDS:
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / 'actor_ema').state_dict()
        for weight, want in loop.average.items():
            assert torch.allclose(exported[weight.removeprefix('model.')].double(), want, atol=2e-4), (name, weight)
        ema = EMA(DECAY)
        assert sft(callbacks=[ema]).load_checkpoint(tmp_path / name)  # written by two ranks, read by one
        assert averages(ema).keys() == loop.average.keys()


def test_phases_without_a_fit_are_averaged_too():
    ema = EMA(DECAY)
    trainer = ppo(callbacks=[ema])
    trainer.set_prompts(PROMPTS)
    before = {p.name: p.data.clone() for p in trainer.strategy.model_pieces(trainer.actor)}
    trainer.collect(1)
    trainer.learn()
    now = {p.name: p.data for p in trainer.strategy.model_pieces(trainer.actor)}
    assert trainer.num_updates == 1
    for name, average in averages(ema).items():
        assert torch.allclose(average, DECAY * before[name] + (1 - DECAY) * now[name], atol=1e-6)
