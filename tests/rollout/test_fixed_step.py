"""Decoding in fixed shapes gives the tokens of plain decoding, and captures graphs on a GPU. The conditions of a
capture and the state after a failed one are tested on a fake of torch's allocator and graphs, which behaves like torch
2.11: ending a failed capture fails, and the pool stays in capture."""

from __future__ import annotations

import types
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
import transformers
from engine_calls import assert_same, generated, prompts_of

import chatgpt.rollout.hf
import chatgpt.rollout.local.run
from chatgpt.nn import Actor
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams
from chatgpt.rollout.engine import changing_shapes
from chatgpt.rollout.local.fixed_step import HostWatch, row_bucket, slot_bucket
from chatgpt.strategies import FSDPStrategy, tensor_ranks
from chatgpt.testing import FAMILIES, tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.types import Prompt

SETTINGS = {
    'greedy': {'do_sample': False, 'eos_token_ids': (2, 5)},
    'plain': {'temperature': 0.8},
    'ends': {'eos_token_ids': tuple(range(2, 20)), 'min_new_tokens': 3},
    'filtered': {'eos_token_ids': (7,), 'top_k': 9, 'top_p': 0.9},
    'stop': {'stop': lambda ids: len(ids) >= 2 and sum(ids[-2:]) % 5 == 0},
}


def test_buckets_by_hand():
    found = [row_bucket(n, 200) for n in (1, 2, 3, 5, 9, 17, 32, 33, 64, 65, 199)]
    assert found == [1, 2, 4, 8, 16, 32, 32, 64, 64, 96, 200]
    assert [row_bucket(n, 5) for n in (1, 3, 5)] == [1, 4, 5]
    assert [slot_bucket(w, 600) for w in (1, 256, 257, 599)] == [256, 256, 512, 600]


@pytest.mark.parametrize(
    ('family', 'settings', 'max_batch_size'),
    [*((family, 'ends', 3) for family in FAMILIES), *(('gpt2', settings, 256) for settings in SETTINGS)],
)
def test_tokens_are_those_of_the_ordinary_decode(family, settings, max_batch_size):
    model = tiny_causal_lm(family, tie_word_embeddings=False)
    sampling = SamplingParams(max_new_tokens=11, **SETTINGS[settings])
    plain, fixed = (
        generated(LocalEngine(fixed_steps=fixed, max_batch_size=max_batch_size), model, sampling)
        for fixed in (False, True)
    )
    assert_same(plain, fixed)
    if settings == 'ends':
        assert len({s.num_actions for s in fixed}) > 2


def test_another_call_of_the_phase_reuses_the_steps():
    actor = Actor(tiny_causal_lm('gpt2'))
    sampling = SamplingParams(max_new_tokens=9, eos_token_ids=tuple(range(2, 12)))
    engine, made = LocalEngine(fixed_steps=True), []
    engine.begin(actor)
    for indices in (range(8), range(100, 108), range(200, 208)):
        call = Call.of(prompts_of(), sampling, seed=5, indices=indices)
        plain = generated(LocalEngine(fixed_steps=False), actor, sampling, indices=indices)
        assert_same(engine.generate(call), plain)
        made.append(engine._fixed)
    assert made[0] is made[1] is made[2] is not None
    engine.end()
    assert engine._fixed is None


@pytest.mark.gpu
@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('settings', SETTINGS)
def test_graphs_draw_what_calls_draw(family, settings):
    model = tiny_causal_lm(family, tie_word_embeddings=False).cuda()
    sampling = SamplingParams(max_new_tokens=40, **SETTINGS[settings])
    engine = LocalEngine()
    engine.begin(Actor(model))
    graphs = engine.generate(Call.of(prompts_of(), sampling, seed=5, indices=range(8)))
    assert engine._fixed is not None
    host_mask = family == 'bloom' and int(transformers.__version__.split('.')[1]) < 23  # made from a number of the host
    assert bool(engine._fixed._graphs) != host_mask
    engine.end()
    assert_same(generated(LocalEngine(fixed_steps=False), model, sampling), graphs)


# ---------------------------------------------------------------------- attention backends


CUDA = torch.device('cuda', 0)


@pytest.mark.parametrize(
    ('engine', 'during'),
    [
        (LocalEngine(fixed_steps=False), [False] * 5),
        (LocalEngine(fixed_steps=True), [False] * 5),
        (HFEngine(), [False] * 5),
    ],
)
def test_cudnn_is_left_out_where_shapes_change(engine, during, monkeypatch):
    for module in (chatgpt.rollout.hf, chatgpt.rollout.local.run):
        monkeypatch.setattr(module, 'changing_shapes', lambda device: changing_shapes(CUDA))
    model, seen = tiny_causal_lm('gpt2'), []
    engine.begin(Actor(model))
    model.transformer.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    engine.generate(Call.of(prompts_of((3,)), SamplingParams(max_new_tokens=5), seed=1, indices=[0]))
    engine.end()
    assert seen == during
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_setting_of_the_users_own_stays():
    with changing_shapes(torch.device('cpu')):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with changing_shapes(CUDA):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


# ---------------------------------------------------------------- conditions of a CUDA graph

PROMPTS = [Prompt(ids=torch.tensor(ids)) for ids in ([5, 9, 3], [4], [7, 8, 9, 10])]
SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.8)


class Capturing(LocalEngine):
    """Captures on the CPU, with the fake graphs."""

    def captures(self, device):
        return self._can_capture


class FakeCuda:
    """A fake of the parts of torch.cuda that a capture uses."""

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
        def graph(graph, pool, stream, capture_error_mode):
            assert capture_error_mode == 'thread_local'
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
    return [s.response_ids.tolist() for s in generated(engine, model, SAMPLING, PROMPTS)]


def test_a_capture_that_breaks_off_leaves_the_allocator_and_the_tokens_whole(monkeypatch):
    model = tiny_causal_lm('gpt2')
    want = phase(LocalEngine(fixed_steps=False), model)
    cuda = FakeCuda(monkeypatch, fails='CUDA error: operation not permitted when stream is capturing\nmore')
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


def decode_in_parts(failing: int) -> tuple[list[list[int]], list[list[int]], int, bool]:
    """Decodes with half of a model, in graphs that this process captures unless it is the failing one."""
    tensor_ranks.TensorGroup.capturable = True  # type: ignore[method-assign, assignment]
    captures, failed, found = 0, False, []
    with pytest.MonkeyPatch.context() as patch, FSDPStrategy(device='cpu', tensor_parallel=2) as strategy:
        FakeCuda(patch, fails='')
        patch.setattr(torch.cuda, 'CUDAGraph', lambda: types.SimpleNamespace(replay=lambda: None))

        @contextmanager
        def graph(*_, **__):
            nonlocal captures
            if strategy.processes.rank == failing:  # before a collective, as captures run none
                raise RuntimeError('out of memory')
            captures += 1
            yield

        patch.setattr(torch.cuda, 'graph', graph)
        prepared = strategy.prepare(Actor(tiny_causal_lm('llama', heads=4)))
        call = Call.of(PROMPTS, SAMPLING, seed=5, indices=range(3))
        for engine in (Capturing(fixed_steps=True), LocalEngine(fixed_steps=False)):
            with strategy.full_model(prepared) as part, warnings.catch_warnings():
                warnings.simplefilter('ignore')
                engine.begin(part)
                found.append([s.response_ids.tolist() for s in engine.generate(call)])
                failed = failed or not engine._can_capture
                engine.end()
                failed = failed or not engine._can_capture
    return found[0], found[1], captures, failed


def test_processes_that_share_a_model_capture_together_or_not_at_all():
    for failing in (1, -1):
        for rank, (tokens, plain, captures, failed) in enumerate(run_distributed(decode_in_parts, 2, failing)):
            if failing == 1:  # the other one has made one graph, and uses no more
                assert tokens == plain and failed and captures == (1 if rank == 0 else 0)
            else:
                assert captures >= 1 and not failed


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda x: x + torch.tensor(0.0), 'aten.lift_fresh'),  # as BLOOM's mask in transformers 5.17
        (lambda x: x if x[0, 0, 0] < 1e9 else -x, 'aten.(is_nonzero|item)'),
    ],
)
def test_a_model_that_makes_a_tensor_from_a_number_or_reads_one_is_never_captured(change, message, monkeypatch):
    model = tiny_causal_lm('gpt2')
    want = phase(LocalEngine(fixed_steps=False), model)
    cuda = FakeCuda(monkeypatch, fails='not reached')
    forward = model.transformer.h[0].forward
    model.transformer.h[0].forward = lambda x, *args, **kwargs: forward(change(x), *args, **kwargs)
    with pytest.warns(UserWarning, match=f'it needs the host: {message}'):
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
    """Negative control of the watch: the step of a supported model is captured."""
    if family == 'bloom' and int(transformers.__version__.split('.')[1]) < 23:
        pytest.skip('makes its mask from a number of the host')
    cuda = FakeCuda(monkeypatch, fails='reached')
    engine = Capturing(fixed_steps=True)
    with pytest.warns(UserWarning, match='reached'):
        generated(engine, tiny_causal_lm(family), SamplingParams(max_new_tokens=4, **settings), PROMPTS)
    assert cuda.captures == 1


DEVICE = torch.device('meta')
MADE = ('aten.detach_', 'aten.lift_fresh')
"""operators dispatched by `torch.tensor`: the former up to torch 2.13, the latter in 2.15"""


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
        (lambda x, host: float(host[0]), None),  # on the CPU only
    ],
)
def test_what_the_watch_sees_between_two_devices(act, name):
    """The meta device represents a GPU."""
    x, host = torch.ones(3, device=DEVICE), torch.ones(3)
    with torch.inference_mode(), HostWatch(DEVICE) as watch:
        act(x, host)
    assert watch.found is None if name is None else watch.found.startswith(name)
