"""Models that are given, saved and loaded again: the same numbers, or an error of one line instead of a lost model."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_cases import SIZES, disturb, sequences
from torch import nn
from transformers import AutoModelForCausalLM

from chatgpt.batching import collate
from chatgpt.nn import Actor, AutoActor, AutoRM, Critic, GPTCritic, RewardModel, mlp_head
from chatgpt.nn.heads import centred_head, save_head
from chatgpt.nn.hydra import freeze_below
from chatgpt.nn.lora import lora_layers
from chatgpt.nn.peft_format import check_export, export_peft
from chatgpt.nn.quantized import NF4Linear, quantize_blocks
from chatgpt.nn.shared import SharedTrunk
from chatgpt.testing.fakes import tiny_causal_lm

BATCH = collate(sequences())


class DeepHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, 1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(states).tanh())


@torch.no_grad()
def scores(model: Any) -> torch.Tensor:
    return model.eval()(BATCH)


def test_a_model_with_adapters_of_transformers_or_peft_is_refused(monkeypatch):
    """transformers would save its adapters alone, without what is trained here."""
    peft = pytest.importorskip('peft')
    config = peft.LoraConfig(r=2, target_modules=['c_attn'])
    model = tiny_causal_lm('gpt2')
    wrapped = peft.get_peft_model(deepcopy(model), config)
    for role in (Actor, Critic):
        with pytest.raises(ValueError, match='must be a transformers PreTrainedModel'):
            role(wrapped)
    # transformers 5.24 asks for a PEFT that is not released
    monkeypatch.setattr('transformers.integrations.peft.MIN_PEFT_VERSION', '0.20.0')
    model.add_adapter(config)
    for role in (Actor, Critic, RewardModel):
        with pytest.raises(ValueError, match='adapters that transformers loaded; give the folder of the adapter'):
            role(model)


def test_an_adapter_on_a_folded_adapter_is_not_written_without_the_first(tmp_path: Path):
    tiny_causal_lm('gpt2').save_pretrained(tmp_path / 'base')
    first = AutoActor(pretrained=str(tmp_path / 'base'), lora_rank=2)
    disturb(first.model)
    export_peft(first, tmp_path / 'adapter')
    second = AutoActor(pretrained=str(tmp_path / 'adapter'), lora_rank=2)
    with pytest.raises(ValueError, match='another adapter folded into its base'):
        check_export(second)
    second.save_pretrained(tmp_path / 'whole')
    check_export(AutoActor(pretrained=str(tmp_path / 'whole'), lora_rank=2))


def test_sampling_settings_without_do_sample_do_not_stop_a_save(tmp_path: Path):
    """As in the generation configs of many published models."""
    model = tiny_causal_lm('gpt2')
    model.generation_config.temperature, model.generation_config.top_p = 0.6, 0.9
    model.generation_config.do_sample = None  # as read from a file without it
    Actor(model).save_pretrained(tmp_path)
    assert model.generation_config.do_sample is None  # the model in memory is as before
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (found.generation_config.temperature, found.generation_config.top_p) == (0.6, 0.9)
    model.generation_config.do_sample = False  # greedy, and so it stays
    Actor(model).save_pretrained(tmp_path)
    assert not AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.do_sample


def test_the_shift_of_a_calibrated_reward_model_is_subtracted_once_from_an_adapter_of_it(tmp_path: Path):
    model = RewardModel(tiny_causal_lm('gpt2').base_model)
    nn.init.normal_(model.value_head.weight)
    model.calibrate(1.5)
    model.save_pretrained(tmp_path / 'rm')
    adapted = AutoRM(pretrained=str(tmp_path / 'rm'), lora_rank=2)
    disturb(adapted.model)
    export_peft(adapted, tmp_path / 'adapter')
    state = adapted.state_dict()
    save_head(adapted.value_head, centred_head(state), tmp_path / 'adapter')
    torch.testing.assert_close(scores(RewardModel.from_pretrained(tmp_path / 'adapter')), scores(adapted))


def test_a_critic_from_the_folder_of_a_reward_model_begins_with_its_scores(tmp_path: Path):
    for name, head in (('classifier', None), ('file', mlp_head(32))):
        base = tiny_causal_lm('gpt2', hidden=32).base_model
        model = RewardModel(base, head)
        nn.init.normal_((model.value_head[-1] if head else model.value_head).weight)
        model.calibrate(0.75)
        model.save_pretrained(tmp_path / name)
        critic = Critic.from_pretrained(tmp_path / name)
        want = Critic.from_reward_model(model)
        torch.testing.assert_close(scores(critic), scores(want))


def test_a_head_of_ones_own_is_given_again_to_load_it(tmp_path: Path):
    base = tiny_causal_lm('gpt2', hidden=16).base_model
    model = RewardModel(base, DeepHead(16))
    model.calibrate(0.5)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='load these tensors into it, and give it as value_head'):
        RewardModel.from_pretrained(tmp_path)
    again = RewardModel.from_pretrained(tmp_path, value_head=deepcopy(model.value_head))
    again.calibrate(0.5)
    torch.testing.assert_close(scores(again), scores(model))
    critic, states = Critic.from_reward_model(model), torch.randn(3, 16)
    torch.testing.assert_close(critic.value_head(states), model.value_head(states) - 0.5)


def test_a_critic_takes_classifiers_that_are_no_reward_models_and_checks_the_family(tmp_path: Path):
    settings = SIZES | {'num_labels': 5}
    for name, kind in (('many', 'gpt2'), ('whole', 'deberta-v2')):
        config = transformers.AutoConfig.for_model(kind, **settings | {'num_labels': 5 if name == 'many' else 1})
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / name)
        assert Critic.from_pretrained(tmp_path / name).value_head is not None  # a new head
    config = transformers.AutoConfig.for_model('llama', **SIZES | {'num_labels': 1})
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / 'llama')
    with pytest.raises(ValueError, match='llama'):
        GPTCritic.from_pretrained(tmp_path / 'llama')


def test_a_whole_model_replaces_an_adapter_in_its_folder(tmp_path: Path):
    actor = Actor(tiny_causal_lm('gpt2'), 2)
    disturb(actor.model)
    export_peft(actor, tmp_path)
    other = tiny_causal_lm('gpt2', seed=3)
    Actor(other).save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, other.eval()(ids).logits)


def test_settings_of_adapters_without_a_rank_are_refused():
    for given in ({'lora_options': {'alpha': 32}}, {'lora_train_bias': 'all'}):
        with pytest.raises(ValueError, match='are of adapters: give lora_rank'):
            Actor(tiny_causal_lm('gpt2'), **given)


def test_freeze_below_takes_the_numbers_that_hydra_takes():
    model = tiny_causal_lm('gpt2')
    freeze_below(model, -1)
    assert all(p.requires_grad for p in model.parameters())
    for wrong in (0, -2, True):
        with pytest.raises(ValueError, match='num_layers_unfrozen'):
            freeze_below(model, wrong)


def test_a_model_in_four_bits_without_adapters_is_not_written(tmp_path: Path):
    pytest.importorskip('bitsandbytes')
    trunk = SharedTrunk(tiny_causal_lm('gpt2', hidden=64), quantize='nf4')
    with pytest.raises(ValueError, match='in 4 bits has no adapters'):
        trunk.actor(0).save_pretrained(tmp_path)


@pytest.mark.parametrize('kind', ['falcon', 'mamba'])
def test_layers_in_four_bits_are_those_that_are_called(kind: str):
    """Falcon has a linear layer of its own name, and Mamba's blocks read the weights of some layers."""
    pytest.importorskip('bitsandbytes')
    settings = SIZES | {'hidden_size': 64}
    config = transformers.AutoConfig.for_model(kind, **settings | ({'state_size': 4} if kind == 'mamba' else {}))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        want = model(ids).logits
        quantize_blocks(model)
        found = model(ids).logits
    packed = [name for name, part in model.named_modules() if isinstance(part, NF4Linear)]
    assert packed and not torch.equal(found, want)
    assert float((found - want).norm() / want.norm()) < 0.5


def test_a_state_space_model_in_bf16_is_built():
    config = transformers.AutoConfig.for_model('mamba', **SIZES | {'state_size': 4})
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    assert Actor(model, 2) and lora_layers(model)
