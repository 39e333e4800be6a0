"""What the local engine and a strategy keep from one collect phase to the next: the same tokens as without, new weights
seen, no new memory and no new capture; on the pretend device and on a CPU."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
from cuda_on_cpu import pretend_cuda
from engine_calls import drawn as drawn_of

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


def drawn(engine, actor, seed=0, prompts=PROMPTS):
    samples = drawn_of(engine, actor, SAMPLING, prompts, seed=seed)
    return [(s.response_ids.tolist(), s.logprobs.tolist()) for s in samples]


@torch.no_grad()
def learn(module, by=0.1):
    """Every trained weight changes where it lies, as an optimizer does it."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.mul_(1 + by).add_(by / 10)


@contextmanager
def counted_captures():
    """How often a graph was captured."""
    made = []

    def capture(graph, *args, **kwargs):
        made.append(graph)
        return kept(graph, *args, **kwargs)

    kept = torch.cuda.graph
    with patch.object(torch.cuda, 'graph', capture):
        yield made


KINDS = {'tied': {}, 'lora': {'lora_rank': 2}, 'hydra': {'num_layers_unfrozen': 1}}


def make(kind):
    torch.manual_seed(3)
    actor = Actor(tiny_causal_lm('gpt2'), **KINDS[kind])
    with torch.no_grad():
        for layer in lora_layers(actor.model).values():
            layer.lora_B.fill_(0.2)
    return actor


def phases(strategy, kind, engine, dtype=torch.float32):
    """Samples of three phases with learning between them, through a collector; and what was there at the end of each:
    captures so far, the policy's address and the cache's."""
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
    assert len({str(phase) for phase in found}) == 3  # weights and draws are others
    return found, at


@pytest.mark.parametrize('kind', ['lora', 'hydra'])
def test_later_phases_capture_nothing_and_draw_what_a_fresh_engine_draws(kind):
    with pretend_cuda():
        strategies = (NaiveStrategy(seed=3, precision='fp32', device='cuda:0') for _ in range(2))
        fresh, captures = phases(next(strategies), kind, LocalEngine(keep=False))
        kept, at = phases(next(strategies), kind, LocalEngine())
    assert kept == fresh
    # by the rule nothing is kept from the first phase; from the second on nothing is made anew
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
    """Fixed steps on a CPU: the tokens and log-probs of an engine that begins anew, to the bit."""
    actor, other = (Actor(tiny_causal_lm(family, tie_word_embeddings=False)) for _ in range(2))
    engine = LocalEngine(fixed_steps=True, keep=True)
    steps = []
    for phase in range(3):
        # first longer prompts, then fewer: sizes are rounded up, so the steps fit
        prompts = PROMPTS[: 4 - phase] if phase < 2 else [Prompt(ids=torch.arange(3, 20))]
        want = drawn(LocalEngine(fixed_steps=True), other, phase, prompts=prompts)
        assert drawn(engine, actor, phase, prompts=prompts) == want
        steps.append(engine._fixed)
        learn(actor), learn(other)
    assert steps[0] is steps[1] is steps[2] is not None


@pytest.mark.parametrize('change', ['adapters off', 'other memory'])
def test_steps_end_with_what_they_were_made_for(change):
    """Adapters switched off, a weight in other memory, another actor. They do not hold an actor that is gone."""
    engine, actor = LocalEngine(fixed_steps=True, keep=True), make('lora')
    first = drawn(engine, actor)
    steps = engine._fixed
    assert drawn(engine, actor) == first and engine._fixed is steps and steps.actor is None
    if change == 'adapters off':
        for layer in lora_layers(actor).values():
            layer.adapter_on = False
    else:
        weight = actor.model.transformer.h[0].mlp.c_fc.weight
        weight.data = weight.data.clone() * 2
    changed = drawn(engine, actor)
    assert engine._fixed is not steps
    assert changed == drawn(LocalEngine(fixed_steps=True), actor) != first
    steps = engine._fixed
    assert drawn(engine, make('lora')) == first and engine._fixed is not steps


def test_an_interruption_leaves_nothing_that_is_not_finite():
    """A phase whose weights are not finite writes NaN into the cache; the next one has other memory."""
    engine, actor = LocalEngine(fixed_steps=True, keep=True), make('tied')
    want = drawn(engine, actor)
    kept = engine._cache
    good = deepcopy(actor.state_dict())
    with torch.no_grad():
        actor.model.transformer.h[0].attn.c_attn.weight.fill_(float('nan'))
    with pytest.raises(FloatingPointError):
        drawn(engine, actor)
    assert engine._cache is engine._fixed is None
    actor.load_state_dict(good)
    assert drawn(engine, actor) == want
    assert engine._cache is not kept

    def interrupt(ids):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drawn_of(engine, actor, SamplingParams(max_new_tokens=6, stop=interrupt), PROMPTS, seed=0)
    assert engine._cache is engine._fixed is None
    assert drawn(engine, actor) == want


def test_a_copy_that_no_longer_fits_is_made_anew(with_16_bits):
    strategy, actor = NaiveStrategy(precision='bf16', device='cpu'), make('lora')
    strategy.keep_copy(strategy, True)
    with strategy.full_model(actor) as first:
        pass
    with strategy.full_model(actor) as again:
        assert again is first
        with strategy.full_model(actor) as inner:  # one that is in use is nobody else's
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
    with strategy.full_model(actor) as second:  # of other settings
        assert second is not first
        assert not second.model.transformer.h[0].attn.scale_attn_weights
    strategy.keep_copy(strategy, False)
    assert strategy._kept_copy._copied is None


def test_the_rule_by_hand():
    """Free after learning: what is not kept yet, and 5 %; of what is kept already, 5 %."""

    def may_keep(engine, free):
        with patch.object(torch.cuda, 'mem_get_info', lambda device: (free, 1000)):
            return engine._may_keep(torch.device('cuda', 0))

    engine, always, never = LocalEngine(), LocalEngine(keep=True), LocalEngine(keep=False)
    assert not may_keep(engine, 1000)  # before the first phase nobody knows what learning takes
    engine._held_bytes = 300
    assert may_keep(engine, 350) and not may_keep(engine, 349)
    engine.keeping = True
    assert may_keep(engine, 50) and not may_keep(engine, 49)
    assert not engine._may_keep(torch.device('cpu'))
    never._held_bytes = 1
    assert may_keep(always, 0) and not may_keep(never, 1000)
    engine = LocalEngine()
    drawn(engine, make('tied'))  # on a CPU
    assert engine._cache is engine._fixed is None and not engine.keeping
