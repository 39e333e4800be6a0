"""RemoteEngine on real Ray actors: the same bits as a LocalEngine, killed workers, errors of workers. Workers with vLLM
have placement groups of GPUs that Ray only counts here."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from spawned_workers import STAND_IN, SpawnedWorkers

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, RemoteEngine, SamplingParams, VLLMRemoteEngine, ray_workers
from chatgpt.rollout.ray_workers import RayWorkers
from chatgpt.testing.fakes import tiny_causal_lm
from chatgpt.types import Prompt, Sample

pytestmark = pytest.mark.system

SAMPLING = SamplingParams(max_new_tokens=10, eos_token_ids=(2,))


@pytest.fixture(scope='module')
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip('ray')
    before = dict(os.environ)
    ray.init(
        'local',
        num_cpus=5 * torch.get_num_threads(),
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level='error',
        runtime_env={'env_vars': {'PYTHONPATH': os.pathsep.join([str(STAND_IN), *sys.path])}},
    )
    yield ray
    ray.shutdown()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.fixture(scope='module')
def engine(cluster: Any) -> Iterator[RemoteEngine]:
    with RemoteEngine(RayWorkers(2), bucket_bytes=4096) as engine:
        yield engine


def prompts(num: int = 8) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    return [Prompt(ids=torch.randint(3, 64, (1 + i % 5,), generator=generator), columns={'n': i}) for i in range(num)]


def halves(engine: Any, actor: Any, sampling: SamplingParams = SAMPLING, wait_for: Any = None) -> list[Sample]:
    """Generates eight samples in two requests, so that two workers are busy."""
    calls = [Call.of(prompts()[a : a + 4], sampling, seed=5, indices=range(a, a + 4)) for a in (0, 4)]
    engine.begin(actor)
    if isinstance(engine, LocalEngine):
        return [s for call in calls for s in engine.generate(call)]
    tickets = [engine.submit(call) for call in calls]
    engine.end()
    if wait_for is not None:
        wait_for()
    return [s for ticket in tickets for s in engine.take(ticket)]


def assert_same(a: list[Sample], b: list[Sample]) -> None:
    assert [s.index for s in a] == [s.index for s in b] == list(range(8))
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.response_ids, y.response_ids) and torch.equal(x.logprobs, y.logprobs)
        assert (x.finish_reason, x.columns) == (y.finish_reason, y.columns)
        y.logprobs.add_(1)  # samples can be written to


def test_actors_draw_what_a_local_engine_draws_with_each_version_of_the_weights(engine):
    for seed in (0, 1):
        actor = Actor(tiny_causal_lm('gpt2', seed=seed))
        assert_same(halves(LocalEngine(), actor), halves(engine, actor))


def slow(seconds: float) -> Any:
    """Returns a stop condition that is slow and always False. It is a closure, because workers cannot import a test."""

    def stop(ids: Any) -> bool:
        time.sleep(seconds)
        return False

    return stop


def test_a_killed_actor_is_replaced_and_its_prompts_are_generated_again(cluster, engine):
    actor = Actor(tiny_causal_lm('gpt2'))
    want = halves(LocalEngine(), actor)
    engine.begin(actor)
    victim = cluster.get(engine.workers.actors[1].pid.remote())

    def kill() -> None:
        time.sleep(0.2)
        os.kill(victim, signal.SIGKILL)

    before = engine.num_replaced
    with pytest.warns(UserWarning, match='rollout worker 1 died .*; another generates its 4 prompts again'):
        got = halves(engine, actor, SamplingParams(max_new_tokens=10, eos_token_ids=(2,), stop=slow(0.02)), kill)
    assert_same(want, got)
    assert engine.num_replaced == before + 1
    assert cluster.get(engine.workers.actors[1].pid.remote()) != victim


def test_what_an_actor_raises_arrives_as_it_was(engine):
    actor = Actor(tiny_causal_lm('gpt2'))
    with torch.no_grad():
        actor.model.transformer.ln_f.weight.fill_(float('nan'))
    with pytest.raises(FloatingPointError, match='not finite'):
        halves(engine, actor)
    assert_same(halves(LocalEngine(), Actor(tiny_causal_lm('gpt2'))), halves(engine, Actor(tiny_causal_lm('gpt2'))))


def test_weights_larger_than_the_object_store_go_through_it_and_an_actor_that_hangs_counts_as_dead(cluster):
    """Three versions of 97 MB go through a store of 80 MB, in which one bucket exists at a time."""
    actor = Actor(tiny_causal_lm('gpt2', hidden=512, layers=1, heads=2, positions=32, vocab_size=40960))
    assert sum(p.numel() * p.element_size() for p in actor.parameters()) > 80 << 20
    with RemoteEngine(RayWorkers(1), max_restarts=0, weight_transfer='store', bucket_bytes=8 << 20) as big:
        for _ in range(2):
            big.begin(actor)
            big.generate(Call.of(prompts(2), SamplingParams(max_new_tokens=1), seed=5, indices=range(2)))
            big.end()
        big.begin(actor)
        assert big.version == 3 and big.ways == ['store']
        big.workers.timeout_s = 3.0
        pid = cluster.get(big.workers.actors[0].pid.remote())
        with pytest.raises(RuntimeError, match=rf'on samples 0 to 7: no answer within 3 s from process {pid} on \d+'):
            big.generate(Call.of(prompts(), SamplingParams(max_new_tokens=4, stop=slow(600)), seed=5, indices=range(8)))
    from ray._private.internal_api import memory_summary

    summary = memory_summary(address=cluster.get_runtime_context().gcs_address, stats_only=True)
    assert 'object store' in summary.lower() and 'spilled' not in summary.lower()


def test_an_actor_that_does_not_start_is_named(engine, monkeypatch):
    """The other engine's two actors leave room for three."""
    actor = Actor(tiny_causal_lm('gpt2'))
    engine.begin(actor)
    monkeypatch.setattr(ray_workers, 'START_S', 0.1)
    message = r'rollout workers? ([0-2], )*3 have not started within 0.5 s: they wait for .*CPU'
    with pytest.warns(UserWarning, match='still wait for'), pytest.raises(RuntimeError, match=message):
        RemoteEngine(RayWorkers(4, timeout_s=0.5)).begin(actor)


def test_what_cannot_be_is_refused(cluster, monkeypatch):
    for kw, message in (
        ({'num_workers': 0}, 'num_workers=0'),
        ({'num_workers': 1, 'timeout_s': 0}, 'timeout_s=0'),
        ({'num_workers': 1, 'resources': {'CPU': -1}}, 'CPU=-1'),
    ):
        with pytest.raises(ValueError, match=message):
            RayWorkers(**kw)
    with pytest.raises(ValueError, match=r'2 rollout workers with .*5 GPU each do not fit .* room for 0'):
        RemoteEngine(RayWorkers(2, resources={'GPU': 5})).begin(Actor(tiny_causal_lm('gpt2')))
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(ImportError, match=r"a rollout worker needs Ray, .*; pip install 'ray>=2.10'"):
        RayWorkers(1)


# ---------------------------------------------------------------- workers that generate with vLLM, on the stand-in


def two_versions(engine: VLLMRemoteEngine, between: Callable[[], None] = lambda: None) -> list[Any]:
    model, records = tiny_causal_lm('gpt2'), []
    prompts = [Prompt(ids=torch.tensor([5, 3 + i])) for i in range(6)]
    for version in (1, 2):
        engine.begin(Actor(model))
        samples = engine.generate(Call.of(prompts, SAMPLING, seed=5, indices=range(6)))
        engine.end()
        records += [(s.index, s.version, s.response_ids.tolist(), s.logprobs.tolist()) for s in samples]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
        if version == 1:
            between()
    return records


def test_two_actors_with_two_gpus_each_take_two_versions_and_one_dies(cluster, stand_in):
    workers = RayWorkers(2, resources={'GPU': 2})
    with VLLMRemoteEngine(workers, weight_transfer='nccl') as engine:

        def check() -> None:
            assert engine.ways == ['nccl'] * 2
            groups = [g for g in cluster.util.placement_group_table().values() if g['state'] == 'CREATED']
            assert [len(g['bundles']) for g in groups] == [2, 2]
            assert all(bundle['GPU'] == 1 for g in groups for bundle in g['bundles'].values())
            assert cluster.available_resources().get('GPU', 0) == 0
            # the death is noticed when weights are sent
            os.kill(cluster.get(workers.actors[1].pid.remote()), signal.SIGKILL)

        with pytest.warns(UserWarning, match='rollout worker 1 died'):
            by_transfer = two_versions(engine, check)
        assert engine.num_replaced == 1
    with VLLMRemoteEngine(SpawnedWorkers(2, {'GPU': 2}), weight_transfer='store') as engine:
        assert two_versions(engine) == by_transfer
    assert [version for _, version, *_ in by_transfer] == [1] * 6 + [2] * 6
