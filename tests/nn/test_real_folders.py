"""Folders of `folder_shapes.py` load through every door with the numbers that transformers itself gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from folder_shapes import FOLDERS, later, logits, states, store
from safetensors.torch import load
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig

from chatgpt.nn import AutoActor, AutoCritic, AutoRM, initial_tensors, load_config
from chatgpt.nn.loading import load_causal_lm
from chatgpt.nn.shared import SharedTrunk
from chatgpt.nn.weights import fill_model
from chatgpt.plan.setup import read_config
from chatgpt.testing import tiny_causal_lm


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
    for model in (actor.model, later(folder), SharedTrunk.from_pretrained(folder).model, again):
        torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-6)
    with torch.device('meta'):
        sharded = AutoActor(folder)
    later_on = dict(initial_tensors(sharded))
    assert all(torch.equal(later_on[name], p) for name, p in actor.named_parameters())
    for cls in (AutoCritic, AutoRM):
        torch.testing.assert_close(states(cls(folder).model), trunk, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(want, want.flip(0), atol=1e-3)
    assert load_config(folder).vocab_size == read_config(folder).vocab_size == want.shape[-1]


def test_a_name_of_the_hub_that_lies_in_the_cache(tmp_path: Path) -> None:
    repository = tmp_path / 'models--me--tiny'
    folder = repository / 'snapshots' / ('a' * 40)
    FOLDERS['bf16'](folder)
    (repository / 'refs').mkdir()
    (repository / 'refs' / 'main').write_text('a' * 40)
    options = {'cache_dir': str(tmp_path), 'local_files_only': True}
    want = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    actor = AutoActor('me/tiny', **options)
    assert actor.model.weights_source.dtype is torch.bfloat16
    with torch.device('meta'):
        filled = load_causal_lm('me/tiny', **options)
    fill_model(filled, filled.weights_source)
    for model in (actor.model, filled, SharedTrunk.from_pretrained('me/tiny', **options).model):
        torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope='module')
def in_4bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that transformers put into bitsandbytes' 4 bits, scales in 8 and in 32; and dense, as it is read."""
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
    for model in (AutoActor(folder).model, later(folder), SharedTrunk.from_pretrained(folder).model):
        torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-6)
    before = logits(AutoModelForCausalLM.from_pretrained(in_4bit / 'dense', dtype=torch.float32))
    assert not torch.allclose(want, before, atol=1e-3)  # 4 bits are 4 bits
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
        for open_door in (AutoActor, later):
            with pytest.raises(ValueError, match=f'model.safetensors: what makes {name} of 4 bits dense is incomplete'):
                open_door(tmp_path / 'folder')
