"""`VLLMRemoteEngine` on Ray actors that run vLLM on a CPU: weights go over TCP and through Ray's object store."""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from policies import GREEDY, OPTIONS, WARM, off, off_tokens, prompts, update
from torch.distributed import ProcessGroupGloo, TCPStore

from chatgpt.nn import Actor, Critic
from chatgpt.rollout import Call, LocalEngine, VLLMRemoteEngine, vllm_links, vllm_worker
from chatgpt.rollout.connection import close, connect
from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.vllm_worker import VLLMSpec, VLLMWorker
from chatgpt.rollout.wire import (
    ModelSpec,
    Request,
    checkpoint_tensors,
    fill_buckets,
    plan_buckets,
    unpack_samples,
)
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import Callback

pytest.importorskip('vllm', reason='vLLM has an environment of its own: make test-vllm')
ray = pytest.importorskip('ray')


@pytest.fixture
def cluster() -> Iterator[None]:
    before = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    environment = {'PYTHONPATH': os.pathsep.join([root, str(Path(__file__).parent)]), 'VLLM_LOGGING_LEVEL': 'ERROR'}
    ray.init(
        'local',
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level='error',
        runtime_env={'env_vars': environment},
    )
    yield
    ray.shutdown()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def test_two_workers_take_three_versions_and_one_is_killed(llama, cluster):
    from chatgpt.rollout.ray_workers import RayWorkers

    model, workers = llama(), RayWorkers(2, resources={'CPU': 1, 'GPU': 0})
    with VLLMRemoteEngine(workers, engine_options=OPTIONS) as engine:

        def drawn(sampling: Any) -> Any:
            engine.begin(Actor(model))
            samples = engine.generate(Call.of(prompts(), sampling, seed=5, indices=range(5)))
            engine.end()
            return samples

        for version, way in enumerate(('tcp', 'store')):
            engine.by_store = way == 'store'
            samples = drawn(WARM)
            assert off(samples, model) < 1e-4 and engine.difference < 1e-4
            assert {s.version for s in samples} == {version + 1} and engine.ways == [way] * 2
            update(model, version)
        engine.by_store = False
        os.kill(ray.get(workers.actors[1].pid.remote()), signal.SIGKILL)
        with pytest.warns(UserWarning, match='rollout worker 1 died'):
            samples = drawn(GREEDY)
        assert engine.num_replaced == 1 and off(samples, model) < 1e-4
        local = LocalEngine()
        local.begin(Actor(model))
        mine = local.generate(Call.of(prompts(), GREEDY, seed=5, indices=range(5)))
        assert [s.response_ids.tolist() for s in samples] == [s.response_ids.tolist() for s in mine]
        # a worker detects a tensor that differs from its own, and the error is raised here
        wanted = engine._select_tensors
        engine._select_tensors = lambda given: {**wanted(given), 'lm_head.weight': torch.rand(64, 64)}  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match='VLLMRemoteEngine: .* nats, where float32 explains 0.02'):
            drawn(GREEDY)


def test_a_stream_of_parts_has_the_log_probs_of_the_version_of_each_token(llama, cluster):
    """A response goes on with newer weights; each token has the log-prob of transformers under the weights of then."""
    from chatgpt.rollout.ray_workers import RayWorkers

    states: list[dict[str, torch.Tensor]] = []
    found: list[Any] = []

    class Watch(Callback):
        def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
            states.append({n: p.detach().clone() for n, p in trainer.actor.model.state_dict().items()})
            found.extend((trainer.phase, e) for e in experiences)

    workers = RayWorkers(1, resources={'CPU': 1, 'GPU': 0})
    engine = VLLMRemoteEngine(workers, engine_options=OPTIONS, chunk_size=3, slice_tokens=3)
    workers.beside = False  # the trainer receives answers, so that what has two versions does not depend on time
    with NaiveStrategy(device='cpu') as strategy, engine:
        actor, critic = Actor(llama()), Critic(llama())
        pairs = strategy.prepare(*((m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (actor, critic)))
        (actor, a), (critic, c) = pairs
        settings: dict[str, Any] = {'experience_batch_size': 4, 'train_batch_size': 4, 'max_new_tokens': 9}
        trainer = PPOTrainer(
            *(strategy, actor, critic, lambda prompts, responses: [float(i % 2) for i in range(len(prompts))]),
            *(None, a, c),
            engine=engine,
            max_staleness=1,
            kl_coef=0.0,
            callbacks=[Watch()],
            **settings,
        )
        trainer.fit([torch.tensor([5, 6, 7 + i]) for i in range(12)], 4, 1, 1)
        assert trainer.collector.draws.queue.schedule.requests
    assert sorted(e.index for _, e in found) == list(range(16))
    mixed = [len(set(e.token_versions.tolist())) > 1 for _, e in found]
    assert any(mixed), 'a response has tokens of two versions'
    model, worst, of_others = llama(), 0.0, 0.0
    for phase, e in found:
        assert all(0 <= phase - v <= 1 for v in e.token_versions.tolist())
        for version, state in enumerate(states):
            model.load_state_dict(state)
            own = e.token_versions == version
            if bool(own.any()):
                worst = max(worst, off_tokens(e, model, own))
                model.load_state_dict(states[version - 1 if version else 1])
                of_others = max(of_others, off_tokens(e, model, own))
    assert worst < 1e-4 < 1e-2 < of_others


class Group:
    """A group of gloo with the methods of vLLM's communicator."""

    disabled = False

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: torch.device) -> None:
        timeout = timedelta(minutes=10)
        store = TCPStore(host, port, world_size, rank == 0, timeout, wait_for_workers=False)
        self.gloo = ProcessGroupGloo(store, rank, world_size, timeout)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        self.gloo.broadcast(tensor, src).wait()

    def destroy(self) -> None:
        del self.gloo


def at_address(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def test_vllm_loads_buckets_that_a_rank_sends_to_its_processes(llama, monkeypatch):
    """By NCCL, here gloo, in a group that is kept, and by IPC, here an address, also after sending has failed."""
    for module in (vllm_links, vllm_worker):
        monkeypatch.setattr(module, 'join_group', Group)
    monkeypatch.setattr(vllm_links, 'STOPPING_S', 2.0)
    monkeypatch.setattr(vllm_worker, 'bucket_of', lambda handle, device: at_address(*handle))
    model, cpu, link = llama(), torch.device('cpu'), None
    worker = VLLMWorker(VLLMSpec(**vars(ModelSpec.of(model)), tensor_parallel=0), OPTIONS)
    for version, way in enumerate(('nccl', 'nccl', 'ipc', 'ipc')):
        fails, handles = version == 2, []

        def handle_of(bucket: torch.Tensor, fails: bool = fails, handles: list[int] = handles) -> tuple[int, int]:
            handles.append(1 // (3 - len(handles)) if fails else 0)
            return bucket.data_ptr(), len(bucket)

        monkeypatch.setattr(vllm_links, 'handle_of', handle_of)
        tensors, handshake = checkpoint_tensors(model), Handshake.of(Actor(model), 'VLLMWorker')
        manifest = plan_buckets(tensors, version=version, handshake=handshake, bucket_bytes=10_000)
        address = worker.listen()
        assert address.gpus == ('',) and (version != 1 or address.group == link.name)
        if version != 1:
            link = vllm_links.Link(0, way, address)
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(worker.receive_from, manifest, way)
            connections = connect({0: address}, 0)
            try:
                with pytest.raises(RuntimeError, match='by ipc: ZeroDivisionError') if fails else nullcontext():
                    vllm_links.broadcast([link], connections, fill_buckets(manifest, tensors), cpu)
            finally:
                close(connections)
            if fails:
                with pytest.raises(ConnectionError, match='ended before all of its weights were here'):
                    received.result()
                continue
            received.result()
        call = Call.of(prompts(), WARM, seed=5, indices=range(5))
        packed = worker.generate(Request.of(version, call, whole=False))
        samples = unpack_samples(packed, call.prompts, call.indices, call.groups, WARM.temperature)
        assert off(samples, model) < 1e-4 and packed.difference < 1e-4
        update(model, version)


def test_vllm_has_the_names_of_what_needs_a_gpu():
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group
    from vllm.v1.worker.gpu_worker import Worker

    inspect.signature(stateless_init_process_group).bind('localhost', 1, 0, 3, torch.device('cpu'))
    inspect.signature(PyNcclCommunicator.broadcast).bind(None, torch.zeros(1), 0, None)
    inspect.signature(PyNcclCommunicator.destroy).bind(None)
    assert all(hasattr(Worker, name) for name in ('reload_weights', 'check_health', 'get_model'))
