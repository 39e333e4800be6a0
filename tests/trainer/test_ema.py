"""The average of weights: against a loop, through checkpoints, over ranks, and as a folder."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from sft_runs import averages, make

from chatgpt.strategies import ColossalAIStrategy, DDPStrategy, FSDPStrategy
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks import EMA, Callback, SaveCheckpoint

DECAY = 0.8


class Loop(Callback):
    """The average as a plain loop in float64."""

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


def test_against_a_loop(tmp_path):
    from transformers import AutoModelForCausalLM

    ema, loop = EMA(DECAY), Loop()
    trainer = make(callbacks=[ema, loop], run_dir=tmp_path)
    before_end = {}
    trainer.fit()
    mine = averages(ema)
    assert mine.keys() == loop.average.keys()
    for name, want in loop.average.items():
        assert torch.allclose(mine[name].double().view(want.shape), want, atol=1e-6), name
    current = Loop.weights(trainer)
    assert any(
        not torch.allclose(mine[n].double().view(current[n].shape), current[n], atol=1e-3) for n in current
    )  # they do differ
    del before_end
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / 'actor_ema').state_dict()
    for name, want in loop.average.items():
        assert torch.allclose(exported[name.removeprefix('model.')].double(), want, atol=1e-6), name
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith('.') and 'ema' in p.name) == []


def test_the_weights_themselves_are_not_touched(tmp_path):
    plain, averaged = make(), make(callbacks=[EMA(DECAY)], run_dir=tmp_path)
    plain.fit(), averaged.fit()
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), averaged.model.parameters(), strict=True))


def test_a_resume_goes_on_to_the_bit(tmp_path):
    whole = EMA(DECAY)
    make(callbacks=[whole, SaveCheckpoint(interval=3, keep_last=9)], run_dir=tmp_path).fit()
    rest = EMA(DECAY)
    trainer = make(callbacks=[rest])
    assert trainer.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000003')
    trainer.fit()
    a, b = averages(whole), averages(rest)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_turned_on_later_or_off_again(tmp_path):
    make(callbacks=[SaveCheckpoint(interval=3)], run_dir=tmp_path / 'without').fit()
    with pytest.warns(UserWarning, match='has no average of the actor: EMA starts from its weights'):
        make(callbacks=[EMA(DECAY)]).load_checkpoint(tmp_path / 'without')
    make(callbacks=[EMA(DECAY), SaveCheckpoint(interval=3)], run_dir=tmp_path / 'with').fit()
    with pytest.warns(UserWarning, match='actor_ema is of a callback that this run does not have'):
        make().load_checkpoint(tmp_path / 'with')


def test_mistakes():
    with pytest.raises(ValueError, match=r'decay=1.0 must lie in \[0, 1\)'):
        EMA(1.0)
    with pytest.raises(ValueError, match="no model 'critic'; it has actor"):
        make(callbacks=[EMA(model='critic')]).fit()


KINDS = {'ddp': (DDPStrategy, {}), 'fsdp': (FSDPStrategy, {})}
if importlib.util.find_spec('colossalai') is not None:
    KINDS['zero2'] = (ColossalAIStrategy, {'stage': 2, 'precision': 'fp32'})


def run(folder: str) -> None:
    for name, (kind, options) in KINDS.items():
        with kind(seed=2, device='cpu', **options) as strategy:
            make(strategy, [EMA(DECAY), SaveCheckpoint(interval=4)], run_dir=f'{folder}/{name}').fit()


def test_under_every_strategy(tmp_path):
    from transformers import AutoModelForCausalLM

    loop = Loop()
    make(callbacks=[loop]).fit()
    run_distributed(run, 2, str(tmp_path), init_group=True)
    for name in KINDS:
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / 'actor_ema').state_dict()
        for weight, want in loop.average.items():
            assert torch.allclose(exported[weight.removeprefix('model.')].double(), want, atol=2e-4), (name, weight)
        ema = EMA(DECAY)
        trainer = make(callbacks=[ema])
        assert trainer.load_checkpoint(tmp_path / name)  # written by two ranks, read by one
        assert averages(ema).keys() == loop.average.keys()
