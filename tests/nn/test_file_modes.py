"""Every file of a saved model has the rights that the umask leaves, weights as well as configs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chatgpt.launch import demo_world
from chatgpt.nn import GPTRM, GPTActor, GPTCritic, ILQLModel
from chatgpt.nn.peft_format import export_peft
from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.checkpoint.files import save_tensors
from chatgpt.strategies.checkpoint.writer import write_checkpoint


@pytest.fixture(params=[0o022, 0o027])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.rglob('*') if path.is_file()}


def test_models(umask, tmp_path):
    config = demo_world.demo_config()
    GPTActor(config=config, value_head=True).save_pretrained(tmp_path / 'actor')
    GPTCritic(config=config).save_pretrained(tmp_path / 'critic')
    GPTRM(config=config).save_pretrained(tmp_path / 'rm')
    ILQLModel(GPTActor(config=config).model).save_pretrained(tmp_path / 'ilql')
    export_peft(GPTActor(config=config, lora_rank=2), tmp_path / 'adapter')
    found = {f'{f.name}/{name}': mode for f in tmp_path.iterdir() for name, mode in modes(f).items()}
    assert sum(name.endswith('.safetensors') for name in found) >= 7
    assert set(found.values()) == {0o666 & ~umask}, found


def test_checkpoints_and_single_files(umask, tmp_path):
    strategy, model = NaiveStrategy(), torch.nn.Linear(3, 2)
    prepared = strategy.prepare(model)
    write_checkpoint(
        tmp_path / 'checkpoint',
        {'': strategy.model_pieces(prepared)},
        meta={'kind': 'model'},
        rank=0,
        all_gather_object=strategy.all_gather_object,
    )
    save_tensors(model.state_dict(), tmp_path / 'weights.safetensors')
    save_tensors(model.state_dict(), tmp_path / 'weights.pt')
    found = modes(tmp_path)
    assert len(found) >= 4 and set(found.values()) == {0o666 & ~umask}, found
