"""What may become a CUDA graph, and what a capture that breaks off leaves behind, on a stand-in for torch's allocator
and graphs that does what torch 2.11 does: ending a capture that was broken off fails, and the pool stays in capture."""

from __future__ import annotations

import types
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
import transformers
from engine_calls import drawn

from chatgpt.rollout import LocalEngine, SamplingParams
from chatgpt.rollout.local.fixed_step import HostWatch
from chatgpt.testing import FAMILIES, tiny_causal_lm
from chatgpt.types import Prompt

PROMPTS = [Prompt(ids=torch.tensor(ids)) for ids in ([5, 9, 3], [4], [7, 8, 9, 10])]
SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.8)


class Capturing(LocalEngine):
    """Captures on the CPU, where the stand-in is."""

    def captures(self, device):
        return self._can_capture


class Cuda:
    """torch.cuda as far as a capture uses it."""

    def __init__(self, monkeypatch, fails: str | None) -> None:
        self.underway: set[tuple[int, int]] = set()
        self.captures, self.stream, self.generator = 0, 'main', 'as it was'
        self.fails = fails
        cuda = self

        class Generator:
            def clone_state(self):
                return cuda.generator

            def graphsafe_set_state(self, state):
                cuda.generator = state

        @contextmanager
        def graph(graph, pool, stream):
            assert pool not in cuda.underway, 'beginAllocateToPool: already recording to mempool_id'
            cuda.captures += 1
            cuda.underway.add(pool)
            cuda.stream, cuda.generator = stream, 'in a capture'
            try:
                yield
                raise RuntimeError(cuda.fails)
            except RuntimeError:
                raise RuntimeError('CUDA error: operation failed due to a previous error during capture') from None

        def end(device, pool):
            if pool not in cuda.underway:
                raise RuntimeError('endAllocatePool: not currently recording to mempool_id')
            cuda.underway.remove(pool)

        def synchronize(device):
            assert not cuda.underway, 'captures_underway.empty() INTERNAL ASSERT FAILED'

        fakes = {
            'CUDAGraph': lambda: types.SimpleNamespace(replay=lambda: pytest.fail('there is nothing to replay')),
            'graph_pool_handle': lambda: (0, 1),
            'device': lambda device: nullcontext(),
            'Stream': lambda device: 'side',
            'current_stream': lambda device: cuda.stream,
            'set_stream': lambda stream: setattr(cuda, 'stream', stream),
            'default_generators': (Generator(),),
            'graph': graph,
            'synchronize': synchronize,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, '_cuda_endAllocateToPool', end, raising=False)


def phase(engine, model):
    return [s.response_ids.tolist() for s in drawn(engine, model, SAMPLING, PROMPTS)]


def test_a_capture_that_breaks_off_leaves_the_allocator_and_the_tokens_whole(monkeypatch):
    model = tiny_causal_lm('gpt2')
    want = phase(LocalEngine(fixed_steps=False), model)
    cuda = Cuda(monkeypatch, fails='CUDA error: operation not permitted when stream is capturing\nmore')
    engine = Capturing(fixed_steps=True)
    with pytest.warns(UserWarning, match=r'no CUDA graph of this model \(CUDA error: operation not permitted when str'):
        assert phase(engine, model) == want
    assert (cuda.underway, cuda.stream, cuda.generator) == (set(), 'main', 'as it was')
    assert cuda.captures == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert phase(engine, model) == want  # the next phase does not try again
    assert cuda.captures == 1
    with pytest.warns(UserWarning, match='no CUDA graph'):  # another model does
        phase(engine, tiny_causal_lm('llama'))
    assert cuda.captures == 2


@pytest.mark.parametrize(
    ('change', 'told'),
    [
        (lambda x: x + torch.tensor(0.0), 'aten.lift_fresh'),  # as BLOOM's mask in transformers 5.17
        (lambda x: x if x[0, 0, 0] < 1e9 else -x, 'aten.(is_nonzero|item)'),
    ],
)
def test_a_model_that_makes_a_tensor_from_a_number_or_reads_one_is_never_captured(change, told, monkeypatch):
    model = tiny_causal_lm('gpt2')
    want = phase(LocalEngine(fixed_steps=False), model)
    cuda = Cuda(monkeypatch, fails='not reached')
    forward = model.transformer.h[0].forward
    model.transformer.h[0].forward = lambda x, *args, **kwargs: forward(change(x), *args, **kwargs)
    with pytest.warns(UserWarning, match=f'it needs the host: {told}'):
        assert phase(Capturing(fixed_steps=True), model) == want
    assert cuda.captures == 0


@pytest.mark.parametrize(
    ('family', 'settings'),
    [
        *((family, {'top_k': 5, 'top_p': 0.9, 'eos_token_ids': (2, 5), 'min_new_tokens': 2}) for family in FAMILIES),
        ('gpt2', {}),
        ('gpt2', {'do_sample': False}),
    ],
)
def test_our_own_step_takes_nothing_from_the_host(family, settings, monkeypatch):
    """Negative control of the watch: trunk, head, draw and bookkeeping pass, and are captured."""
    if family == 'bloom' and int(transformers.__version__.split('.')[1]) < 23:
        pytest.skip('makes its mask from a number of the host')
    cuda = Cuda(monkeypatch, fails='reached')
    engine = Capturing(fixed_steps=True)
    with pytest.warns(UserWarning, match='reached'):
        drawn(engine, tiny_causal_lm(family), SamplingParams(max_new_tokens=4, **settings), PROMPTS)
    assert cuda.captures == 1


DEVICE = torch.device('meta')
MADE = ('aten.detach_', 'aten.lift_fresh')
"""what is seen of `torch.tensor`: the former up to torch 2.13, the latter in 2.15"""


@pytest.mark.parametrize(
    ('act', 'name'),
    [
        (lambda x, host: host.to(DEVICE), 'aten.to'),
        (lambda x, host: x.copy_(host), 'aten.copy_'),
        (lambda x, host: torch.tensor(1.0, device=DEVICE), MADE),
        (lambda x, host: x.new_tensor([1.0]), MADE),
        (lambda x, host: x + 1, None),
        (lambda x, host: x + torch.zeros(()), None),
        (lambda x, host: torch.full((), 2.0, device=DEVICE), None),
        (lambda x, host: x[1:2].to(torch.float64), None),
        (lambda x, host: torch.where(x > 0, x, 0.0), None),
        (lambda x, host: float(host[0]), None),  # of the CPU itself
    ],
)
def test_what_the_watch_sees_between_two_devices(act, name):
    """The meta device stands for a GPU."""
    x, host = torch.ones(3, device=DEVICE), torch.ones(3)
    with torch.inference_mode(), HostWatch(DEVICE) as watch:
        act(x, host)
    assert watch.found is None if name is None else watch.found.startswith(name)
