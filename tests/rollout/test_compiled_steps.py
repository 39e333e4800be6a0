"""Compiled decode steps: the tokens of plain steps, few compilations for all buckets and phases, and the fallback for
models that cannot be compiled. The quick tests compile without inductor, with the same tracing, guards and symbols.
"""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from cuda_on_cpu import pretend_cuda
from engine_calls import assert_same
from engine_calls import generated as generated_by
from torch._dynamo.utils import counters

from chatgpt.nn import Actor
from chatgpt.nn.compiled import compile_blocks
from chatgpt.rollout import LocalEngine, SamplingParams
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Prompt

PROMPTS = [Prompt(ids=torch.arange(3, 5 + i % 4)) for i in range(9)]
SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.9, eos_token_ids=tuple(range(2, 14)), min_new_tokens=2)
FILTERED = SamplingParams(max_new_tokens=4, top_k=9, top_p=0.8)


def generated(engine, actor, seed=0, sampling=SAMPLING, prompts=PROMPTS):
    return generated_by(engine, actor, sampling, prompts, seed=seed)


def compiled_graphs():
    return counters['stats']['unique_graphs']


def phases(actor, engine):
    """Runs three phases with different weights, in which responses end one after another. Returns the number of
    compilations in each."""
    plain, found = LocalEngine(fixed_steps=False, attention='plain'), []
    for phase in range(3):
        before = compiled_graphs()
        prompts = PROMPTS[: 9 - 3 * (phase % 2)]
        assert_same(generated(engine, actor, phase, prompts=prompts), generated(plain, actor, phase, prompts=prompts))
        found.append(compiled_graphs() - before)
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.mul_(1.1)
    return found


@pytest.fixture
def traced(monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='eager'))


def test_buckets_and_phases_share_what_was_compiled(traced):
    """Steps are created again in each phase. Blocks compiled for learning do not break the graph of a decode step."""
    actor = Actor(tiny_causal_lm('gpt2'))
    compile_blocks(actor, backend='eager')
    found = phases(actor, LocalEngine(fixed_steps='compiled', keep=False))
    assert 1 <= found[0] <= 2 and found[1:] == [0, 0]
    assert not counters['graph_break']


@pytest.mark.slow
@pytest.mark.parametrize('family', ['gpt2', 'llama'])
def test_inductor_draws_the_same_tokens(family):
    torch._dynamo.reset()
    actor, engine = Actor(tiny_causal_lm(family)), LocalEngine(fixed_steps='compiled', keep=True)
    found = phases(actor, engine)
    assert 1 <= found[0] <= 2 and found[1:] == [0, 0]
    want = generated(LocalEngine(fixed_steps=False), actor, sampling=FILTERED)
    assert_same(generated(engine, actor, sampling=FILTERED), want)


def test_what_torch_cannot_compile_goes_on_without(monkeypatch):
    def compile_(step, **_):
        def broken(*args):
            raise torch._dynamo.exc.Unsupported('no such thing\nmore')

        return broken

    monkeypatch.setattr(torch, 'compile', compile_)
    actor, engine = Actor(tiny_causal_lm('gpt2')), LocalEngine(fixed_steps='compiled', keep=True)
    with pytest.warns(UserWarning, match=r'torch cannot compile this model \(no such thing\); decoding without'):
        found = generated(engine, actor)
    assert_same(found, generated(LocalEngine(), actor))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        generated(engine, actor)  # kept steps do not compile again


def test_a_gpu_captures_what_was_compiled(monkeypatch):
    """Each bucket has a watched call, a compiled call and a capture, then replays."""
    calls = []

    def compile_(step, **settings):
        assert settings == {'dynamic': True}
        return lambda *key: calls.append((key, torch.cuda.is_current_stream_capturing())) or step(*key)

    monkeypatch.setattr(torch, 'compile', compile_)
    actor = Actor(tiny_causal_lm('gpt2'))
    sampling = SamplingParams(max_new_tokens=7)
    prompts = [Prompt(ids=torch.tensor([5, 6 + i])) for i in range(3)]
    want = generated(LocalEngine(fixed_steps=False), actor, sampling=sampling, prompts=prompts)
    with pretend_cuda(), NaiveStrategy(device='cuda:0', precision='fp32') as strategy:
        on_gpu = strategy.prepare(actor)
        assert_same(generated(LocalEngine(fixed_steps='compiled'), on_gpu, sampling=sampling, prompts=prompts), want)
    assert [key for key, _ in calls] == [(4, 64)] * 2  # of six calls the first is watched, the last three are replays


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('family', ['gpt2', 'llama'])
def test_compiled_and_captured_on_a_gpu(family):
    torch._dynamo.reset()
    actor = Actor(tiny_causal_lm(family).cuda())
    engine = LocalEngine(fixed_steps='compiled', keep=True)
    assert_same(generated(engine, actor), generated(LocalEngine(fixed_steps=False), actor))
    assert engine._fixed._graphs and engine._fixed.compiled
