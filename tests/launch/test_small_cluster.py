"""A Ray cluster with small nodes: what fits it, ranks and rollout workers by one rule, and a sharded run across its
nodes."""

from __future__ import annotations

import pytest
import torch
from launcher_runs import ROOT, metrics_of, on
from safetensors.torch import load_file

from chatgpt.rollout.cluster import lack_of_room
from chatgpt.strategies.checkpoint import latest


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


@pytest.mark.system
def test_a_sharded_run_on_ray_writes_a_whole_model(cluster, tmp_path, model_folder):
    """FSDP over two nodes, whose shards are put together again at the end."""
    flags = (
        '--strategy=fsdp --num_episodes=1 --max_timesteps=1 --update_timesteps=1 --experience_batch_size=2 '
        f'--max_epochs=1 --train_batch_size=2 --max_new_tokens=2 --checkpoint_interval=1 --pretrain {model_folder} '
        f'--save_path {tmp_path}'
    ).split()
    process = on(cluster, '--num_workers=2', '--max_failures=0', str(ROOT / 'examples' / 'train_prompts.py'), *flags)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert [line['step'] for line in metrics_of(tmp_path)] == [1]
    before, after = (load_file(folder / 'model.safetensors') for folder in (model_folder, tmp_path / 'actor'))
    assert {name: weight.shape for name, weight in before.items()} == {
        name: weight.shape for name, weight in after.items()
    }
    assert any(not torch.equal(before[name], after[name]) for name in before)
    folder = latest(tmp_path / 'checkpoints')
    assert folder is not None and len(list(folder.rglob('*.safetensors'))) >= 2
