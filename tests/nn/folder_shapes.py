"""Folders as they lie on disks and on the hub, of several versions of transformers, and what is computed with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from chatgpt.nn.loading import load_causal_lm
from chatgpt.nn.weights import fill_model
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
    """Saved twice: transformers reads the whole file."""
    in_shards(folder)
    plain('llama', seed=5)(folder / 'other')
    shutil.move(folder / 'other' / 'model.safetensors', folder)


def in_shards(folder: Path) -> None:
    tiny_causal_lm('llama').save_pretrained(folder, max_shard_size='40KB')
    assert len(list(folder.glob('model-*.safetensors'))) > 2


def head_twice(folder: Path) -> None:
    """Tied by the config, and both in the file, as some tools write."""
    tiny_causal_lm('gpt2').save_pretrained(folder)
    tensors = stored(folder)
    assert 'lm_head.weight' not in tensors
    store(folder, tensors | {'lm_head.weight': tensors['transformer.wte.weight']})


def head_instead(folder: Path) -> None:
    """Tied, and stored under the name of the head alone."""
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
    """As the first GPT-2 lies on the hub: names of the trunk alone, its masks, an older file format."""
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


def later(folder: Path) -> Any:
    """Built on the meta device and filled, as a sharded strategy does."""
    with torch.device('meta'):
        model = load_causal_lm(folder)
    fill_model(model, model.weights_source)
    return model
