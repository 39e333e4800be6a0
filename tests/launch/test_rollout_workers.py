"""A run's rollout workers: waited for as long as its ranks would be, not for ever; whole on a node; shared by ranks."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from chatgpt.launch.rollouts import check_rollout_args, rollout_engine
from chatgpt.launch.runs import PPORun
from chatgpt.rollout import SharedEngine, VLLMRemoteEngine
from chatgpt.rollout.cluster import lack_of_room


def test_an_actor_is_given_up_before_the_other_ranks_give_up_its_own():
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


@pytest.mark.parametrize(
    ('settings', 'why'),
    [
        ({'engine': 'hf', 'rollout_workers': 1}, 'generate with the local engine or vLLM: --engine hf does not fit'),
        ({'engine': 'vllm', 'top_k': 5}, 'VLLMEngine cannot do top_k=5'),
        ({'engine': 'vllm', 'stop_string': ['end']}, r"VLLMEngine cannot do stop=\['end'\]"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_starts(settings, why):
    pytest.importorskip('ray')
    with pytest.raises(ValueError, match=why):
        run = PPORun(**settings)
        run.validate()
        check_rollout_args(run)


class Cluster:
    """What Ray says of nodes with these resources; the last one is dead."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.all = [{'Alive': True, 'NodeManagerAddress': f'n{i}', 'Resources': node} for i, node in enumerate(nodes)]
        self.all.append({'Alive': False, 'NodeManagerAddress': 'dead', 'Resources': {'CPU': 64.0, 'GPU': 8.0}})

    def nodes(self) -> list[dict]:
        return self.all


@pytest.mark.parametrize(
    ('number', 'each', 'room'),
    [
        (2, {'CPU': 2}, None),
        (3, {'CPU': 2}, 2),
        (1, {'CPU': 4}, 0),
        (1, {'CPU': 1, 'GPU': 1}, None),
        (2, {'CPU': 1, 'GPU': 1}, 1),
        (3, {'CPU': 0.1, 'GPU': 1 / 3}, None),
        (1, {'CPU': 3, 'label': 1}, 0),
        (2, {'label': 0.5}, None),
        (99, {'CPU': 0}, None),
    ],
)
def test_each_worker_is_whole_on_one_node(number, each, room):
    nodes = Cluster({'CPU': 3.0}, {'CPU': 2.0, 'GPU': 1.0, 'label': 1.0})
    text = lack_of_room(nodes, number, 'worker', each)
    assert (text is None) == (room is None)
    if text is not None:
        assert f' each do not fit the Ray cluster, which has room for {room} (node n0: 3 CPU, 0 GPU' in text
        assert 'dead' not in text and ('0 label; node n1: 2 CPU, 1 GPU, 1 label)' in text) == ('label' in each)
