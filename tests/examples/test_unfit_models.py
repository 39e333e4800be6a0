"""examples/train_prompts.py with weights that should not be trained on, and with an adapter's folder: before the first
rollout."""

from __future__ import annotations

import shutil

import pytest
from safetensors import torch as safetensors
from train_prompts_runs import QUICK, REWARD, fails, run

from chatgpt.nn import Actor, AutoActor, RewardModel
from chatgpt.nn.peft_format import export_peft


@pytest.fixture
def broken(model_folder, tmp_path):
    """The demo's policy with NaN in a block; with its first block's attention left out; and as a reward model with
    NaN."""
    scorer = tmp_path / 'rm'
    RewardModel(AutoActor(pretrained=model_folder).model).save_pretrained(scorer)
    for name, source in (('nan', model_folder), ('lacking', model_folder), ('nan_rm', scorer)):
        shutil.copytree(source, tmp_path / name)
        path = tmp_path / name / 'model.safetensors'
        tensors = safetensors.load(path.read_bytes())
        if name == 'lacking':
            tensors = {n: t for n, t in tensors.items() if 'h.0.attn' not in n}
        else:
            tensors['transformer.h.0.mlp.c_fc.weight'][0, 0] = float('nan')
        safetensors.save_file(tensors, path, metadata={'format': 'pt'})
    return tmp_path


def test_unfit_weights_end_the_command_in_one_line(monkeypatch, capsys, broken, model_folder):
    capsys.readouterr()
    common = [*QUICK, '--save_path', str(broken / 'run')]
    error = fails(monkeypatch, capsys, *common, '--pretrain', str(broken / 'nan'), *REWARD)
    assert f'{broken}/nan/model.safetensors: transformer.h.0.mlp.c_fc.weight holds NaN' in error
    error = fails(monkeypatch, capsys, *common, '--pretrain', str(broken / 'lacking'), *REWARD)
    assert (
        f'{broken}/lacking/model.safetensors: it holds no tensor for transformer.h.0.attn.c_attn.bias (and 3 more)'
        in error
    )
    error = fails(
        monkeypatch, capsys, *common, '--pretrain', str(model_folder), '--reward_model', str(broken / 'nan_rm')
    )
    assert f'{broken}/nan_rm/model.safetensors: transformer.h.0.mlp.c_fc.weight holds NaN' in error
    assert not (broken / 'run' / 'metrics.jsonl').exists()


def test_an_adapters_folder_is_a_place_to_start_from(monkeypatch, tmp_path, model_folder):
    export_peft(
        Actor(AutoActor(pretrained=model_folder).model, lora_rank=2), tmp_path / 'adapter', base_model=str(model_folder)
    )
    run(monkeypatch, *QUICK, '--pretrain', str(tmp_path / 'adapter'), '--save_path', str(tmp_path / 'run'), *REWARD)
    assert 'transformer.h.0.mlp.c_fc.weight' in AutoActor(pretrained=tmp_path / 'run' / 'actor').model.state_dict()
