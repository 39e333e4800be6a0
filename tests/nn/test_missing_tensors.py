"""No tensor that a folder lacks is drawn: it is named with its file, whichever model is built, whole or on the meta
device."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from model_cases import WAYS
from safetensors import torch as safetensors
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from chatgpt.nn import AutoActor, AutoCritic, AutoRM, Critic, ILQLModel, RewardModel
from chatgpt.testing import tiny_causal_lm, tiny_config

SMALL = {
    'vocab_size': 64,
    'hidden_size': 32,
    'intermediate_size': 16,
    'num_hidden_layers': 2,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
    'max_position_embeddings': 64,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 2,
}


def without(folder, names):
    """Takes tensors out of the folder's one file."""
    path = folder / 'model.safetensors'
    tensors = safetensors.load(path.read_bytes())
    gone = [n for n in tensors if re.search(names, n)]
    assert gone, sorted(tensors)
    safetensors.save_file({n: t for n, t in tensors.items() if n not in gone}, path, metadata={'format': 'pt'})
    return gone


@WAYS
@pytest.mark.parametrize('cls', [AutoActor, AutoCritic, AutoRM])
@pytest.mark.parametrize('family', ['gpt2', 'llama'])
def test_each_kind_of_tensor_of_a_family(load, cls, family, tmp_path):
    model = tiny_causal_lm(family)
    model.save_pretrained(tmp_path)
    whole = (tmp_path / 'model.safetensors').read_bytes()
    kinds = {re.sub(r'\.\d+\.', '.0.', name) for name in safetensors.load(whole)} - {'lm_head.weight'}
    assert len(kinds) > 10
    for name in kinds:
        without(tmp_path, f'^{re.escape(name)}$')
        with pytest.raises(ValueError, match=r'model\.safetensors: it holds no tensor for ') as told:
            load(cls, tmp_path)
        assert name.partition('.')[2] in str(told.value) and '\n' not in str(told.value)
        (tmp_path / 'model.safetensors').write_bytes(whole)


@WAYS
@pytest.mark.parametrize('cls', [AutoActor, AutoCritic])
def test_a_part_of_an_expert(load, cls, tmp_path):
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    without(tmp_path, r'layers\.1\..*experts\.2\.w1')
    with pytest.raises(ValueError, match=r'model\.safetensors: .*layers\.1\..*experts') as told:
        load(cls, tmp_path)
    assert '\n' not in str(told.value)


@WAYS
def test_a_buffer_that_is_saved(load, tmp_path):
    """Mixtures of DeepSeek's kind balance their experts by one."""
    config = transformers.Glm4MoeConfig(
        **SMALL,
        n_routed_experts=4,
        moe_intermediate_size=16,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (name,) = without(tmp_path, 'e_score_correction_bias')
    with pytest.raises(ValueError, match=f'model.safetensors: it holds no tensor for {name}'):
        load(AutoActor, tmp_path)


@WAYS
def test_a_classifiers_head(load, tmp_path):
    model = AutoModelForSequenceClassification.from_config(tiny_config('llama', num_labels=1))
    model.save_pretrained(tmp_path)
    assert load(RewardModel.from_pretrained, tmp_path)
    without(tmp_path, '^score')
    with pytest.raises(ValueError, match=r'score.weight'):
        load(RewardModel.from_pretrained, tmp_path)


def test_ilql_heads(tmp_path):
    ILQLModel(tiny_causal_lm('gpt2')).save_pretrained(tmp_path)
    (path,) = [p for p in tmp_path.glob('*.safetensors') if p.name != 'model.safetensors']
    tensors = safetensors.load(path.read_bytes())
    name = next(n for n in tensors if n.startswith('target_q_heads'))
    safetensors.save_file({n: t for n, t in tensors.items() if n != name}, path)
    with pytest.raises(ValueError, match=f'{path.name}: it holds no tensor for {name}'):
        ILQLModel.from_pretrained(tmp_path)
    safetensors.save_file(tensors | {name: tensors[name][..., :3].contiguous()}, path)
    with pytest.raises(ValueError, match=f'{path.name}: {name} is .*the model wants'):
        ILQLModel.from_pretrained(tmp_path)


@WAYS
def test_heads_of_other_uses_under_their_several_names(load, tmp_path):
    """A trunk for scores out of an ELECTRA, whose own heads are read by nobody here."""
    config = transformers.ElectraConfig(
        vocab_size=64,
        embedding_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.ElectraForPreTraining(config)
    model.save_pretrained(tmp_path)
    got = load(AutoRM, tmp_path)
    name = 'encoder.layer.0.output.dense.weight'
    assert torch.equal(got[f'model.{name}'], dict(model.electra.named_parameters())[name])


def test_a_head_of_another_shape_is_named(tmp_path):
    Critic(tiny_causal_lm('gpt2').transformer).save_pretrained(tmp_path)
    path = tmp_path / 'value_head.safetensors'
    tensors = safetensors.load(path.read_bytes())
    safetensors.save_file({n: torch.cat([t, t]) for n, t in tensors.items()}, path)
    with pytest.raises(ValueError, match=r'value_head\.safetensors: \w+ is \(2\S*.*, the model wants \(1') as told:
        Critic.from_pretrained(tmp_path)
    assert '\n' not in str(told.value)
