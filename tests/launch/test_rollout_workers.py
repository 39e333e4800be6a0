"""A run's rollout workers: time limit below that of ranks, resources on one node, sharing by ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chatgpt.launch import rollouts
from chatgpt.launch.rollouts import check_rollout_args, rollout_engine
from chatgpt.launch.runs import PPORun
from chatgpt.rollout import NeighboursEngine, SharedEngine, VLLMRemoteEngine
from chatgpt.rollout.cluster import lack_of_room
from chatgpt.rollout.engine import CheckedEngine


def test_the_time_limit_of_an_actor_is_below_that_of_ranks():
    pytest.importorskip('ray')
    with rollout_engine(PPORun(rollout_workers=2, rank_timeout_s=100.0)) as engine:
        assert engine.workers.timeout_s == pytest.approx(80.0)


def test_workers_with_vllm_have_gpus_and_serve_all_ranks():
    pytest.importorskip('ray')
    run = PPORun(engine='vllm', rollout_workers=2, rollout_resources={'GPU': 2.0, 'CPU': 1.0})
    with rollout_engine(run, SimpleNamespace(world_size=1, processes=SimpleNamespace(world_size=1))) as engine:
        assert type(engine) is VLLMRemoteEngine
        assert engine.tensor_parallel == 2 and engine.workers.num_workers == 2
    with rollout_engine(run, SimpleNamespace(world_size=4, processes=SimpleNamespace(world_size=4), rank=1)) as engine:
        assert type(engine) is SharedEngine and engine.engine.tensor_parallel == 2
    one_rank_of_two = SimpleNamespace(world_size=1, processes=SimpleNamespace(world_size=2), rank=0)
    with rollout_engine(run, one_rank_of_two) as engine:
        assert type(engine) is SharedEngine and engine.ranks is one_rank_of_two
    with rollout_engine(PPORun(engine='vllm', rollout_workers=1)) as engine:
        assert engine.workers.resources['GPU'] == 1


def test_workers_that_ranks_share_take_no_parts_of_responses():
    pytest.importorskip('ray')
    run = PPORun(engine='vllm', rollout_workers=2, rollout_slice_tokens=8, rollout_chunk_size=2, max_staleness=1)
    two = SimpleNamespace(world_size=2, processes=SimpleNamespace(world_size=2), rank=0)
    with pytest.raises(ValueError, match='slice_tokens=8 .* share answer whole requests'), rollout_engine(run, two):
        pass
    with rollout_engine(run, SimpleNamespace(world_size=1, processes=SimpleNamespace(world_size=1))) as engine:
        assert engine.slice_tokens == 8


def test_neighbouring_processes_share_a_vllm(monkeypatch):
    made: list[tuple[Any, int]] = []

    class Recording(CheckedEngine):
        def __init__(self, pretrained: str, *, tensor_parallel_size: int) -> None:
            made.append((pretrained, tensor_parallel_size))

        def answer(self, call: Any, limits: list[int]) -> list[Any]:
            return []

    monkeypatch.setattr(rollouts, 'VLLMEngine', Recording)
    strategy = SimpleNamespace(rank=1)
    with rollout_engine(PPORun(engine='vllm', pretrain='gpt2', vllm_tensor_parallel=2), strategy) as engine:
        assert type(engine) is NeighboursEngine and engine.ranks is strategy and engine.size == 2
        assert made == [('gpt2', 2)]
    with rollout_engine(PPORun(engine='vllm', pretrain='gpt2'), strategy) as engine:
        assert engine is None  # each process has its own


@pytest.mark.parametrize(
    ('settings', 'why'),
    [
        ({'engine': 'hf', 'rollout_workers': 1}, 'generate with the local engine or vLLM: --engine hf does not fit'),
        ({'vllm_tensor_parallel': 2}, 'is about engine vllm in the training processes'),
        ({'engine': 'vllm', 'rollout_workers': 1, 'vllm_tensor_parallel': 2}, 'whose rollout_resources say how many'),
        (
            {'engine': 'vllm', 'vllm_tensor_parallel': 2, 'strategy': 'fsdp', 'tensor_parallel': 2},
            'the processes of a rank generate its prompts apart',
        ),
        ({'engine': 'vllm', 'top_k': 5}, 'VLLMEngine cannot do top_k=5'),
        ({'engine': 'vllm', 'stop_string': ['end']}, r"VLLMEngine cannot do stop=\['end'\]"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_before_a_start(settings, why):
    pytest.importorskip('ray')
    with pytest.raises(ValueError, match=why):
        run = PPORun(**settings)
        run.validate()
        check_rollout_args(run)


def test_each_worker_is_whole_on_one_node():
    resources = {'n0': {'CPU': 3.0}, 'n1': {'CPU': 2.0, 'GPU': 1.0, 'label': 1.0}, 'dead': {'CPU': 64.0, 'GPU': 8.0}}
    nodes = [{'Alive': n != 'dead', 'NodeManagerAddress': n, 'Resources': r} for n, r in resources.items()]
    ray = SimpleNamespace(nodes=lambda: nodes)
    fits = (2, {'CPU': 2}), (1, {'CPU': 1, 'GPU': 1}), (3, {'CPU': 0.1, 'GPU': 1 / 3}), (2, {'label': 0.5})
    assert [lack_of_room(ray, number, 'worker', each) for number, each in fits] == [None] * 4
    lacks = (3, {'CPU': 2}, 2), (1, {'CPU': 4}, 0), (2, {'CPU': 1, 'GPU': 1}, 1), (1, {'CPU': 3, 'label': 1}, 0)
    for number, each, room in lacks:
        text = lack_of_room(ray, number, 'worker', each)
        assert f' each do not fit the Ray cluster, which has room for {room} (node n0: 3 CPU, 0 GPU' in text
        assert 'dead' not in text and ('0 label; node n1: 2 CPU, 1 GPU, 1 label)' in text) == ('label' in each)
