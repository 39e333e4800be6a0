"""Weights of models that were built on the meta device."""

from __future__ import annotations

import json
import weakref
from copy import deepcopy

import pytest
import torch
import transformers
from model_cases import OTHERS, SIZES
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from chatgpt.nn import (
    GPTRM,
    Actor,
    AutoActor,
    AutoCritic,
    AutoRM,
    Critic,
    GPTActor,
    GPTCritic,
    RewardModel,
    initial_tensors,
    mlp_head,
)
from chatgpt.nn.lora import lora_layers
from chatgpt.nn.tensor_files import open_weights
from chatgpt.nn.weights import WeightsSource, weight_files
from chatgpt.testing import FAMILIES, tiny_causal_lm, tiny_config


def everything(module):
    return dict([*module.named_parameters(), *module.named_buffers()])


def both_ways(build, seed=3):
    """Builds the same module with weights and on the meta device."""
    torch.manual_seed(seed)
    real = build()
    torch.manual_seed(seed)
    with torch.device('meta'):
        meta = build()
    assert all(p.is_meta for p in meta.parameters())
    return real, meta


def assert_same(real, meta):
    got, want = dict(initial_tensors(deepcopy(meta))), everything(real)
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].device.type == 'cpu' and torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    ('family', 'kw'),
    [('bloom', {}), ('opt', {'value_head': True}), ('llama', {'value_head': 'mlp'}), ('gpt2', {'lora_rank': 2})]
    + [('llama', {'lora_rank': 2}), ('gpt2', {'num_layers_unfrozen': 1}), ('opt', {'num_layers_unfrozen': 1})],
)
def test_a_fresh_actor_is_the_same_tensor_by_tensor(family, kw):
    config = tiny_config(family, **({'tie_word_embeddings': False} if family == 'opt' else {}))

    def build():
        return AutoActor(config=config, **(kw | ({'value_head': mlp_head(32)} if 'mlp' in kw.values() else {})))

    real, meta = both_ways(build)
    assert_same(real, meta)
    assert meta._linear_head is True and real._linear_head is True
    trained = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (meta, real)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize('cls', [GPTCritic, GPTRM, lambda config, **kw: Critic(GPTActor(config=config).model)])
def test_fresh_critics_and_reward_models_too(cls):
    def build():
        return cls(config=tiny_config('gpt2'), lora_rank=2)

    real, meta = both_ways(build)
    assert_same(real, meta)
    assert deepcopy(meta).model.weights_source == meta.model.weights_source == real.model.weights_source
    other, _ = both_ways(build, seed=4)
    with pytest.raises(AssertionError):
        assert_same(other, meta)


@pytest.mark.parametrize('family', FAMILIES)
def test_pretrained_weights_come_from_the_files(family, tmp_path):
    model = tiny_causal_lm(family)
    model.generation_config.eos_token_id = [2, 7, 9]
    model.save_pretrained(tmp_path, max_shard_size='40KB' if family == 'opt' else '10GB')
    assert (len(list(tmp_path.glob('*.safetensors'))) > 1) == (family == 'opt')
    assert_same(*both_ways(lambda: AutoCritic(pretrained=tmp_path)))
    real, meta = both_ways(lambda: AutoActor(pretrained=tmp_path))
    assert_same(real, meta)
    assert meta.model.generation_config.eos_token_id == real.model.generation_config.eos_token_id == [2, 7, 9]
    actor = Actor(model, value_head=mlp_head(32))
    nn.init.normal_(actor.value_head[0].bias)
    actor.save_pretrained(tmp_path / 'ours')
    real, meta = both_ways(lambda: Actor.from_pretrained(tmp_path / 'ours'))
    assert torch.equal(real.value_head[0].bias, actor.value_head[0].bias)
    assert_same(real, meta)


@pytest.mark.parametrize('labels', [1, 2])
def test_a_reward_model_on_the_meta_device_keeps_head_and_bias(labels, tmp_path):
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(tiny_config('llama', num_labels=labels)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps(config | {'score_bias': 1.25}))
    real, meta = both_ways(lambda: RewardModel.from_pretrained(tmp_path))
    assert float(real.score_bias) == 1.25
    assert_same(real, meta)
    both = [Critic.from_reward_model(m) for m in (real, meta)]
    assert float(both[0].value_head.bias.detach()) != 0.0
    assert_same(*both)


def test_no_more_than_a_block_is_held_at_a_time():
    config = tiny_config('llama', layers=6)
    _, meta = both_ways(lambda: AutoActor(config=config))
    alive, most = [], 0
    for _, tensor in initial_tensors(meta):
        alive.append((weakref.ref(tensor.untyped_storage()), tensor.numel()))
        del tensor
        alive = [(ref, size) for ref, size in alive if ref() is not None]
        most = max(most, sum(size for _, size in alive))
    block = sum(p.numel() for p in meta.model.model.layers[0].parameters())
    total = sum(p.numel() for p in meta.parameters())
    assert most <= 2 * block < total


def test_a_real_module_gives_what_it_holds_now():
    actor = Actor(tiny_causal_lm('gpt2'), value_head=True)
    nn.init.normal_(actor.value_head.weight)
    assert_same(actor, actor)
    hydra = Actor(tiny_causal_lm('gpt2'), num_layers_unfrozen=1)
    nn.init.normal_(hydra.model.transformer.h[1].mlp.c_fc.weight)
    assert_same(hydra, hydra)


def test_adapters_do_not_depend_on_what_was_built_before():
    def factors(extra):
        torch.manual_seed(0)
        actor = GPTActor(config=tiny_config('gpt2'), lora_rank=2)
        torch.randn(extra)
        return [layer.lora_A.detach() for layer in lora_layers(actor).values()]

    one, two = factors(0), factors(5)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], one[4]), 'two blocks drew the same factors'


def test_meta_modules_without_a_record_are_refused():
    with torch.device('meta'):
        model, head = tiny_causal_lm('gpt2'), nn.Module()
        head.weight = nn.Parameter(torch.empty(1, 32))
    with pytest.raises(ValueError, match='model.*: it is on the meta device and has no record of where'):
        initial_tensors(Actor(model))
    with torch.device('meta'):
        actor = GPTActor(config=tiny_config('gpt2'), value_head=head)
    with pytest.raises(ValueError, match='value_head: it is on the meta device'):
        initial_tensors(actor)


def test_an_index_cannot_point_out_of_its_folder(tmp_path):
    index = {'metadata': {}, 'weight_map': {'w': '../secret.safetensors'}}
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(index))
    with pytest.raises(ValueError, match='a shard must lie in the same folder'):
        weight_files(WeightsSource(kind='pretrained', path=str(tmp_path)))


MIXTRAL = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)


@pytest.mark.parametrize(('config', 'cls'), [(MIXTRAL, AutoActor), (MIXTRAL, AutoRM), (OTHERS['gpt_neox'], AutoCritic)])
def test_what_transformers_renames_or_puts_together_is_read_on_the_meta_device(config, cls, tmp_path):
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored = list(open_weights(tmp_path / 'model.safetensors').keys())
    real, meta = both_ways(lambda: cls(tmp_path))
    names = [n for n, _ in real.named_parameters()]
    assert any(n.removeprefix('model.') not in stored and n not in stored for n in names), 'nothing is renamed'
    assert_same(real, meta)


def test_what_a_whole_model_sets_in_its_blocks_is_set():
    states = {'mamba_d_ssm': 32, 'mamba_d_state': 4, 'mamba_n_heads': 2, 'mamba_d_head': 16}
    config = transformers.FalconH1Config(
        **SIZES, **states, num_key_value_heads=2, ssm_multipliers=[0.5, 2.0, 0.25, 3.0, 1.5]
    )
    real, meta = both_ways(lambda: AutoActor(config=config))
    vectors = {n: t for n, t in everything(real).items() if n.endswith('mup_vector')}
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config)
    want = dict(whole.named_buffers())['model.layers.0.mamba.mup_vector']
    assert len(vectors) == 2 and all(torch.equal(t, want) for t in vectors.values())
    assert_same(real, meta)


def test_numbers_that_only_a_constructor_gives():
    config = transformers.ApertusConfig(**SIZES, num_key_value_heads=2)
    torch.manual_seed(0)
    want = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    real, meta = both_ways(lambda: AutoActor(config=config))
    got = dict(real.model.named_parameters())
    alphas = [n for n in want if 'alpha' in n]
    assert alphas and all(torch.equal(got[n], want[n]) for n in alphas)
    with pytest.raises(ValueError, match='its constructor gives .*alpha'):
        dict(initial_tensors(meta))


@pytest.mark.parametrize(
    ('cls', 'option'),
    [(AutoActor, 'lora_rank'), (AutoActor, 'num_layers_unfrozen'), (AutoCritic, 'lora_rank'), (AutoRM, 'lora_rank')],
)
def test_what_is_drawn_after_a_model_is_the_same_on_the_meta_device(cls, option, tmp_path):
    """A critic's head after an actor with adapters has the same initial weights under FSDP as on one process."""
    tiny_causal_lm('llama').save_pretrained(tmp_path)
    drawn = []
    for device in ('cpu', 'meta'):
        torch.manual_seed(7)
        with torch.device(device):
            cls(tmp_path, **{option: 1})
        drawn.append(torch.rand(3, device='cpu'))
    assert torch.equal(*drawn)
