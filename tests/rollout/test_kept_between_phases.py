"""State that the local engine and a strategy keep between collect phases: the tokens are those of new state, with the
new weights, without new memory or captures; on the pretend device and on a CPU."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
from cuda_on_cpu import pretend_cuda
from engine_calls import counted_captures
from engine_calls import generated as generated_by

from chatgpt.nn import Actor
from chatgpt.nn.lora import lora_layers
from chatgpt.rollout import LocalEngine, SamplingParams
from chatgpt.strategies import FSDPStrategy, NaiveStrategy
from chatgpt.testing import FAMILIES, tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.collect import Collector
from chatgpt.types import Prompt

SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.9, eos_token_ids=(2,))
PROMPTS = [Prompt(ids=torch.arange(3, 5 + i % 4)) for i in range(4)]


def generated(engine, actor, seed=0, prompts=PROMPTS):
    samples = generated_by(engine, actor, SAMPLING, prompts, seed=seed)
    return [(s.response_ids.tolist(), s.logprobs.tolist()) for s in samples]


@torch.no_grad()
def learn(module, by=0.1):
    """Changes every trained weight in place, like an optimizer."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.mul_(1 + by).add_(by / 10)


KINDS = {'tied': {}, 'lora': {'lora_rank': 2}, 'hydra': {'num_layers_unfrozen': 1}}


def make(kind):
    torch.manual_seed(3)
    actor = Actor(tiny_causal_lm('gpt2'), **KINDS[kind])
    with torch.no_grad():
        for layer in lora_layers(actor.model).values():
            layer.lora_B.fill_(0.2)
    return actor


def phases(strategy, kind, engine, dtype=torch.float32):
    """Runs three phases of a collector with learning in between. Returns their samples, and after each the number of
    captures, the policy's address and the cache's address."""
    found, seen, at = [], [], []
    actor = make(kind)
    with strategy:
        actor, _ = strategy.prepare((actor, torch.optim.SGD(actor.parameters(), lr=0.1)))

        @contextmanager
        def policy(**_):
            with strategy.full_model(actor, dtype) as model:
                seen.append(next(model.parameters()).data_ptr())
                yield model

        collector = Collector(strategy, engine, SAMPLING, policy=policy)
        with counted_captures() as made:
            for phase in range(3):
                samples = collector.generate(PROMPTS, indices=range(4), seed=phase)
                found.append([(s.response_ids.tolist(), s.logprobs.tolist()) for s in samples])
                held = engine._cache.layers[0].keys.data_ptr() if engine._cache else None
                at.append((len(made), seen[-1], held))
                learn(strategy.unwrap(actor))
        collector.free()
    assert engine._cache is engine._fixed is strategy._kept_copy._copied is None
    assert len({str(phase) for phase in found}) == 3  # weights and draws differ
    return found, at


@pytest.mark.parametrize('kind', ['lora', 'hydra'])
def test_later_phases_capture_nothing_and_draw_what_a_fresh_engine_draws(kind):
    with pretend_cuda():
        strategies = (NaiveStrategy(seed=3, precision='fp32', device='cuda:0') for _ in range(2))
        fresh, captures = phases(next(strategies), kind, LocalEngine(keep=False))
        kept, at = phases(next(strategies), kind, LocalEngine())
    assert kept == fresh
    # nothing is kept from the first phase; from the second on everything is
    assert at[0][2] is None and at[0][0] > 0
    assert at[2][0] == at[1][0] > at[0][0]
    assert at[2][2] == at[1][2] is not None
    assert captures[2][0] > captures[1][0] > captures[0][0]


@pytest.mark.parametrize('kind', ['tied', 'lora'])
def test_a_copy_in_16_bits_keeps_its_memory_and_takes_the_new_weights(kind):
    strategies = (NaiveStrategy(seed=3, precision='fp32', device='cpu') for _ in range(2))
    fresh, _ = phases(next(strategies), kind, LocalEngine(), torch.bfloat16)
    kept, at = phases(next(strategies), kind, LocalEngine(keep=True), torch.bfloat16)
    assert kept == fresh
    assert len({copy for _, copy, _ in at}) == 1 and len({cache for *_, cache in at}) == 1


def kept_under_fsdp():
    fresh, _ = phases(FSDPStrategy(seed=3, precision='fp32'), 'lora', LocalEngine(), torch.bfloat16)
    kept, at = phases(FSDPStrategy(seed=3, precision='fp32'), 'lora', LocalEngine(keep=True), torch.bfloat16)
    return kept == fresh, len({copy for _, copy, _ in at})


def test_a_gathered_copy_keeps_its_memory():
    assert run_distributed(kept_under_fsdp, 2) == [(True, 1)] * 2


@pytest.mark.parametrize('family', FAMILIES)
def test_steps_that_are_kept_draw_what_fresh_ones_draw(family):
    """Fixed steps on a CPU give the tokens and log-probs of a new engine, to the bit."""
    actor, other = (Actor(tiny_causal_lm(family, tie_word_embeddings=False)) for _ in range(2))
    engine = LocalEngine(fixed_steps=True, keep=True)
    steps = []
    for phase in range(3):
        # fewer prompts, then a longer one: the steps fit because sizes are rounded up
        prompts = PROMPTS[: 4 - phase] if phase < 2 else [Prompt(ids=torch.arange(3, 20))]
        want = generated(LocalEngine(fixed_steps=True), other, phase, prompts=prompts)
        assert generated(engine, actor, phase, prompts=prompts) == want
        steps.append(engine._fixed)
        learn(actor), learn(other)
    assert steps[0] is steps[1] is steps[2] is not None


@pytest.mark.parametrize('change', ['adapters off', 'other memory'])
def test_steps_end_with_what_they_were_made_for(change):
    """Steps are dropped if adapters are switched off, a weight is moved or the actor changes, and hold no reference to
    the actor between phases."""
    engine, actor = LocalEngine(fixed_steps=True, keep=True), make('lora')
    first = generated(engine, actor)
    steps = engine._fixed
    assert generated(engine, actor) == first and engine._fixed is steps and steps.actor is None
    if change == 'adapters off':
        for layer in lora_layers(actor).values():
            layer.adapter_on = False
    else:
        weight = actor.model.transformer.h[0].mlp.c_fc.weight
        weight.data = weight.data.clone() * 2
    changed = generated(engine, actor)
    assert engine._fixed is not steps
    assert changed == generated(LocalEngine(fixed_steps=True), actor) != first
    steps = engine._fixed
    assert generated(engine, make('lora')) == first and engine._fixed is not steps


def test_an_interruption_leaves_nothing_that_is_not_finite():
    """After a phase with NaN in the weights, and so in the cache, the next one has a new cache."""
    engine, actor = LocalEngine(fixed_steps=True, keep=True), make('tied')
    want = generated(engine, actor)
    kept = engine._cache
    good = deepcopy(actor.state_dict())
    with torch.no_grad():
        actor.model.transformer.h[0].attn.c_attn.weight.fill_(float('nan'))
    with pytest.raises(FloatingPointError):
        generated(engine, actor)
    assert engine._cache is engine._fixed is None
    actor.load_state_dict(good)
    assert generated(engine, actor) == want
    assert engine._cache is not kept

    def interrupt(ids):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generated_by(engine, actor, SamplingParams(max_new_tokens=6, stop=interrupt), PROMPTS, seed=0)
    assert engine._cache is engine._fixed is None
    assert generated(engine, actor) == want


def test_a_copy_that_no_longer_fits_is_made_anew(with_16_bits):
    strategy, actor = NaiveStrategy(precision='bf16', device='cpu'), make('lora')
    strategy.keep_copy(strategy, True)
    with strategy.full_model(actor) as first:
        pass
    with strategy.full_model(actor) as again:
        assert again is first
        with strategy.full_model(actor) as inner:  # a copy in use is not shared
            assert inner is not first
    with pytest.raises(KeyboardInterrupt), strategy.full_model(actor):
        raise KeyboardInterrupt
    assert strategy._kept_copy._copied is None
    with strategy.full_model(actor) as kept:
        pass
    with strategy.full_model(make('tied')) as other:  # another module: another copy
        assert other is not kept
    with strategy.full_model(actor) as first:
        pass
    actor.model.transformer.h[0].attn.scale_attn_weights = False
    with strategy.full_model(actor) as second:  # with other settings
        assert second is not first
        assert not second.model.transformer.h[0].attn.scale_attn_weights
    strategy.keep_copy(strategy, False)
    assert strategy._kept_copy._copied is None


def test_the_rule_by_hand():
    """Needs 5 % free memory after learning, in addition to the memory to be kept unless it is kept already."""

    def may_keep(engine, free):
        with patch.object(torch.cuda, 'mem_get_info', lambda device: (free, 1000)):
            return engine._may_keep(torch.device('cuda', 0))

    engine, always, never = LocalEngine(), LocalEngine(keep=True), LocalEngine(keep=False)
    assert not may_keep(engine, 1000)  # before the first phase the memory of learning is unknown
    engine._held_bytes = 300
    assert may_keep(engine, 350) and not may_keep(engine, 349)
    engine.keeping = True
    assert may_keep(engine, 50) and not may_keep(engine, 49)
    assert not engine._may_keep(torch.device('cpu'))
    never._held_bytes = 1
    assert may_keep(always, 0) and not may_keep(never, 1000)
    engine = LocalEngine()
    generated(engine, make('tied'))  # on a CPU
    assert engine._cache is engine._fixed is None and not engine.keeping
