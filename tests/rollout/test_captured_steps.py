"""Captured decode steps on the pretend device: how many graphs a long generation takes, what calls share, and where the
host waits for the device."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cuda_on_cpu import pretend_cuda
from engine_calls import assert_same, counted_captures, generated, generated_turns, prompts_of

from chatgpt.nn import Actor
from chatgpt.nn.lora import lora_layers
from chatgpt.nn.shared import SharedTrunk
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.rollout.local import fixed_step
from chatgpt.rollout.local.fixed_step import FixedSteps
from chatgpt.rollout.local.run import LocalRun
from chatgpt.rollout.local.slot_cache import SlotCache
from chatgpt.rollout.sampling import TokenSampler
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import tiny_causal_lm

ENDS = SamplingParams(max_new_tokens=12, min_new_tokens=2, eos_token_ids=tuple(range(2, 10)))


@pytest.mark.parametrize(
    ('attention', 'new', 'captures'),
    [
        # 7 numbers of rows (64, 32, .. 1), and slots 256 times 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 and the rest
        ('plain', 8192, 6 + 11),
        ('plain', 32768, 6 + 15),
        ('varlen', 8192, 7),
        ('varlen', 32768, 7),
    ],
)
def test_captures_of_a_long_generation(attention, new, captures, monkeypatch):
    """64 rows live for half of the tokens, then one after another ends. Linear buckets would take 39 and 135."""
    monkeypatch.setattr(FixedSteps, '_plain_step', lambda self, rows, slots: None)
    with pretend_cuda(), counted_captures() as made:
        device = torch.device('cuda:0')
        sampler, cache = TokenSampler(SamplingParams(max_new_tokens=new), device), SlotCache(64, 64 + new + 192)
        steps = FixedSteps(
            torch.nn.Module(), sampler, cache, 'additive', attention, 64, device, capture=True, compiled=False
        )
        for step in range(new):
            steps.run(min(64, -(-128 * (new - step) // new)), 60 + step + 1)
    assert len(made) == captures


@pytest.mark.parametrize('stop', [None, lambda ids: len(ids) > 4])
def test_end_tokens_are_read_when_the_next_step_is_queued(stop, monkeypatch):
    """Except where another row reaches its limit, prompts enter, or the host itself decides on each token."""
    actor, sampling, lags, number = Actor(tiny_causal_lm('gpt2')), replace(ENDS, stop=stop), [], 0
    want = generated(LocalEngine(max_batch_size=4), actor, sampling)
    run, read_ended = FixedSteps.run, FixedSteps.read_ended

    def counting(self, live, width):
        nonlocal number
        number += 1
        run(self, live, width)

    def reading(self, live):
        of, read = number, read_ended(self, live)
        return lambda: (lags.append(number - of), read())[1]

    monkeypatch.setattr(FixedSteps, 'run', counting)
    monkeypatch.setattr(FixedSteps, 'read_ended', reading)
    with pretend_cuda() as cuda, NaiveStrategy(device='cuda:0', precision='fp32') as strategy:
        on_gpu = strategy.prepare(actor)
        cuda.syncs.clear()
        assert_same(generated(LocalEngine(max_batch_size=4), on_gpu, sampling), want)
        waits = [(sync.where.removeprefix('chatgpt/rollout/local/').split(':'), sync.kind) for sync in cuda.syncs]
    assert {s.finish_reason for s in want} == ({'eos', 'length'} if stop is None else {'eos', 'stop'})
    assert set(lags) == ({0, 1} if stop is None else {0})
    assert stop is not None or lags.count(1) > len(lags) / 2
    assert {kind for (file, _), kind in waits if file == 'fixed_step.py'} == {'event'}
    lines, start = inspect.getsourcelines(LocalRun.compact)
    assert not [line for (file, line), _ in waits if file == 'run.py' and start <= int(line) < start + len(lines)]
    assert not [
        line for (file, line), _ in waits if file == 'slot_cache.py' and 'move' in line_of(SlotCache, int(line))
    ]


def line_of(kind: Any, line: int) -> str:
    """Returns the name of the method of a class that contains a line of its file."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if inspect.getsourcefile(method) == inspect.getsourcefile(kind):
            lines, start = inspect.getsourcelines(method)
            if start <= line < start + len(lines):
                return name
    return ''


def test_turns_that_end_by_a_token_are_those_of_the_cpu():
    """A row decodes one token more, in places that the next turn writes again."""
    actor, sampling = Actor(tiny_causal_lm('gpt2')), replace(ENDS, max_new_tokens=16)
    want = generated_turns(LocalEngine(max_batch_size=3), actor, prompts_of(), sampling)
    assert {len(turn) for turns in want for turn in turns} == {3, 4}
    with pretend_cuda(), NaiveStrategy(device='cuda:0', precision='fp32') as strategy:
        found = generated_turns(LocalEngine(max_batch_size=3), strategy.prepare(actor), prompts_of(), sampling)
    assert found == want


def test_the_graphs_of_two_samplings_are_kept():
    """As those of a run and of its evaluation, which alternate."""
    kinds = [SamplingParams(max_new_tokens=8, **own) for own in ({}, {'do_sample': False}, {'top_k': 3})]
    actor, seen = Actor(tiny_causal_lm('gpt2')), []
    with pretend_cuda(), NaiveStrategy(device='cuda:0', precision='fp32') as strategy, counted_captures() as made:
        engine = LocalEngine()
        engine.begin(strategy.prepare(actor))
        for kind in (0, 1, 0, 1, 2, 1, 0):
            samples = engine.generate(Call.of(prompts_of(), kinds[kind], seed=5, indices=range(8)))
            assert_same(samples, generated(LocalEngine(fixed_steps=False), actor, kinds[kind]))
            seen.append(len(made))
        engine.end()
    first = seen[0]
    assert first > 0 and seen == [first * n for n in (1, 2, 2, 2, 3, 3, 4)]


def test_a_process_captures_on_one_stream():
    fixed_step._side_stream.cache_clear()
    actor, streams = Actor(tiny_causal_lm('gpt2')), []
    with pretend_cuda(), NaiveStrategy(device='cuda:0', precision='fp32') as strategy, counted_captures() as made:
        on_gpu, kept = strategy.prepare(actor), torch.cuda.Stream
        with patch.object(torch.cuda, 'Stream', lambda device: streams.append(kept(device)) or streams[-1]):
            for _ in range(2):
                generated(LocalEngine(), on_gpu, SamplingParams(max_new_tokens=4))
    assert len(made) == 2 and len(streams) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_kept_graphs_read_the_current_factors_of_adapters_on_a_gpu():
    actor = SharedTrunk(tiny_causal_lm('llama')).actor(2).cuda()
    engines = LocalEngine(keep=True), LocalEngine(fixed_steps=False)
    for _ in range(3):
        with torch.no_grad():
            for layer in lora_layers(actor.model).values():
                layer.lora_B.add_(0.05)
        found, want = (generated(engine, actor, SamplingParams(max_new_tokens=24)) for engine in engines)
        assert_same(found, want)
    assert engines[0]._fixed is not None and engines[0]._fixed._graphs
