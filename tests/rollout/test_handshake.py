"""The check of transferred weights: correct ones pass, wrong ones raise before the first sample. For engines and
workers of this package; see tests/real_vllm for vLLM."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from in_process_workers import InProcessWorkers

from chatgpt.nn import Actor
from chatgpt.rollout import Abilities, Call, CheckedEngine, LocalEngine, RemoteEngine, RolloutEngine, SamplingParams
from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.wire import ModelSpec, unique_tensors
from chatgpt.rollout.worker import RolloutWorker
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Prompt

PROMPTS = [Prompt(ids=torch.tensor([5, 3 + i])) for i in range(4)]


def actor_of(seed: int = 0, lora_rank: int = 0) -> Actor:
    actor = Actor(tiny_causal_lm('gpt2', seed), lora_rank)
    with torch.no_grad():
        for name, p in actor.named_parameters():
            if 'lora_B' in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    return actor


CALL = Call.of(PROMPTS, SamplingParams(max_new_tokens=3), seed=1, indices=range(4))


def generated(engine: Any, actor: Any) -> Any:
    engine.begin(actor)
    return engine.generate(CALL)


class CopyEngine(CheckedEngine):
    """A third-party engine, which implements `transfer` and `answer`."""

    abilities = Abilities(reproducible=True, copies_weights=True)
    num_answers = 0

    def transfer(self, model: Any, tensors: Any) -> None:
        self.model = ModelSpec.of(model).build()
        self.model.load_state_dict(self.received(unique_tensors(tensors)), strict=False)

    def received(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return tensors

    def answer(self, call: Any, limits: list[int]) -> Any:
        self.num_answers += 1
        local = LocalEngine()
        local.begin(Actor(self.model))
        return local.answer(call, limits)


class Remote(RemoteEngine):
    def __init__(self) -> None:
        super().__init__(InProcessWorkers(2), chunk_size=2)

    def received(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return tensors

    def _select_tensors(self, tensors: Any) -> Any:
        return self.received(dict(tensors))


@pytest.mark.parametrize('kind', [CopyEngine, Remote])
@pytest.mark.parametrize('lora_rank', [0, 2])
def test_the_right_weights_pass_whenever_they_are_handed_over(kind, lora_rank):
    engine = kind()
    for seed in range(3):
        actor = actor_of(seed, lora_rank)
        generated(engine, actor)
        assert engine.difference < 1e-5 and actor.training  # restored
        engine.end()


@pytest.mark.parametrize('kind', [CopyEngine, Remote])
@pytest.mark.parametrize('lost', ['wte.weight', 'h.1.attn.c_attn.weight', 'h.0.mlp.c_fc.bias', 'ln_f.weight'])
def test_an_engine_that_keeps_an_old_tensor_is_refused(kind, lost, monkeypatch):
    engine, old, new = kind(), actor_of(0), actor_of(1)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    generated(engine, old)
    engine.end()
    kept = {n: p for n, p in old.model.named_parameters() if n.endswith(lost)}
    assert kept
    monkeypatch.setattr(engine, 'received', lambda tensors: tensors | kept)
    with pytest.raises(RuntimeError) as error:
        generated(engine, new)
    assert all(words in str(error.value) for words in (kind.__name__, 'nats, where float32 explains', 'look at'))
    with pytest.raises((RuntimeError, ValueError), match='nats|call begin'):  # and again at the next call
        engine.generate(CALL)
    monkeypatch.undo()
    generated(engine, new)
    assert engine.difference < 1e-5


def test_weights_are_checked_once_for_each_transfer_and_what_is_not_finite_is_not_sent():
    engine, actor = CopyEngine(), actor_of()
    generated(engine, actor)
    assert engine.num_answers == 2
    engine.generate(CALL)
    assert engine.num_answers == 3
    with torch.no_grad():
        actor.model.transformer.ln_f.weight[0] = float('nan')
    with pytest.raises(FloatingPointError, match='log-probs of the actor are not finite'):
        CopyEngine().begin(actor)


@pytest.mark.parametrize('around', ['begin', 'generate'])
def test_no_engine_that_copies_weights_goes_around_the_check(around):
    with pytest.raises(TypeError, match='Mine copies weights, .* write transfer and answer, not begin and generate'):
        type('Mine', (CopyEngine,), {around: lambda self, given: None})
    with pytest.raises(TypeError, match='Mine copies weights'):
        type('Mine', (RolloutEngine,), {'abilities': Abilities(copies_weights=True)})
    with pytest.raises(TypeError, match='Mine does not say'):
        type('Mine', (RolloutEngine,), {})
    with pytest.raises(TypeError, match='copies_weights'):
        Abilities(reproducible=True)  # type: ignore[call-arg]


def test_a_worker_that_does_not_check_is_noticed(monkeypatch):
    finish = RolloutWorker.finish

    def unchecked(self: Any, manifest: Any) -> None:
        finish(self, manifest)
        self.difference = None

    monkeypatch.setattr(RolloutWorker, 'finish', unchecked)
    with pytest.raises(RuntimeError, match=r'worker 0 answered without having held its log-probs'):
        generated(Remote(), actor_of())


def test_differences_and_dtypes_by_hand():
    two = math.log(2)
    numbers = {'prompt_ids': ((1,), (1, 2)), 'tokens': ((3, 4), (5, 6)), 'logprobs': ((-two, -3.0), (-1.0, -1.25))}
    of_two = Handshake(engine='Mine', dtype=torch.float32, **numbers)
    assert of_two.difference([(3, -two), (5, -1.0)]) == 0
    assert of_two.difference([(4, -3.25), (5, -1.125)]) == 0.25  # the same tokens, other log-probs
    # 9 is not among the top tokens: the log-prob of 5 or 9 has moved by at least half of -1 - -1.25
    assert of_two.difference([(3, -two), (9, -1.0)]) == 0.125
    assert of_two.check([(3, -two + 0.0156), (5, -1.0)]) == pytest.approx(0.0156)
    with pytest.raises(RuntimeError, match='Mine: .* by 0.031 nats, where float32 explains 0.02'):
        of_two.check([(3, -two + 0.03125), (5, -1.0)])
    assert of_two.check([(3, -two + 0.03125), (5, -1.0)], torch.float16) == pytest.approx(0.03125)
    with pytest.raises(RuntimeError, match='where bfloat16 and float32 explain 0.5'):
        of_two.check([(3, -two + 1), (5, -1.0)], torch.bfloat16)
    with pytest.raises(RuntimeError, match='by nan nats'):
        of_two.check([(3, math.nan), (5, -1.0)])
    with pytest.raises(RuntimeError, match='explains 0.001'):
        replace(of_two, tolerance=0.001).check([(3, -two + 0.0156), (5, -1.0)])
