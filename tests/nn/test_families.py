"""The classes by family: construction and errors."""

from __future__ import annotations

import json

import pytest
import torch
from model_cases import deberta_config, sequences
from torch import nn

from chatgpt import nn as chatgpt_nn
from chatgpt.batching import collate
from chatgpt.nn import (
    GPTRM,
    Actor,
    AutoActor,
    AutoCritic,
    AutoRM,
    GPTActor,
    GPTCritic,
    LlamaActor,
    OPTActor,
    load_tokenizer,
)
from chatgpt.nn.loading import load_config
from chatgpt.testing import FAMILIES, byte_tokenizer, tiny_causal_lm, tiny_config

PREFIXES = {'gpt2': 'GPT', 'opt': 'OPT', 'bloom': 'BLOOM', 'llama': 'Llama'}


def batch():
    return collate(sequences([(2, 3), (1, 1)]))


@pytest.mark.parametrize('prefix', PREFIXES.values())
def test_without_anything_the_familys_default_config_is_used(prefix):
    with torch.device('meta'):
        actor = getattr(chatgpt_nn, prefix + 'Actor')()
        critic = getattr(chatgpt_nn, prefix + 'Critic')()
    assert type(actor.config)().vocab_size == actor.config.vocab_size
    assert critic.value_head.in_features == critic.model.config.hidden_size


@pytest.mark.parametrize('family', FAMILIES)
def test_each_class_builds_from_a_folder_or_a_config(family, tmp_path):
    model = tiny_causal_lm(family)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = Actor(model)(batch()).logprobs
        states = model.base_model(batch().input_ids).last_hidden_state
    config = tiny_config(family)
    for prefix in (PREFIXES[family], 'Auto'):
        actor, critic, reward_model = (getattr(chatgpt_nn, prefix + kind) for kind in ('Actor', 'Critic', 'RM'))
        assert torch.equal(actor(pretrained=str(tmp_path)).eval()(batch()).logprobs, want)
        for cls in (critic, reward_model):
            trunk = cls(pretrained=tmp_path).eval().model
            assert torch.equal(trunk(batch().input_ids).last_hidden_state, states)
        assert actor(config=config)(batch()).logprobs.shape == critic(config=config)(batch()).shape == (4,)
        assert reward_model(config=config)(batch()).shape == (2,)


def test_weights_are_fp32_whatever_the_folder_or_config_says(tmp_path):
    tiny_causal_lm('llama').to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / 'config.json').read_text())['dtype'] == 'bfloat16'
    config = tiny_config('llama', dtype='bfloat16')
    for actor in (AutoActor(pretrained=tmp_path), AutoActor(config=config)):
        assert {p.dtype for p in actor.parameters()} == {torch.float32}
    assert config.dtype in ('bfloat16', torch.bfloat16), 'the given config was changed'


def test_fresh_weights_are_those_that_transformers_would_draw():
    torch.manual_seed(0)
    config = tiny_config('gpt2', hidden=64, layers=8)
    model = GPTActor(config=config).model
    deep = torch.cat([b.mlp.c_proj.weight.flatten() for b in model.transformer.h])
    assert float(deep.std()) == pytest.approx(0.1 / (2 * 8) ** 0.5, rel=0.03)  # the residual scaling of GPT-2
    assert float(model.transformer.wte.weight.std()) == pytest.approx(0.1, rel=0.05)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model.transformer.ln_f.weight, torch.ones(64))


def test_lora_and_checkpointing_are_arguments_of_every_kind():
    for cls in ('GPTActor', 'GPTCritic', 'GPTRM'):
        module = getattr(chatgpt_nn, cls)(None, tiny_config('gpt2'), True, 2, 'lora_only')
        trained = {n for n, p in module.named_parameters() if p.requires_grad}
        assert any('lora_A' in n for n in trained) and any(n.endswith('c_attn.bias') for n in trained)
        assert any(getattr(m, 'gradient_checkpointing', False) for m in module.modules())
        head = {n for n, _ in module.named_parameters() if n.startswith('value_head.')}
        assert head <= trained and bool(head) == (cls != 'GPTActor')


def test_the_wrong_family_is_named_with_the_right_one(tmp_path):
    tiny_causal_lm('gpt2').save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"family 'llama', but '{tmp_path}' is of the family 'gpt2'; use AutoActor"):
        LlamaActor(pretrained=tmp_path)
    with pytest.raises(ValueError, match="'opt', but the config is of the family 'bloom'; use AutoActor"):
        OPTActor(config=tiny_config('bloom'))
    with pytest.raises(ValueError, match="family 'deberta-v2'; use AutoActor"):
        GPTActor(config=deberta_config())


@pytest.mark.parametrize(('base', 'right'), [(GPTActor, 'Actor'), (GPTCritic, 'Critic'), (GPTRM, 'RM')])
def test_a_subclass_of_a_family_names_the_class_that_takes_any(base, right):
    class Mine(base):
        pass

    with pytest.raises(ValueError, match=f"Mine takes .* 'gpt2', but the config is .* 'bloom'; use Auto{right}, which"):
        Mine(config=tiny_config('bloom'))


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ('/no/such/folder', "pretrained='/no/such/folder': there is no such folder, and it cannot be a hub name"),
        ('./nowhere', 'there is no such folder'),
        ('a/b/c', 'there is no such folder'),
        ('', 'there is no such folder'),
        ('nobody/nothing', r"hub name \(there is no such folder\) 'nobody/nothing'"),
        (7, 'a int given; it must be a hub name or a folder'),
        (nn.Linear(1, 1), r'a Linear given; .*for a model that you have: Actor\(model\)'),
    ],
)
def test_a_path_that_is_no_model(given, message):
    with pytest.raises(ValueError, match=message) as error:
        AutoActor(pretrained=given, local_files_only=True)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('name', 'right'),
    [('Actor', 'AutoActor.pretrained='), ('Critic', 'AutoCritic.pretrained='), ('RewardModel', 'AutoRM.pretrained=')]
    + [('ILQLModel', 'ILQLModel.from_pretrained')],
)
def test_a_class_that_takes_a_model_names_the_one_that_loads_it(name, right):
    cls = getattr(chatgpt_nn, name)
    for given in ({'pretrained': 'gpt2'}, {'model': 'gpt2'}, {'config': tiny_config('gpt2')}):
        with pytest.raises(ValueError, match=rf'{name}\(model\); to load one: {right}'):
            cls(**given)
    with pytest.raises(TypeError, match='lora_rnk'):
        cls(tiny_causal_lm('gpt2'), lora_rnk=2)


@pytest.mark.parametrize('family', ['gpt2', 'llama'])
def test_a_model_without_a_tokenizer_names_the_flag(family, tmp_path):
    tiny_causal_lm(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'the folder .* holds no tokenizer; give the .* with --tokenizer \(') as error:
        load_tokenizer(tmp_path)
    assert '\n' not in str(error.value)
    if family == 'gpt2':
        (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "GPT2Tokenizer"}')
        with pytest.raises(ValueError, match='empty vocabulary; give'):
            load_tokenizer(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)('a')['input_ids'] == [97]


def test_folders_that_hold_no_model(tmp_path):
    run = tmp_path / 'run'
    (run / 'checkpoints').mkdir(parents=True)
    for load in (load_config, load_tokenizer):
        with pytest.raises(ValueError, match='a training run that has not ended.*: go on with --resume'):
            load(run)
    for name in ('initial', 'actor'):
        (run / name).mkdir()
        (run / name / 'config.json').write_text('{}')
    for load, what in ((load_config, 'so it holds no model'), (load_tokenizer, 'holds no tokenizer')):
        with pytest.raises(ValueError, match=rf'{what}; it is the folder of .*, and the model is in {run}/actor$'):
            load(run)
    (run / 'actor' / 'tokenizer_config.json').write_text('{}')
    with pytest.raises(ValueError, match='cannot load a tokenizer from the folder .*: .*[^:]$') as error:
        load_tokenizer(run / 'actor')
    assert '\n' not in str(error.value) and 'one of: (1)' in str(error.value)
    with pytest.raises(ValueError, match='has no config.json, so it holds no model'):
        AutoCritic(pretrained=tmp_path)
    tiny_config('gpt2').save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='it holds no weights: neither model.safetensors nor') as error:
        AutoRM(pretrained=tmp_path)
    assert '\n' not in str(error.value)
    (tmp_path / 'file').write_text('x')
    with pytest.raises(ValueError, match='is a file; give the folder'):
        AutoActor(pretrained=tmp_path / 'file')


def test_arguments_that_contradict_or_are_unknown():
    with pytest.raises(ValueError, match='AutoActor needs pretrained=NAME_OR_FOLDER or a config'):
        AutoActor()
    with pytest.raises(ValueError, match='give either pretrained .* or config, not both'):
        GPTActor(pretrained='gpt2', config=tiny_config('gpt2'))
    with pytest.raises(ValueError, match="unknown argument 'trust_remote_cod'; did you mean trust_remote_code"):
        GPTCritic(config=tiny_config('gpt2'), trust_remote_cod=True)


def test_a_tokenizer_always_has_a_padding_token(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == 258
    with pytest.raises(ValueError, match='there is no such folder'):
        load_tokenizer('/no/such/folder')
