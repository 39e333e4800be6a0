"""Workers that generate with vLLM on several GPUs each, with the fake vLLM: weights split over two ranks and broadcast
by gloo. Workers that die run in separate processes."""

from __future__ import annotations

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
from chatgpt.rollout import Call, LocalEngine, SamplingParams, remote
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
    """Returns the calls of a worker, without those that are made once."""
    return [m for worker, m in engine.workers.calls if worker == of and m not in ('barrier', 'has_head')]


def test_weights_by_transfer_are_those_by_buckets_to_the_bit():
    found = {}
    for way in ('store', 'gloo'):
        with VLLMRemoteEngine(
            SpawnedWorkers(2, {'GPU': 2}), weight_transfer=way, bucket_bytes=4096, engine_options={'dtype': 'float32'}
        ) as engine:
            found[way] = two_versions(engine, tiny_causal_lm('gpt2'))
            assert engine.way == way and engine.tensor_parallel == 2
            # each version is transferred before its requests
            transfers = ['join'] + ['receive', 'generate'] * 2
            assert methods(engine, 1) == (transfers if way == 'gloo' else ['generate'] * 2)
    assert found['store'] == found['gloo']
    assert [version for _, version, *_ in found['gloo']] == [1] * 6 + [2] * 6
    assert found['gloo'][:6] != found['gloo'][6:]
    # greedy tokens are those of the local engine
    model, greedy = tiny_causal_lm('gpt2'), SamplingParams(max_new_tokens=6, do_sample=False)
    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 2}), weight_transfer='gloo') as engine:
        for _ in range(2):
            ours, theirs = (generated_by(one, model, greedy, PROMPTS) for one in (engine, LocalEngine()))
            assert [s.response_ids.tolist() for s in ours] == [s.response_ids.tolist() for s in theirs]
            perturb(model)


def test_new_weights_wait_for_earlier_requests(tmp_path, monkeypatch):
    """The worker is still busy with version 1 when version 2 is sent; its samples are those of version 1."""
    gate = tmp_path / 'open'
    gate.touch()
    monkeypatch.setenv('STAND_IN_GATE', str(gate))
    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 2}), weight_transfer='gloo') as engine:
        expected = two_versions(engine, tiny_causal_lm('gpt2'))
        model = tiny_causal_lm('gpt2')
        engine.begin(Actor(model))
        gate.unlink()
        old = engine.submit(call_of())
        perturb(model)
        opens = threading.Timer(0.3, gate.touch)
        opens.start()
        new = begin_and_submit(engine, model)
        assert gate.exists()
        perturb(model, seed=7)  # a learn step, in place
        samples = records(engine.take(old) + engine.take(new))
        opens.join()
    assert [s[1] for s in samples] == [3] * 6 + [4] * 6  # two versions came before
    assert [(i, *rest) for i, _, *rest in samples] == [(i, *rest) for i, _, *rest in expected]


@pytest.mark.system
@pytest.mark.parametrize('staleness', [0, 1])
def test_a_worker_that_dies_in_the_middle_of_a_transfer_is_replaced(tmp_path, monkeypatch, staleness):
    die, model = tmp_path / 'die', tiny_causal_lm('gpt2')
    monkeypatch.setenv('STAND_IN_DIES', str(die))
    workers = SpawnedWorkers(2, {'GPU': 2}, spawn=True)
    with VLLMRemoteEngine(workers, weight_transfer='gloo', bucket_bytes=2048, max_restarts=1) as engine:
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
        assert 'died (its process ended)' in line and 'a new one goes on' in line
        assert engine.num_replaced == 1  # and all workers have been sent the weights again
        assert [(i, v - 2, *rest) for i, v, *rest in records(found)] == expected


@pytest.mark.system
def test_another_worker_answers_for_a_dead_one_and_none_is_an_error():
    workers = SpawnedWorkers(2, {'GPU': 2}, spawn=True)
    with VLLMRemoteEngine(workers, weight_transfer='gloo') as engine:
        model = tiny_causal_lm('gpt2')
        expected = two_versions(engine, model)[6:]
        engine.begin(Actor(tiny_causal_lm('gpt2', seed=1)))
        model = tiny_causal_lm('gpt2')
        perturb(model)
        engine.begin(Actor(model))
        ticket = engine.submit(call_of())
        workers.kill(1)
        with pytest.warns(UserWarning, match='worker 1 died .*; another generates its 3 prompts again, from sample 3'):
            found = records(engine.take(ticket))
        assert [(i, *rest) for i, _, *rest in found] == [(i, *rest) for i, _, *rest in expected]
        assert engine._bare == {1}
        engine.take(engine.submit(call_of()))
        ticket = engine.submit(call_of())
        workers.kill(0)
        with pytest.warns(UserWarning, match='died'), pytest.raises(RuntimeError, match='weights 4 have died'):
            engine.take(ticket)


@pytest.mark.system
def test_a_death_without_requests_is_told_and_the_next_weights_arrive(tmp_path, monkeypatch):
    die, model = tmp_path / 'die', tiny_causal_lm('gpt2')
    monkeypatch.setenv('STAND_IN_DIES', str(die))
    workers = SpawnedWorkers(1, {'GPU': 2}, spawn=True)
    with VLLMRemoteEngine(workers, weight_transfer='gloo', max_restarts=1) as engine:
        die.touch()
        with pytest.warns(UserWarning, match=r'rollout worker 0 died \(its process ended\); a new one goes on'):
            engine.begin(Actor(model))
        assert {s.version for s in engine.generate(call_of())} == {1}


def test_what_a_worker_raises_is_named(monkeypatch):
    from vllm import Worker

    load, model = Worker.load_weights, tiny_causal_lm('gpt2')
    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 2}), weight_transfer='gloo') as engine:
        monkeypatch.setattr(Worker, 'load_weights', lambda self, weights: 1 // 0)
        with pytest.raises(RuntimeError, match='sending weights 1 by gloo: ZeroDivisionError'):
            engine.begin(Actor(model))
        monkeypatch.setattr(Worker, 'load_weights', load)
        engine.begin(Actor(model))  # joins again
        assert {s.version for s in engine.generate(call_of())} == {2}


def test_mistakes_are_named(monkeypatch):
    for gpus, options, message in (
        (1, {'weight_transfer': 'ipc'}, "weight_transfer='ipc' is not one of auto, nccl, gloo, store"),
        (1, {'engine_options': {'tensor_parallel_size': 2}}, "sets 'tensor_parallel_size' itself"),
        (0.5, {}, 'GPU=0.5 of a vLLM worker must be a whole number'),
        (1, {'engine_options': {'memory_share': 2}}, 'memory_share=2'),
    ):
        with pytest.raises(ValueError, match=message):
            VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': gpus}), **options)
    actor = Actor(tiny_causal_lm('gpt2'))
    with VLLMRemoteEngine(SpawnedWorkers(1, {'GPU': 1})) as engine:
        engine.begin(actor)
        assert engine.way == 'store'  # auto: weights of a CPU go as buckets
        with pytest.raises(ValueError, match='top_k=3'):
            engine.submit(call_of(SamplingParams(max_new_tokens=3, top_k=3)))
    for own, theirs, way in (('GPU-1', 'GPU-2', 'nccl'), ('GPU-1', 'GPU-1', None)):
        for given in ('nccl', 'auto'):
            with VLLMRemoteEngine(SpawnedWorkers(2, {'GPU': 1}), weight_transfer=given) as engine:
                engine.workers.call = lambda *_: None
                engine.workers.wait = lambda _, found=theirs: [found]
                monkeypatch.setattr(remote, 'name_of_device', lambda _, own=own: own)
                monkeypatch.setattr(remote, '_device_of', lambda _: torch.device('cuda'))
                if way or given == 'auto':
                    assert engine._chosen_way(None) == (way or 'store')
                else:
                    with pytest.raises(ValueError, match="the workers on GPU-1; use weight_transfer='store'"):
                        engine._chosen_way(None)


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
