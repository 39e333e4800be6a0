"""The vLLM engine with sleep, on the fake in tests/rollout/stand_in, and on vLLM itself if it is installed on a GPU.
See tests/real_vllm for tests with vLLM on a CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine_calls import generated as collect
from engine_calls import prompts_of
from transformers import GPT2Config, GPT2LMHeadModel

from chatgpt.nn import Actor
from chatgpt.nn.nlpo import MaskedPolicy
from chatgpt.rollout import Call, LocalEngine, SamplingParams, VLLMEngine
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing import tiny_causal_lm, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.collect import Collector
from chatgpt.trainer.policy import Policy


@pytest.fixture
def fake_vllm(stand_in, monkeypatch):
    """The fake LLM, which requires that torch's memory cache is empty when it wakes up."""
    emptied_at: list[int] = []  # number of events when torch's memory cache was emptied
    llm = importlib.import_module('vllm').LLM
    wake_up = llm.wake_up

    def emptied(self, tags):
        assert emptied_at and emptied_at[-1] == len(self.events), 'memory that torch keeps is missing here'
        return wake_up(self, tags)

    monkeypatch.setattr(llm, 'wake_up', emptied)
    made = llm.made
    monkeypatch.setattr(torch.cuda, 'empty_cache', lambda: emptied_at.append(len(made[-1].events) if made else 0))
    return llm


CONFIG = GPT2Config(vocab_size=512, n_embd=128, n_layer=2, n_head=2, n_positions=128)


@pytest.fixture
def folder(tmp_path):
    tiny_config('gpt2').save_pretrained(tmp_path)
    return tmp_path


def test_every_phase_has_the_policys_weights_and_leaves_none(fake_vllm, folder):
    model = tiny_causal_lm('gpt2')
    engine = VLLMEngine(folder)
    sampling = SamplingParams(max_new_tokens=6, do_sample=False)
    collect(engine, model, sampling)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    after = collect(engine, model, sampling)
    assert [s.response_ids.tolist() for s in after] == [
        s.response_ids.tolist() for s in collect(LocalEngine(), model, sampling)
    ]
    (llm,) = fake_vllm.made
    phase = ['wake weights', 'load', 'forget', 'wake kv_cache', 'sleep 2']
    assert llm.events == ['sleep 2', *phase, *phase]
    engine.begin(Actor(model))  # a phase without prompts, then one that fails in `begin`
    engine.end()
    assert llm.events[-5:] == phase
    llm.reset_prefix_cache = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        engine.begin(Actor(model))
    assert llm.events[-4:] == ['wake weights', 'load', 'wake kv_cache', 'sleep 2']


def test_segments_do_not_grow_where_vllm_sleeps(fake_vllm, folder, monkeypatch):
    """Its allocator does not go with them."""
    given: list[str] = []
    monkeypatch.setattr(torch._C, '_accelerator_setAllocatorSettings', given.append)
    engine = VLLMEngine(folder)
    collect(engine, tiny_causal_lm('gpt2'), SamplingParams(max_new_tokens=2, do_sample=False))
    assert given == ['expandable_segments:False']


def test_the_copy_in_16_bits_is_gone_when_the_cache_wakes_up(fake_vllm, folder, monkeypatch, with_16_bits):
    strategy = NaiveStrategy(precision='bf16', device='cpu')
    actor = strategy.prepare(Actor(tiny_causal_lm('gpt2')))
    policy, copies, alive = Policy(strategy, actor, 1.0), [], []

    @contextmanager
    def generating(**_):
        with policy.generating() as full:
            copies.extend(weakref.ref(p) for p in full.parameters())
            yield full
            del full

    wake_up = fake_vllm.wake_up

    def watched(self, tags):
        alive.append((tags[0], sum(ref() is not None for ref in copies)))
        wake_up(self, tags)

    monkeypatch.setattr(fake_vllm, 'wake_up', watched)
    engine = VLLMEngine(folder)
    collector = Collector(strategy, engine, SamplingParams(max_new_tokens=3), policy=generating)
    collector.generate(prompts_of(), indices=range(8))
    assert alive[0][0] == 'weights' and alive[0][1] == len(copies) > 0
    assert alive[1] == ('kv_cache', 0)


def test_mistakes_are_named(fake_vllm, folder):
    for option, message in (
        ({'load_format': 'auto'}, "sets 'load_format' itself"),
        ({'tensor_parallel_size': 2}, 'tensor_parallel_size=2 with 1 training processes; start a multiple'),
        ({'pipeline_parallel_size': 2}, 'pipeline_parallel_size=2, but it runs within the training processes'),
        ({'memory_share': 1.5}, 'memory_share'),
    ):
        with pytest.raises(ValueError, match=message):
            VLLMEngine(folder, **option)
    with pytest.raises(ValueError, match='begin'):
        VLLMEngine(folder).generate(Call.of([], SamplingParams(max_new_tokens=1), seed=0, indices=[]))
    actor = Actor(tiny_causal_lm('gpt2'))
    # settings that hide the policy's log-probs
    for setting in ({'top_k': 3}, {'top_p': 0.9}, {'min_new_tokens': 2}, {'stop': lambda ids: False}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            collect(VLLMEngine(folder), actor, SamplingParams(max_new_tokens=3, **setting))
    with pytest.raises(ValueError, match='changes the model'):
        VLLMEngine(folder).begin(MaskedPolicy(actor, actor, 0.9, 1.0))


@pytest.mark.skipif(importlib.util.find_spec('vllm') is not None, reason='vLLM is installed')
def test_a_missing_vllm_names_the_command():
    with pytest.raises(ImportError, match="pip install 'vllm>=0.32"):
        VLLMEngine('gpt2')


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec('vllm') is None, reason='vLLM is not installed')
def test_on_vllm_itself(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    model = GPT2LMHeadModel(CONFIG).cuda().eval()
    sampling = SamplingParams(max_new_tokens=8, do_sample=False)
    prompts = prompts_of()
    local = collect(LocalEngine(), model, sampling, prompts)
    engine = VLLMEngine(tmp_path, dtype='float32', enforce_eager=True, max_model_len=128)
    for a, b in zip(local, collect(engine, model, sampling, prompts), strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec('vllm') is None or importlib.util.find_spec('ray') is None,
    reason='vLLM or Ray is not installed',
)
@pytest.mark.parametrize(
    ('gpus', 'of_a_worker', 'way'), [(1, 1, 'ipc'), (2, 1, 'nccl'), (3, 2, 'nccl'), (1, 1, 'store')]
)
def test_workers_on_vllm_itself(gpus, of_a_worker, way):
    """Sends two versions of the weights. Ray gives the workers the first GPUs; the trainer has the last one."""
    import ray

    from chatgpt.rollout import VLLMRemoteEngine
    from chatgpt.rollout.ray_workers import RayWorkers

    if torch.cuda.device_count() < gpus:
        pytest.skip(f'needs {gpus} GPUs')
    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG)
    model = model.to(f'cuda:{gpus - 1}').eval()
    sampling = SamplingParams(max_new_tokens=8, do_sample=False)
    prompts = prompts_of()
    ray.init('local', num_gpus=gpus, include_dashboard=False, log_to_driver=False)
    options = {'dtype': 'float32', 'enforce_eager': True, 'max_model_len': 128, 'memory_share': 0.3}
    try:
        workers = RayWorkers(1, resources={'GPU': of_a_worker})
        with VLLMRemoteEngine(
            workers, weight_transfer='store' if way == 'store' else 'auto', engine_options=options
        ) as engine:
            for version in (1, 2):
                samples = collect(engine, model, sampling, prompts)
                assert engine.ways == [way] and {s.version for s in samples} == {version}
                for a, b in zip(collect(LocalEngine(), model, sampling, prompts), samples, strict=True):
                    assert a.response_ids.tolist() == b.response_ids.tolist()
                    torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-2, rtol=0)
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(0.1 * torch.randn_like(p))
    finally:
        ray.shutdown()


def send_from_rank() -> list[Any]:
    import ray

    from chatgpt.rollout import SharedEngine, VLLMRemoteEngine
    from chatgpt.rollout.ray_workers import RayWorkers

    if os.environ['RANK'] == '0':
        ray.init('local', num_gpus=2, include_dashboard=False, log_to_driver=False)  # the first two
    os.environ['CUDA_VISIBLE_DEVICES'] = '2,3'
    options = {'dtype': 'float32', 'enforce_eager': True, 'max_model_len': 128, 'memory_share': 0.3}
    with DDPStrategy(seed=0) as strategy:
        torch.manual_seed(0)
        model, found = GPT2LMHeadModel(CONFIG).to(strategy.device).eval(), []
        greedy = SamplingParams(max_new_tokens=8, do_sample=False)
        engine = VLLMRemoteEngine(RayWorkers(2, resources={'GPU': 1}), bucket_bytes=100_000, engine_options=options)
        with SharedEngine(strategy, engine) as shared:
            for _ in range(2):
                samples, local = (collect(e, model, greedy, prompts_of()) for e in (shared, LocalEngine()))
                found.append([[s.response_ids.tolist() for s in each] for each in (samples, local)])
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.1)
        return [found, sorted(engine.links), engine.ways]


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec('vllm') is None or importlib.util.find_spec('ray') is None,
    reason='vLLM or Ray is not installed',
)
def test_nccl_from_two_ranks_to_two_workers_on_vllm_itself():
    if torch.cuda.device_count() < 4:
        pytest.skip('needs 4 GPUs')
    for rank, (found, links, ways) in enumerate(run_distributed(send_from_rank, 2)):
        assert all(ours == theirs for ours, theirs in found)
        assert links == [rank] and ways == ['nccl'] * 2
