"""`VLLMRemoteEngine` on Ray actors that run vLLM on a CPU: weights are broadcast by gloo, or go through Ray's object
store."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from policies import GREEDY, OPTIONS, WARM, off, prompts, update

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, VLLMRemoteEngine
from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.vllm_worker import VLLMSpec, VLLMWorker
from chatgpt.rollout.wire import ModelSpec, checkpoint_tensors, fill_buckets, plan_buckets

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


@pytest.mark.parametrize('way', ['gloo', 'store'])
def test_two_workers_take_three_versions_and_one_is_killed(llama, cluster, way):
    from chatgpt.rollout.ray_workers import RayWorkers

    model, workers = llama(), RayWorkers(2, resources={'CPU': 1, 'GPU': 0})
    with VLLMRemoteEngine(workers, engine_options=OPTIONS, weight_transfer=way) as engine:

        def drawn(sampling: Any) -> Any:
            engine.begin(Actor(model))
            samples = engine.generate(Call.of(prompts(), sampling, seed=5, indices=range(5)))
            engine.end()
            return samples

        for version in range(2):
            samples = drawn(WARM)
            assert off(samples, model) < 1e-4 and engine.difference < 1e-4
            assert {s.version for s in samples} == {version + 1} and engine.way == way
            update(model, version)
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


def test_a_worker_takes_weights_after_an_update_that_failed(llama):
    model = llama()
    worker = VLLMWorker(VLLMSpec(**vars(ModelSpec.of(model)), tensor_parallel=0), OPTIONS)
    tensors = checkpoint_tensors(model)
    handshake = Handshake.of(Actor(model), 'VLLMWorker')
    manifest = plan_buckets(tensors, version=1, handshake=handshake, bucket_bytes=1 << 16)

    def broken() -> Iterator[torch.Tensor]:
        yield from itertools.islice(fill_buckets(manifest, tensors), 3)
        raise RuntimeError('the sender is gone')

    with pytest.raises(RuntimeError, match='the sender is gone'):
        worker.take_weights(manifest, broken())
    assert worker.version is None
    worker.take_weights(manifest, fill_buckets(manifest, tensors))
    worker._own.check_weights()
    assert worker.version == 1 and worker._own.difference < 1e-4
