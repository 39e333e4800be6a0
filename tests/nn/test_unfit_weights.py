"""Weights that do not fit their config, are damaged or lack a tensor raise errors that name file and tensor, loaded at
once or from the meta device: missing tensors are never initialised at random."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from model_cases import SIZES, WAYS
from safetensors import torch as safetensors
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from chatgpt.nn import Actor, AutoActor, AutoCritic, AutoRM, ILQLModel, RewardModel, mlp_head
from chatgpt.testing import tiny_causal_lm, tiny_config


def loaded(path):
    """Returns copies of a file's tensors, not memory-mapped from a file that will be overwritten."""
    return safetensors.load(path.read_bytes())


def edited(folder, edit, family='gpt2', base=False, **kw):
    """Writes a folder with weights after `edit`, which changes a dict of tensors."""
    model = tiny_causal_lm(family, **kw)
    (model.base_model if base else model).save_pretrained(folder)
    path = folder / 'model.safetensors'
    tensors = loaded(path)
    edit(tensors)
    safetensors.save_file(tensors, path, metadata={'format': 'pt'})
    return folder


def layer(tensors):
    return [name for name in tensors if '.1.' in name]


def drop_a_layer(tensors):
    for name in layer(tensors):
        del tensors[name]


def add_a_layer(tensors):
    tensors |= {name.replace('.1.', '.2.'): tensors[name].clone() for name in layer(tensors)}


def unknown_tensor(tensors):
    tensors['stranger.weight'] = torch.zeros(2)


def with_weight(change):
    """Returns an edit of the first weight of the second layer."""

    def edit(tensors):
        name = next(n for n in layer(tensors) if n.endswith('weight'))
        tensors[name] = change(tensors[name])

    return edit


misshaped, nan, infinite = map(
    with_weight, (lambda t: torch.zeros(3, 5), lambda t: t * float('nan'), lambda t: t + float('inf'))
)


@WAYS
@pytest.mark.parametrize(
    ('cls', 'family', 'edit', 'message'),
    [
        (AutoActor, 'gpt2', drop_a_layer, r'it holds no tensor for \S*\.1\.\S+ \(and \d+ more\) of \w+; .*config.json'),
        (AutoCritic, 'llama', drop_a_layer, r'it holds no tensor for \S*\.1\.\S+ \(and \d+ more\) of \w+'),
        (AutoActor, 'bloom', add_a_layer, r'it holds \S*\.2\.\S+ \(and \d+ more\), for which \w+ has no place; '),
        (AutoRM, 'opt', add_a_layer, r'it holds \S*\.2\.\S+ \(and \d+ more\), for which \w+ has no place; '),
        (AutoCritic, 'gpt2', unknown_tensor, 'it holds stranger.weight, for which'),
        (AutoActor, 'llama', misshaped, r'\S*\.1\.\S+ is \(3, 5\), the model wants \(\d'),
        (AutoRM, 'opt', nan, r'\S*\.1\.\S+weight holds NaN'),
        (AutoActor, 'gpt2', infinite, r'\S*\.1\.\S+ holds infinite'),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(load, cls, family, edit, message, tmp_path):
    with pytest.raises(ValueError, match=f'model.safetensors: {message}') as error:
        load(cls, edited(tmp_path, edit, family))
    assert '\n' not in str(error.value)


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
def test_truncated_files_are_refused_by_name(load, tmp_path):
    tiny_causal_lm('gpt2').save_pretrained(tmp_path)
    path = tmp_path / 'model.safetensors'
    whole = path.read_bytes()
    for left in (0, 5, 400, -8):
        path.write_bytes(whole[:left])
        with pytest.raises(ValueError, match=rf'{path}: a damaged safetensors file of \d+ bytes .*copy or') as error:
            load(AutoActor, tmp_path)
        assert '\n' not in str(error.value)


@WAYS
@pytest.mark.parametrize('family', ['gpt2', 'llama'])
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
    if family == 'llama':  # its head is a separate tensor, which a base model does not have
        with pytest.raises(ValueError, match='no tensor for lm_head.weight of LlamaForCausalLM'):
            load(AutoActor, tmp_path / 'True')
        assert load(AutoActor, edited(tmp_path / 'tied', lambda t: None, 'llama', True, tie_word_embeddings=True))


GROUPS = {'first_k_dense_replace': 1, 'n_group': 1, 'topk_group': 1, 'num_key_value_heads': 2}
BALANCED = {'n_routed_experts': 4, 'moe_intermediate_size': 16, 'num_experts_per_tok': 2, **GROUPS}


@WAYS
@pytest.mark.parametrize(
    ('config', 'gone'),
    [
        (transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4), r'\.1\..*experts\.2\.w1'),
        # mixtures of experts like DeepSeek's balance their experts by a buffer
        (transformers.Glm4MoeConfig(**SIZES, **BALANCED), 'e_score_correction_bias'),
        (tiny_config('llama', num_labels=1), '^score'),
    ],
    ids=['part of an expert', 'buffer', 'head of a classifier'],
)
def test_parts_that_lack_are_named(load, config, gone, tmp_path):
    kind = AutoModelForCausalLM if gone != '^score' else AutoModelForSequenceClassification
    cls = AutoActor if gone != '^score' else RewardModel.from_pretrained
    kind.from_config(config).save_pretrained(tmp_path)
    assert load(cls, tmp_path)
    without(tmp_path, gone)
    with pytest.raises(ValueError, match=r'(model\.safetensors: .*|no tensor .)(experts|e_score|score)') as error:
        load(cls, tmp_path)
    assert '\n' not in str(error.value)


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
    assert type(module).from_pretrained(tmp_path)
    name = sorted(tensors)[-1]
    faults = {'a damaged safetensors file of 0 bytes': None, f'{name} holds NaN': tensors[name] * float('nan')}
    faults |= {rf'{name} is \(.*, the model wants \(': torch.cat([tensors[name]] * 2)}
    for message, wrong in faults.items():
        path.write_bytes(b'' if wrong is None else safetensors.save(tensors | {name: wrong}))
        with pytest.raises(ValueError, match=f'{path.name}: {message}') as error:
            type(module).from_pretrained(tmp_path)
        assert '\n' not in str(error.value)
    if isinstance(module, ILQLModel):
        path.write_bytes(whole)
        tensors = loaded(path)
        del tensors[name]
        safetensors.save_file(tensors, path)
        with pytest.raises(ValueError, match=f'{path.name}: it holds no tensor for {name}'):
            type(module).from_pretrained(tmp_path)


def without(folder, names):
    """Removes tensors from the folder's file."""
    path = folder / 'model.safetensors'
    tensors = loaded(path)
    gone = [n for n in tensors if re.search(names, n)]
    assert gone, sorted(tensors)
    safetensors.save_file({n: t for n, t in tensors.items() if n not in gone}, path, metadata={'format': 'pt'})
    return gone


@WAYS
@pytest.mark.parametrize(('cls', 'family'), [(AutoActor, 'gpt2'), (AutoCritic, 'llama')])
def test_each_kind_of_tensor_of_a_family(load, cls, family, tmp_path):
    model = tiny_causal_lm(family)
    model.save_pretrained(tmp_path)
    whole = (tmp_path / 'model.safetensors').read_bytes()
    kinds = {re.sub(r'\.\d+\.', '.0.', name) for name in safetensors.load(whole)} - {'lm_head.weight'}
    assert len(kinds) > 10
    for name in kinds:
        without(tmp_path, f'^{re.escape(name)}$')
        with pytest.raises(ValueError, match=r'model\.safetensors: it holds no tensor for ') as error:
            load(cls, tmp_path)
        assert name.partition('.')[2] in str(error.value) and '\n' not in str(error.value)
        (tmp_path / 'model.safetensors').write_bytes(whole)


@WAYS
def test_heads_of_other_uses_under_their_several_names(load, tmp_path):
    """A trunk for scores from an ELECTRA, without its own heads."""
    model = transformers.ElectraForPreTraining(transformers.ElectraConfig(**SIZES, embedding_size=16))
    model.save_pretrained(tmp_path)
    got = load(AutoRM, tmp_path)
    name = 'encoder.layer.0.output.dense.weight'
    assert torch.equal(got[f'model.{name}'], dict(model.electra.named_parameters())[name])
    # an unused pooler may be missing
    transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / 'bert')
    assert not any('pooler' in name for name in loaded(tmp_path / 'bert' / 'model.safetensors'))
    assert load(AutoRM, tmp_path / 'bert')
