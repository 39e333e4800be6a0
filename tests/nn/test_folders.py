"""Model folders of several versions of transformers load through every function with transformers' own results; invalid
ones, quantized ones and those with code raise errors of one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig

from chatgpt.nn import (
    Actor,
    AutoActor,
    AutoCritic,
    AutoRM,
    Critic,
    ILQLModel,
    RewardModel,
    initial_tensors,
    load_config,
)
from chatgpt.nn.heads import mlp_head, stored_support
from chatgpt.nn.loading import load_causal_lm
from chatgpt.nn.reward_model import is_scorer
from chatgpt.nn.shared import SharedTrunk
from chatgpt.nn.weights import fill_model
from chatgpt.plan.setup import read_config
from chatgpt.testing import tiny_causal_lm

IDS = torch.tensor([[5, 9, 3, 17, 40], [8, 8, 21, 2, 33]])


def stored(folder: Path) -> dict[str, Tensor]:
    return load((folder / 'model.safetensors').read_bytes())


def store(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / 'model.safetensors', {'format': 'pt'})


def as_pickle(folder: Path, tensors: dict[str, Any], name: str = 'pytorch_model.bin', **kw: Any) -> None:
    (folder / 'model.safetensors').unlink(missing_ok=True)
    torch.save(tensors, folder / name, **kw)


def plain(family: str, **kw: Any) -> Callable[[Path], None]:
    return lambda folder: tiny_causal_lm(family, **kw).save_pretrained(folder)


def whole_and_in_shards(folder: Path) -> None:
    """A whole file and shards: transformers reads the whole file."""
    in_shards(folder)
    plain('llama', seed=5)(folder / 'other')
    shutil.move(folder / 'other' / 'model.safetensors', folder)


def in_shards(folder: Path) -> None:
    tiny_causal_lm('llama').save_pretrained(folder, max_shard_size='40KB')
    assert len(list(folder.glob('model-*.safetensors'))) > 2


def head_twice(folder: Path) -> None:
    """Tied by the config, and both tensors in the file, as some tools write."""
    tiny_causal_lm('gpt2').save_pretrained(folder)
    tensors = stored(folder)
    assert 'lm_head.weight' not in tensors
    store(folder, tensors | {'lm_head.weight': tensors['transformer.wte.weight']})


def head_instead(folder: Path) -> None:
    """Tied, and stored only under the name of the head."""
    tiny_causal_lm('gpt2').save_pretrained(folder)
    tensors = stored(folder)
    store(folder, {**tensors, 'lm_head.weight': tensors.pop('transformer.wte.weight')})


def old_config(folder: Path) -> None:
    """transformers 4 called the dtype `torch_dtype`, and had no layer types."""
    tiny_causal_lm('llama').to(torch.float16).save_pretrained(folder)
    config = json.loads((folder / 'config.json').read_text())
    config['torch_dtype'] = config.pop('dtype')
    config['rope_theta'] = config.pop('rope_parameters')['rope_theta']
    (folder / 'config.json').write_text(json.dumps(config | {'transformers_version': '4.37.0'}))


def pickled(folder: Path) -> None:
    tiny_causal_lm('llama').save_pretrained(folder)
    as_pickle(folder, stored(folder))


def pickled_gpt2(folder: Path) -> None:
    """As the original GPT-2 on the hub: names of the trunk, its masks, an older file format."""
    tiny_causal_lm('gpt2').save_pretrained(folder)
    tensors = {n.removeprefix('transformer.'): t for n, t in stored(folder).items()}
    for block in range(2):
        tensors[f'h.{block}.attn.bias'] = torch.ones(1, 1, 8, 8).tril()
    as_pickle(folder, tensors, _use_new_zipfile_serialization=False)


def pickled_tied(folder: Path) -> None:
    """torch.save keeps both names of one tensor."""
    tiny_causal_lm('gpt2').save_pretrained(folder)
    tensors = stored(folder)
    as_pickle(folder, tensors | {'lm_head.weight': tensors['transformer.wte.weight']})


def pickled_shards(folder: Path) -> None:
    tiny_causal_lm('llama').save_pretrained(folder)
    tensors = stored(folder)
    places = {n: f'pytorch_model-0000{1 + i % 2}-of-00002.bin' for i, n in enumerate(sorted(tensors))}
    for name in set(places.values()):
        as_pickle(folder, {n: tensors[n] for n, place in places.items() if place == name}, name)
    (folder / 'pytorch_model.bin.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': places}))


FOLDERS = {
    'llama, tied': plain('llama', tie_word_embeddings=True),
    'gpt2, untied': plain('gpt2', tie_word_embeddings=False),
    'shards': in_shards,
    'whole and shards': whole_and_in_shards,
    'bf16': lambda folder: tiny_causal_lm('llama').to(torch.bfloat16).save_pretrained(folder),
    'head twice': head_twice,
    'head instead': head_instead,
    'old config': old_config,
    'pickled': pickled,
    'pickled gpt2 of old': pickled_gpt2,
    'pickled tied': pickled_tied,
    'pickled shards': pickled_shards,
}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits


@torch.no_grad()
def states(model: Any) -> Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).last_hidden_state


def from_meta(folder: Path) -> Any:
    """Builds on the meta device and fills, as a sharded strategy does."""
    with torch.device('meta'):
        model = load_causal_lm(folder)
    fill_model(model, model.weights_source)
    return model


@pytest.mark.parametrize('make', FOLDERS.values(), ids=FOLDERS)
def test_every_door_gives_the_numbers_of_transformers(make: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / 'old'
    make(folder)
    want = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    trunk = states(AutoModel.from_pretrained(folder, dtype=torch.float32))
    actor = AutoActor(folder)
    actor.save_pretrained(tmp_path / 'new')
    assert not list((tmp_path / 'new').glob('*.bin'))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / 'new', dtype=torch.float32)
    for model in (actor.model, from_meta(folder), SharedTrunk.from_pretrained(folder).model, again):
        torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-6)
    with torch.device('meta'):
        sharded = AutoActor(folder)
    later_on = dict(initial_tensors(sharded))
    assert all(torch.equal(later_on[name], p) for name, p in actor.named_parameters())
    for cls in (AutoCritic, AutoRM):
        torch.testing.assert_close(states(cls(folder).model), trunk, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(want, want.flip(0), atol=1e-3)
    assert load_config(folder).vocab_size == read_config(folder).vocab_size == want.shape[-1]


def in_cache(cache: Path, name: str) -> Path:
    """Returns the folder of the only revision of a hub name in a cache."""
    repository = cache / f'models--{name.replace("/", "--")}'
    (repository / 'refs').mkdir(parents=True)
    (repository / 'refs' / 'main').write_text('a' * 40)
    return repository / 'snapshots' / ('a' * 40)


def test_heads_of_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a subfolder."""
    options = {'cache_dir': str(tmp_path), 'local_files_only': True}
    critic, scorer = Critic(tiny_causal_lm('gpt2')), RewardModel(tiny_causal_lm('gpt2'), mlp_head(32))
    actor, ilql = Actor(tiny_causal_lm('gpt2'), value_head=True), ILQLModel(tiny_causal_lm('gpt2'), two_qs=False)
    heads = {'actor': actor.value_head, 'critic': critic.value_head, 'ilql': ilql.q_heads, 'scorer': scorer.value_head}
    for name, model in {'actor': actor, 'critic': critic, 'ilql': ilql, 'scorer': scorer}.items():
        for p in heads[name].parameters():
            torch.nn.init.normal_(p)
        folder = in_cache(tmp_path, f'me/{name}')
        model.save_pretrained(folder)
        model.save_pretrained(folder / 'inner')
        for more in ({}, {'subfolder': 'inner'}):
            read = type(model).from_pretrained(f'me/{name}', **options, **more)
            found = read.q_heads if name == 'ilql' else read.value_head
            assert all(map(torch.equal, found.parameters(), heads[name].parameters()))
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    assert is_scorer('me/scorer', load_config('me/scorer', **options)) and stored_support('me/critic') == {}
    assert not is_scorer('me/actor', actor.model.config) and stored_support('me/ilql') is None
    with pytest.raises(ValueError, match='no such folder'):
        Critic.from_pretrained(tmp_path / 'nothing')


def test_a_name_of_the_hub_that_lies_in_the_cache(tmp_path: Path) -> None:
    folder = in_cache(tmp_path, 'me/tiny')
    FOLDERS['bf16'](folder)
    options = {'cache_dir': str(tmp_path), 'local_files_only': True}
    want = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    actor = AutoActor('me/tiny', **options)
    assert actor.model.weights_source.dtype is torch.bfloat16
    with torch.device('meta'):
        filled = load_causal_lm('me/tiny', **options)
    fill_model(filled, filled.weights_source)
    for model in (actor.model, filled, SharedTrunk.from_pretrained('me/tiny', **options).model):
        torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-6)


def test_an_adapter_of_the_hub_is_to_be_downloaded(tmp_path: Path) -> None:
    folder = in_cache(tmp_path, 'me/adapter')
    folder.mkdir(parents=True)
    (folder / 'adapter_config.json').write_text('{"base_model_name_or_path": "gpt2"}')
    missing = tmp_path / 'models--me--adapter' / '.no_exist' / folder.name / 'config.json'
    missing.parent.mkdir(parents=True)
    missing.touch()
    with pytest.raises(ValueError, match='hf download me/adapter --local-dir FOLDER'):
        AutoActor('me/adapter', cache_dir=str(tmp_path), local_files_only=True)


@pytest.fixture(scope='module')
def in_4bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in transformers' bitsandbytes 4 bits, with scales in 8 and in 32 bits, and the same dequantized."""
    pytest.importorskip('bitsandbytes')
    root = tmp_path_factory.mktemp('4bit')
    tiny_causal_lm('llama', hidden=64).to(torch.bfloat16).save_pretrained(root / 'dense')
    for double in (True, False):
        settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=double)
        model = AutoModelForCausalLM.from_pretrained(root / 'dense', quantization_config=settings)
        folder = root / f'double-{double}'
        model.save_pretrained(folder)
        dense = AutoModelForCausalLM.from_pretrained(folder).dequantize()
        torch.save(logits(dense.float()), root / f'double-{double}.pt')
    return root


@pytest.mark.parametrize('double', [True, False])
def test_weights_of_bitsandbytes_4_bits_are_made_dense(double: bool, in_4bit: Path, tmp_path: Path) -> None:
    folder = in_4bit / f'double-{double}'
    want = torch.load(in_4bit / f'double-{double}.pt', weights_only=True)
    for model in (AutoActor(folder).model, from_meta(folder), SharedTrunk.from_pretrained(folder).model):
        torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-6)
    before = logits(AutoModelForCausalLM.from_pretrained(in_4bit / 'dense', dtype=torch.float32))
    assert not torch.allclose(want, before, atol=1e-3)  # the weights were quantized
    actor = AutoActor(folder, lora_rank=2)
    torch.testing.assert_close(logits(actor.model), want, rtol=1e-5, atol=1e-6)
    actor.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(again.config, 'quantization_config') and again.dtype is torch.bfloat16
    torch.testing.assert_close(logits(again.float()), want, rtol=1e-5, atol=1e-6)
    assert load_config(folder).vocab_size == read_config(folder / 'config.json').vocab_size


def test_4_bits_without_their_scales_are_refused(in_4bit: Path, tmp_path: Path) -> None:
    shutil.copytree(in_4bit / 'double-True', tmp_path / 'folder')
    name = 'model.layers.1.mlp.up_proj.weight'
    for lost in ('absmax', 'quant_state.bitsandbytes__nf4'):
        tensors = load((in_4bit / 'double-True' / 'model.safetensors').read_bytes())
        del tensors[f'{name}.{lost}']
        store(tmp_path / 'folder', tensors)
        for load_folder in (AutoActor, from_meta):
            with pytest.raises(ValueError, match=f'model.safetensors: what makes {name} of 4 bits dense is incomplete'):
                load_folder(tmp_path / 'folder')


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


def refused(folder: Path, message: str, *loaders: Callable[[Path], Any]) -> None:
    for load_folder in loaders:
        with pytest.raises(ValueError, match=message) as error:
            load_folder(folder)
        assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('make', 'message'),
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
def test_wrong_folders_are_named_in_one_line(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path)
    refused(tmp_path, message, AutoActor, from_meta, SharedTrunk.from_pretrained)


@pytest.mark.parametrize('settings', [{'quant_method': 'bitsandbytes', 'load_in_8bit': True}, {'quant_method': 'gptq'}])
def test_quantized_weights_are_refused_by_method(settings: dict[str, Any], tmp_path: Path) -> None:
    plain('llama')(tmp_path)
    change_config(tmp_path, quantization_config=settings)
    loaders = (AutoActor, AutoCritic, AutoRM, from_meta, SharedTrunk.from_pretrained, load_config, read_config)
    refused(tmp_path, rf'holds quantized weights \({settings["quant_method"]}.*--quantize nf4', *loaders)
    refused(tmp_path / 'config.json', 'holds quantized weights', read_config)


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    plain('llama')(tmp_path)
    (tmp_path / 'own.py').write_text('raise SystemExit("it ran")\n')
    change_config(tmp_path, auto_map={'AutoModelForCausalLM': 'own.OwnModel'})
    assert AutoActor(tmp_path).model.config.model_type == 'llama'  # a known family needs no remote code
    auto_map = {'AutoConfig': 'own.OwnConfig', 'AutoModelForCausalLM': 'own.OwnModel'}
    change_config(tmp_path, model_type='own_model', auto_map=auto_map)
    message = 'brings code of its own .auto_map in config.json.*--trust_remote_code'
    refused(tmp_path, message, AutoActor, AutoCritic, AutoRM, from_meta, load_config, read_config)
