"""Workers that generate with vLLM as Ray actors: each in a placement group of its own with two GPUs, which Ray only
counts here. vLLM is the stand-in, weights travel by gloo."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from spawned_workers import SpawnedWorkers

from chatgpt.nn import Actor
from chatgpt.rollout import Call, SamplingParams, VLLMRemoteEngine
from chatgpt.rollout.ray_workers import RayWorkers
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Prompt

pytestmark = pytest.mark.system

SAMPLING = SamplingParams(max_new_tokens=6, eos_token_ids=(2,))


@pytest.fixture
def cluster(stand_in: Path) -> Iterator[Any]:
    ray = pytest.importorskip('ray')
    before = dict(os.environ)
    ray.init(
        'local',
        num_cpus=2,
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level='error',
        runtime_env={'env_vars': {'PYTHONPATH': os.pathsep.join([str(stand_in), *sys.path])}},
    )
    yield ray
    ray.shutdown()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def two_versions(engine: VLLMRemoteEngine, between: Callable[[], None] = lambda: None) -> list[Any]:
    model, drawn = tiny_causal_lm('gpt2'), []
    prompts = [Prompt(ids=torch.tensor([5, 3 + i])) for i in range(6)]
    for version in (1, 2):
        engine.begin(Actor(model))
        samples = engine.generate(Call.of(prompts, SAMPLING, seed=5, indices=range(6)))
        engine.end()
        drawn += [(s.index, s.version, s.response_ids.tolist(), s.logprobs.tolist()) for s in samples]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
        if version == 1:
            between()
    return drawn


def test_two_actors_with_two_gpus_each_take_two_versions_and_one_dies(cluster):
    with VLLMRemoteEngine(RayWorkers(1, resources={'GPU': 8})) as engine:
        with pytest.raises(ValueError, match=r'1 rollout worker with .*8 GPU each do not fit'):
            engine.begin(Actor(tiny_causal_lm('gpt2')))
    workers = RayWorkers(2, resources={'GPU': 2})
    with VLLMRemoteEngine(workers, weight_transfer='nccl') as engine:

        def look() -> None:
            assert engine.ways == ['nccl'] * 2
            groups = [g for g in cluster.util.placement_group_table().values() if g['state'] == 'CREATED']
            assert [len(g['bundles']) for g in groups] == [2, 2]
            assert all(bundle['GPU'] == 1 for g in groups for bundle in g['bundles'].values())
            assert cluster.available_resources().get('GPU', 0) == 0
            # nobody knows of it before weights are sent
            os.kill(cluster.get(workers.actors[1].pid.remote()), signal.SIGKILL)

        with pytest.warns(UserWarning, match='rollout worker 1 died'):
            by_transfer = two_versions(engine, look)
        assert engine.num_replaced == 1
    with VLLMRemoteEngine(SpawnedWorkers(2, {'GPU': 2}), weight_transfer='store') as engine:
        assert two_versions(engine) == by_transfer
    assert [version for _, version, *_ in by_transfer] == [1] * 6 + [2] * 6
