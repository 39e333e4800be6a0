"""Decode steps that torch compiles: the tokens of plain steps, few compilations however many buckets and phases, and
what cannot be compiled goes on without.

The quick tests compile without inductor: tracing, guards and symbols are the same.
"""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from cuda_on_cpu import pretend_cuda
from engine_calls import assert_same
from engine_calls import drawn as drawn_of
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


def drawn(engine, actor, seed=0, sampling=SAMPLING, prompts=PROMPTS):
    return drawn_of(engine, actor, sampling, prompts, seed=seed)


def compiled_graphs():
    return counters['stats']['unique_graphs']


def phases(actor, engine):
    """Three phases whose responses end one after another, with other weights each time; how often torch compiled in
    each."""
    plain, found = LocalEngine(fixed_steps=False, attention='plain'), []
    for phase in range(3):
        before = compiled_graphs()
        prompts = PROMPTS[: 9 - 3 * (phase % 2)]
        assert_same(drawn(engine, actor, phase, prompts=prompts), drawn(plain, actor, phase, prompts=prompts))
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
    """Of steps that are made anew for each phase. Blocks that are compiled for learning leave decode steps whole."""
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
    want = drawn(LocalEngine(fixed_steps=False), actor, sampling=FILTERED)
    assert_same(drawn(engine, actor, sampling=FILTERED), want)


def test_what_torch_cannot_compile_goes_on_without(monkeypatch):
    def compile_(step, **_):
        def broken(*args):
            raise torch._dynamo.exc.Unsupported('no such thing\nmore')

        return broken

    monkeypatch.setattr(torch, 'compile', compile_)
    actor, engine = Actor(tiny_causal_lm('gpt2')), LocalEngine(fixed_steps='compiled', keep=True)
    with pytest.warns(UserWarning, match=r'torch cannot compile this model \(no such thing\); decoding without'):
        found = drawn(engine, actor)
    assert_same(found, drawn(LocalEngine(), actor))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        drawn(engine, actor)  # steps that are kept do not try again


def test_a_gpu_captures_what_was_compiled(monkeypatch):
    """Per bucket: a call that is watched, one that compiles, a capture; then replays."""
    calls = []

    def compile_(step, **settings):
        assert settings == {'dynamic': True}
        return lambda *key: calls.append((key, torch.cuda.is_current_stream_capturing())) or step(*key)

    monkeypatch.setattr(torch, 'compile', compile_)
    actor = Actor(tiny_causal_lm('gpt2'))
    sampling = SamplingParams(max_new_tokens=7)
    prompts = [Prompt(ids=torch.tensor([5, 6 + i])) for i in range(3)]
    want = drawn(LocalEngine(fixed_steps=False), actor, sampling=sampling, prompts=prompts)
    with pretend_cuda(), NaiveStrategy(device='cuda:0', precision='fp32') as strategy:
        on_gpu = strategy.prepare(actor)
        assert_same(drawn(LocalEngine(fixed_steps='compiled'), on_gpu, sampling=sampling, prompts=prompts), want)
    assert [key for key, _ in calls] == [(4, 64)] * 2  # compiled, captured; the first of six was watched, three replay


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('family', ['gpt2', 'llama'])
def test_compiled_and_captured_on_a_gpu(family):
    torch._dynamo.reset()
    actor = Actor(tiny_causal_lm(family).cuda())
    engine = LocalEngine(fixed_steps='compiled', keep=True)
    assert_same(drawn(engine, actor), drawn(LocalEngine(fixed_steps=False), actor))
    assert engine._fixed._graphs and engine._fixed.compiled
