"""Folders that are wrong, in fewer bits, or bring code: each is refused in one line that names what is wrong, through
every door."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_shapes import as_pickle, head_twice, in_shards, later, pickled, plain, store, stored

from chatgpt.nn import AutoActor, AutoCritic, AutoRM, load_config
from chatgpt.nn.shared import SharedTrunk
from chatgpt.plan.setup import read_config


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def heads_differ(folder: Path) -> None:
    head_twice(folder)
    tensors = stored(folder)
    store(folder, tensors | {'lm_head.weight': tensors['lm_head.weight'] + 1})


def a_shard_is_missing(folder: Path) -> None:
    in_shards(folder)
    sorted(folder.glob('model-*.safetensors'))[1].unlink()


def edit_index(folder: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    path = folder / 'model.safetensors.index.json'
    index = json.loads(path.read_text())
    edit(index['weight_map'])
    path.write_text(json.dumps(index))


def the_index_names_a_tensor_that_no_shard_has(folder: Path) -> None:
    in_shards(folder)
    edit_index(folder, lambda places: places.update({'model.layers.7.x': places['lm_head.weight']}))


def the_index_names_another_shard(folder: Path) -> None:
    in_shards(folder)
    name = 'model.layers.1.mlp.up_proj.weight'
    edit_index(folder, lambda places: places.update({name: next(p for p in places.values() if p != places[name])}))


def the_index_is_cut_off(folder: Path) -> None:
    in_shards(folder)
    path = folder / 'model.safetensors.index.json'
    path.write_text(path.read_text()[:40])


def pickled_code(folder: Path) -> None:
    plain('llama')(folder)
    as_pickle(folder, {'model.norm.weight': torch.ones(32), 'run': os.system})


def pickled_and_damaged(folder: Path) -> None:
    pickled(folder)
    path = folder / 'pytorch_model.bin'
    path.write_bytes(path.read_bytes()[:-200])


def pickled_trainer_state(folder: Path) -> None:
    plain('llama')(folder)
    as_pickle(folder, {'model': stored(folder), 'epoch': 3})


def nothing(folder: Path) -> None:
    plain('llama')(folder)
    (folder / 'model.safetensors').unlink()


def refused(folder: Path, said: str, *doors: Callable[[Path], Any]) -> None:
    for open_door in doors:
        with pytest.raises(ValueError, match=said) as told:
            open_door(folder)
        assert '\n' not in str(told.value)


@pytest.mark.parametrize(
    ('make', 'said'),
    [
        (heads_differ, r'model\.safetensors: \S+ and \S+ differ, and config.json says .*tie_word_embeddings'),
        (a_shard_is_missing, r'the shard model-00002-of-\d+\.safetensors that \S+index\.json names is missing'),
        (the_index_names_a_tensor_that_no_shard_has, r'model-\S+: it holds no tensor for model\.layers\.7\.x, which'),
        (the_index_names_another_shard, r'model-\S+: it holds no tensor for model\.layers\.1\.mlp\.up_proj\.weight, '),
        (the_index_is_cut_off, r'index\.json: not a list of shards'),
        (pickled_code, r'pytorch_model\.bin: it holds more than tensors, .*a pickle can run code'),
        (pickled_and_damaged, r'pytorch_model\.bin: a damaged file of \d+ bytes'),
        (pickled_trainer_state, r'pytorch_model\.bin: it holds no state dict'),
        (nothing, r'it holds no weights: neither model\.safetensors nor pytorch_model\.bin'),
    ],
)
def test_wrong_folders_are_named_in_one_line(make: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    make(tmp_path)
    refused(tmp_path, said, AutoActor, later, SharedTrunk.from_pretrained)


@pytest.mark.parametrize('settings', [{'quant_method': 'bitsandbytes', 'load_in_8bit': True}, {'quant_method': 'gptq'}])
def test_quantized_weights_are_refused_by_method(settings: dict[str, Any], tmp_path: Path) -> None:
    plain('llama')(tmp_path)
    change_config(tmp_path, quantization_config=settings)
    doors = (AutoActor, AutoCritic, AutoRM, later, SharedTrunk.from_pretrained, load_config, read_config)
    refused(tmp_path, rf'holds quantized weights \({settings["quant_method"]}.*--quantize nf4', *doors)
    refused(tmp_path / 'config.json', 'holds quantized weights', read_config)


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    plain('llama')(tmp_path)
    (tmp_path / 'own.py').write_text('raise SystemExit("it ran")\n')
    change_config(tmp_path, auto_map={'AutoModelForCausalLM': 'own.OwnModel'})
    assert AutoActor(tmp_path).model.config.model_type == 'llama'  # a known family needs none
    auto_map = {'AutoConfig': 'own.OwnConfig', 'AutoModelForCausalLM': 'own.OwnModel'}
    change_config(tmp_path, model_type='own_model', auto_map=auto_map)
    said = 'brings code of its own .auto_map in config.json.*--trust_remote_code'
    refused(tmp_path, said, AutoActor, AutoCritic, AutoRM, later, load_config, read_config)
