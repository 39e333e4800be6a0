"""Weights that do not belong to their config, or are damaged, are refused by file and tensor, whole and on the meta
device."""

from __future__ import annotations

import json

import pytest
import torch
from model_cases import WAYS
from safetensors import torch as safetensors

from chatgpt.nn import Actor, AutoActor, AutoCritic, AutoRM, ILQLModel, RewardModel, mlp_head
from chatgpt.testing import FAMILIES, tiny_causal_lm


def loaded(path):
    """Its tensors in memory of their own, not mapped from a file that is about to be written."""
    return safetensors.load(path.read_bytes())


def edited(folder, edit, family='gpt2', base=False, **kw):
    """A folder whose weights went through `edit`, which changes a dict of tensors."""
    model = tiny_causal_lm(family, **kw)
    (model.base_model if base else model).save_pretrained(folder)
    path = folder / 'model.safetensors'
    tensors = loaded(path)
    edit(tensors)
    safetensors.save_file(tensors, path, metadata={'format': 'pt'})
    return folder


def layer(tensors, number=1):
    return [name for name in tensors if f'.{number}.' in name]


def drop_a_layer(tensors):
    for name in layer(tensors):
        del tensors[name]


def add_a_layer(tensors):
    for name in layer(tensors):
        tensors[name.replace('.1.', '.2.')] = tensors[name].clone()


def nan(tensors):
    tensors[next(n for n in layer(tensors) if n.endswith('weight'))].view(-1)[3] = float('nan')


def infinite(tensors):
    tensors[next(n for n in layer(tensors) if n.endswith('bias') or 'layernorm' in n)].view(-1)[0] = float('inf')


def misshaped(tensors):
    name = next(n for n in layer(tensors) if n.endswith('weight'))
    tensors[name] = torch.zeros(3, 5)


def stranger(tensors):
    tensors['stranger.weight'] = torch.zeros(2)


@WAYS
@pytest.mark.parametrize(
    ('cls', 'family'), [(AutoActor, 'gpt2'), (AutoActor, 'bloom'), (AutoCritic, 'llama'), (AutoRM, 'opt')]
)
@pytest.mark.parametrize(
    ('edit', 'said'),
    [
        (drop_a_layer, r'model.safetensors: it holds no tensor for \S*\.1\.\S+ \(and \d+ more\) of \w+; .*config.json'),
        (
            add_a_layer,
            r'model.safetensors: it holds \S*\.2\.\S+ \(and \d+ more\), for which \w+ has no place; .*config.json',
        ),
        (stranger, 'model.safetensors: it holds stranger.weight, for which'),
        (misshaped, r'model.safetensors: \S*\.1\.\S+ is \(3, 5\), the model wants \(\d'),
        (nan, r'model.safetensors: \S*\.1\.\S+weight holds NaN'),
        (infinite, r'model.safetensors: \S*\.1\.\S+ holds infinite'),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(load, cls, family, edit, said, tmp_path):
    with pytest.raises(ValueError, match=said) as told:
        load(cls, edited(tmp_path, edit, family))
    assert '\n' not in str(told.value)


@WAYS
def test_a_bare_trunk_and_a_damaged_shard_are_named_too(load, tmp_path):
    with pytest.raises(ValueError, match=r'it holds h\.2\.'):
        load(AutoCritic, edited(tmp_path / 'bare', add_a_layer, base=True))
    tiny_causal_lm('llama').save_pretrained(tmp_path / 'shards', max_shard_size='40KB')
    index = json.loads((tmp_path / 'shards' / 'model.safetensors.index.json').read_text())['weight_map']
    name = 'model.layers.1.mlp.up_proj.weight'
    path = tmp_path / 'shards' / index[name]
    tensors = loaded(path)
    tensors[name][0, 0] = float('nan')
    safetensors.save_file(tensors, path, metadata={'format': 'pt'})
    with pytest.raises(ValueError, match=f'{index[name]}: {name} holds NaN'):
        load(AutoActor, tmp_path / 'shards')


@WAYS
@pytest.mark.parametrize('left', [0, 5, 400, -8])
def test_truncated_files_are_refused_by_name(load, left, tmp_path):
    tiny_causal_lm('gpt2').save_pretrained(tmp_path)
    path = tmp_path / 'model.safetensors'
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(
        ValueError, match=rf'{path}: a damaged safetensors file of \d+ bytes .*copy or download it again'
    ) as told:
        load(AutoActor, tmp_path)
    assert '\n' not in str(told.value)


@WAYS
@pytest.mark.parametrize('family', FAMILIES)
def test_what_belongs_to_other_heads_may_lack_or_be_there(load, family, tmp_path):
    def heads(tensors):
        tensors |= {
            'score.weight': torch.zeros(1, 32),
            'v_head.summary.weight': torch.zeros(1, 32),
            'classifier.out_proj.bias': torch.zeros(1),
        }

    for base in (False, True):
        folder = edited(tmp_path / str(base), heads, family, base)
        for cls in (AutoCritic, AutoRM):
            assert load(cls, folder)
    assert load(AutoActor, tmp_path / 'False')
    if family == 'llama':  # its head is a tensor of its own, and a base model has none
        with pytest.raises(ValueError, match='no tensor for lm_head.weight of LlamaForCausalLM'):
            load(AutoActor, tmp_path / 'True')
        assert load(AutoActor, edited(tmp_path / 'tied', lambda t: None, 'llama', True, tie_word_embeddings=True))


@WAYS
def test_buffers_of_older_files_are_passed_over(load, tmp_path):
    def older(tensors):
        tensors |= {
            'transformer.h.0.attn.bias': torch.ones(1, 1, 8, 8),
            'transformer.h.0.attn.masked_bias': torch.tensor(-1e4),
        }

    assert load(AutoActor, edited(tmp_path / 'gpt2', older))

    def inverse(tensors):
        tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = torch.ones(4)

    for cls in (AutoActor, AutoCritic):
        assert load(cls, edited(tmp_path / 'llama', inverse, 'llama'))


@WAYS
def test_a_pooler_that_nothing_reads_may_lack(load, tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    assert not any('pooler' in name for name in loaded(tmp_path / 'model.safetensors'))
    assert load(AutoRM, tmp_path)


@pytest.mark.parametrize(
    'build',
    [
        lambda: Actor(tiny_causal_lm('gpt2'), value_head=True),
        lambda: RewardModel(tiny_causal_lm('opt'), value_head=mlp_head(32)),
        lambda: ILQLModel(tiny_causal_lm('gpt2')),
    ],
)
def test_heads_beside_the_model_are_read_as_carefully(build, tmp_path):
    module = build()
    module.save_pretrained(tmp_path)
    (path,) = [p for p in tmp_path.glob('*.safetensors') if p.name != 'model.safetensors']
    whole, tensors = path.read_bytes(), loaded(path)
    path.write_bytes(b'')
    with pytest.raises(ValueError, match=f'{path.name}: a damaged safetensors file of 0 bytes'):
        type(module).from_pretrained(tmp_path)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[0] = float('nan')
    safetensors.save_file(tensors, path)
    with pytest.raises(ValueError, match=f'{path.name}: {name} holds NaN'):
        type(module).from_pretrained(tmp_path)
    path.write_bytes(whole)
    assert type(module).from_pretrained(tmp_path)
