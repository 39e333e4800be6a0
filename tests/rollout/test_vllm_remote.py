"""Workers that generate with vLLM on several GPUs each, with the fake vLLM: gloo instead of NCCL, weights split over
two ranks. Workers that die run in separate processes."""

from __future__ import annotations

import ctypes
import threading
import warnings
from typing import Any

import pytest
import torch
from engine_calls import generated as generated_by
from engine_calls import prompts_of
from spawned_workers import SpawnedWorkers
from transformers import MixtralConfig, MixtralForCausalLM

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams, vllm_links, vllm_remote, vllm_worker
from chatgpt.rollout.connection import Address
from chatgpt.rollout.vllm_remote import VLLMRemoteEngine
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Sample

pytestmark = pytest.mark.usefixtures('stand_in')
SAMPLING = SamplingParams(max_new_tokens=6, eos_token_ids=(2,))
PROMPTS = prompts_of((1, 2, 3, 4, 1, 2))


def call_of(sampling: SamplingParams = SAMPLING) -> Call:
    return Call.of(PROMPTS, sampling, seed=5, indices=range(6))


def records(samples: list[Sample]) -> list[Any]:
    return [(s.index, s.version, s.response_ids.tolist(), s.logprobs.tolist(), s.finish_reason) for s in samples]


def perturb(model: Any, seed: int = 0) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))


def begin_and_submit(engine: VLLMRemoteEngine, model: Any) -> Any:
    engine.begin(Actor(model))
    ticket = engine.submit(call_of())
    engine.end()
    return ticket


def two_versions(engine: VLLMRemoteEngine, model: Any) -> list[Any]:
    samples = []
    for _ in range(2):
        samples += engine.take(begin_and_submit(engine, model))
        perturb(model)
    return records(samples)


def methods(engine: VLLMRemoteEngine, of: int) -> list[str]:
    """Returns the calls of a worker, without questions."""
    return [m for worker, m in engine.workers.calls if worker == of and m not in ('listen', 'has_head')]


def test_weights_by_transfer_are_those_by_buckets_to_the_bit():
    found = {}
    each = {'store': 'fetch_bucket', 'tcp': 'receive', 'nccl': 'receive_from'}
    for way, method in each.items():
        with VLLMRemoteEngine(
            SpawnedWorkers(2, {'GPU': 2}), weight_transfer=way, bucket_bytes=4096, engine_options={'dtype': 'float32'}
        ) as engine:
            found[way] = two_versions(engine, tiny_causal_lm('gpt2'))
            assert engine.ways == [way] * 2 and engine.tensor_parallel == 2
            calls = [m for m in methods(engine, 1) if m in (method, 'generate')]
            if way == 'store':
                assert calls.count(method) > 20
            else:
                assert calls == [method, 'generate'] * 2, 'each version is transferred before its requests'
    assert found['store'] == found['tcp'] == found['nccl']
    assert [version for _, version, *_ in found['nccl']] == [1] * 6 + [2] * 6
    assert found['nccl'][:6] != found['nccl'][6:]
    # greedy tokens are those of the local engine
    model, greedy = tiny_causal_lm('gpt2'), SamplingParams(max_new_tokens=6, do_sample=False)
    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 2}), weight_transfer='nccl') as engine:
        for _ in range(2):
            ours, theirs = (generated_by(one, model, greedy, PROMPTS) for one in (engine, LocalEngine()))
            assert [s.response_ids.tolist() for s in ours] == [s.response_ids.tolist() for s in theirs]
            perturb(model)


@pytest.mark.parametrize('way', ['tcp', 'nccl'])
def test_new_weights_wait_for_requests_of_older_ones(tmp_path, monkeypatch, way):
    """The worker is busy with version 1 when version 2 is sent. Afterwards the trainer may change its weights."""
    gate = tmp_path / 'open'
    gate.touch()
    monkeypatch.setenv('STAND_IN_GATE', str(gate))
    model = tiny_causal_lm('gpt2')
    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 2}), weight_transfer=way) as engine:
        expected = two_versions(engine, model)
        model = tiny_causal_lm('gpt2')
        gate.unlink()
        old = begin_and_submit(engine, model)
        perturb(model)
        threading.Timer(0.3, gate.touch).start()
        new = begin_and_submit(engine, model)
        assert gate.exists() and not sending()
        perturb(model, seed=7)  # a learn step, in place
        samples = records(engine.take(old) + engine.take(new))
    assert [s[1] for s in samples] == [3] * 6 + [4] * 6  # two versions came before
    assert [(i, *rest) for i, _, *rest in samples] == [(i, *rest) for i, _, *rest in expected]


def sending() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith('chatgpt-weights')]


@pytest.mark.system
@pytest.mark.parametrize('staleness', [0, 1])
def test_a_worker_that_dies_in_the_middle_of_a_transfer_is_replaced(tmp_path, monkeypatch, staleness):
    die, model = tmp_path / 'die', tiny_causal_lm('gpt2')
    monkeypatch.setenv('STAND_IN_DIES', str(die))
    workers = SpawnedWorkers(2, {'GPU': 2}, spawn=True)
    with VLLMRemoteEngine(workers, weight_transfer='nccl', bucket_bytes=2048, max_restarts=1) as engine:
        expected = two_versions(engine, model)
        model = tiny_causal_lm('gpt2')
        tickets, found = [], []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            for phase in range(2):
                if phase == 1:
                    die.touch()
                tickets.append(begin_and_submit(engine, model))
                if len(tickets) > staleness:
                    found += engine.take(tickets.pop(0))
                perturb(model)
            for ticket in tickets:
                found += engine.take(ticket)
        (line,) = [str(w.message) for w in caught if 'rollout worker' in str(w.message)]
        assert 'died (its process ended); a new one takes its place' in line
        assert engine.num_replaced == 1 and engine.ways == ['nccl'] * 2
        assert [(i, v - 2, *rest) for i, v, *rest in records(found)] == expected
        # the new worker receives the next version
        engine.begin(Actor(model))
        assert engine.num_replaced == 1 and engine.num_able == 2


def test_on_one_gpu_handles_are_sent(monkeypatch):
    """Each is of the one buffer that the buckets share, and the worker answers when it has read it."""
    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 1}), weight_transfer='store') as engine:
        by_store = two_versions(engine, tiny_causal_lm('gpt2'))
    for module in (vllm_remote, vllm_worker):
        monkeypatch.setattr(module, 'name_of_device', lambda device: 'GPU-1')
    monkeypatch.setattr(vllm_links, 'handle_of', lambda bucket: (bucket.data_ptr(), len(bucket)))
    monkeypatch.setattr(vllm_worker, 'bucket_of', lambda handle, device: at_address(*handle))
    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 1}), bucket_bytes=4096) as engine:
        assert two_versions(engine, tiny_causal_lm('gpt2')) == by_store
        assert engine.ways == ['ipc'] and methods(engine, 0) == ['receive_from', 'generate'] * 2
    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 1}), weight_transfer='nccl') as engine:
        with pytest.raises(ValueError, match="worker 0: 1 of 1 ranks compute on its 1 GPUs; use weight_transfer='ipc'"):
            engine.begin(Actor(tiny_causal_lm('gpt2')))


@pytest.mark.parametrize(
    ('cards', 'gpus', 'expected'),
    [
        (['a'], ['b', 'cd', 'a', 'ab'], [('nccl', 0), ('nccl', 0), ('ipc', 0), None]),
        (['a', 'b'], ['x', 'y', 'z'], [('nccl', 0), ('nccl', 1), ('nccl', 0)]),
        (['a', 'b'], ['b', 'bx', 'ab', 'xy'], [('ipc', 1), ('nccl', 0), None, ('nccl', 1)]),
    ],
)
def test_a_worker_is_served_by_a_rank_on_other_gpus_or_on_its_only_one(monkeypatch, cards, gpus, expected):
    """Workers on the GPUs of all ranks are sent weights over TCP."""
    engine = VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 1}))
    monkeypatch.setattr(engine, '_of_ranks', lambda own: cards)
    addresses = {worker: Address('', 0, b'', tuple(names)) for worker, names in enumerate(gpus)}
    served = engine._serve(addresses, torch.device('cpu'))
    assert [served.get(worker) for worker in addresses] == expected


def at_address(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def test_what_a_worker_raises_is_named(monkeypatch):
    for way in ('nccl', 'tcp', 'store'):
        with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 2}), weight_transfer=way) as engine, monkeypatch.context() as m:
            from vllm import Worker

            m.setattr(Worker, 'load_weights', lambda self, weights: 1 // 0)
            with pytest.raises(ZeroDivisionError, match='division'):
                engine.begin(Actor(tiny_causal_lm('gpt2')))
            assert not sending()


@pytest.mark.parametrize('fails', ['broadcast', 'handle_of', 'fill_buckets'])
def test_after_sending_has_failed_the_next_version_arrives(monkeypatch, fails):
    """The worker, which waits for a bucket, sees that none comes, and goes on."""
    way, model = 'ipc' if fails == 'handle_of' else 'nccl', tiny_causal_lm('gpt2')
    for module in (vllm_remote, vllm_worker) if way == 'ipc' else ():
        monkeypatch.setattr(module, 'name_of_device', lambda device: 'GPU-1')
    monkeypatch.setattr(vllm_links, 'handle_of', lambda bucket: (bucket.data_ptr(), len(bucket)))
    monkeypatch.setattr(vllm_worker, 'bucket_of', lambda handle, device: at_address(*handle))

    def failing(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError('division')
        yield  # it raises when the first bucket is asked for

    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 1}), weight_transfer=way, bucket_bytes=4096) as engine:
        if fails == 'broadcast':
            engine.begin(Actor(model))
        with monkeypatch.context() as m:
            m.setattr(vllm_links, 'STOPPING_S', 0.2)
            if fails == 'broadcast':
                m.setattr(engine.links[0].group, 'broadcast', lambda *_: 1 // 0)
            elif fails == 'handle_of':
                m.setattr(vllm_links, 'handle_of', lambda bucket: 1 // 0)
            else:
                m.setattr(vllm_remote, 'fill_buckets', failing)
            named = 'division' if fails == 'fill_buckets' else f'to rollout worker 0 by {way}: ZeroDivisionError'
            with pytest.raises((RuntimeError, ZeroDivisionError), match=named):
                engine.begin(Actor(model))
        perturb(model)
        assert two_versions(engine, model)[0][1] == engine.version - 1
        assert not sending()


def test_mistakes_are_named(monkeypatch):
    for gpus, options, message in (
        (1, {'weight_transfer': 'gloo'}, "weight_transfer='gloo' is not one of auto, nccl, ipc, tcp, store"),
        (1, {'engine_options': {'tensor_parallel_size': 2}}, "sets 'tensor_parallel_size' itself"),
        (0.5, {}, 'GPU=0.5 of a vLLM worker must be a whole number'),
        (1, {'engine_options': {'memory_share': 2}}, 'memory_share=2'),
    ):
        with pytest.raises(ValueError, match=message):
            VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': gpus}), **options)
    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 1})) as engine:
        monkeypatch.setattr(vllm_remote, 'SENT_FROM', ('cuda',))
        actor = Actor(tiny_causal_lm('gpt2'))
        engine.begin(actor)  # auto, from a CPU
        assert engine.ways == ['tcp'] and not sending()
        with pytest.raises(ValueError, match='top_k=3'):
            engine.submit(call_of(SamplingParams(max_new_tokens=3, top_k=3)))
    for options, resources, why in (
        ({'weight_transfer': 'nccl'}, 1, "'nccl' sends from a GPU to others, and these weights are on cpu"),
        ({'weight_transfer': 'ipc'}, 2, 'several GPUs to a worker'),
    ):
        workers = SpawnedWorkers(1, {'GPU': resources})
        monkeypatch.setattr(workers, 'start', lambda *_: pytest.fail('the workers start'))
        with VLLMRemoteEngine(workers, **options) as engine, pytest.raises(ValueError, match=why):
            engine.begin(actor)
        monkeypatch.setattr(vllm_remote, 'SENT_FROM', ('cpu', 'cuda'))


def test_experts_are_sent_as_in_a_checkpoint():
    sizes = {'hidden_size': 8, 'intermediate_size': 4, 'num_hidden_layers': 1, 'vocab_size': 64}
    sizes |= {'num_attention_heads': 2, 'num_key_value_heads': 1, 'num_local_experts': 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes))
    engine = VLLMRemoteEngine(SpawnedWorkers(1))
    tensors = engine.tensors_of(model)
    experts = 'model.layers.0.block_sparse_moe.experts'
    stacked = model.model.layers[0].mlp.experts
    assert torch.equal(tensors[f'{experts}.1.w1.weight'], stacked.gate_up_proj[1, :4])
    assert torch.equal(tensors[f'{experts}.1.w3.weight'], stacked.gate_up_proj[1, 4:])
    assert torch.equal(tensors[f'{experts}.0.w2.weight'], stacked.down_proj[0])
