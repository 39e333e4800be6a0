"""A model that is saved into the folder of an earlier one is what is loaded from there: heads of the earlier one are
gone, and only then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chatgpt.batching import collate
from chatgpt.nn import Actor, Critic, ILQLModel, RewardModel
from chatgpt.nn.loading import trunk_of
from chatgpt.nn.lora import convert_to_lora
from chatgpt.nn.peft_format import export_peft
from chatgpt.nn.reward_model import load_scorer
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Sequence

BATCH = collate(
    [
        Sequence(
            prompt_ids=torch.tensor([5, 6]),
            response_ids=torch.tensor([7, 8, 2]),
            response_mask=torch.ones(3, dtype=torch.bool),
        )
    ]
)


def earlier_critic(folder, family):
    critic = Critic(trunk_of(tiny_causal_lm(family)))
    nn.init.normal_(critic.value_head.weight)
    critic.save_pretrained(folder)
    assert (folder / 'value_head.safetensors').is_file()
    return critic.eval()


@pytest.mark.parametrize('family', ['gpt2', 't5'])
def test_an_actor_over_a_critic_has_no_values(family, tmp_path):
    earlier_critic(tmp_path, family)
    model = tiny_causal_lm(family, seed=1)
    Actor(model).save_pretrained(tmp_path)
    again = Actor.from_pretrained(tmp_path).eval()
    assert again.value_head is None and again(BATCH).values is None
    torch.testing.assert_close(again(BATCH).logprobs, Actor(model)(BATCH).logprobs)


def test_a_reward_model_that_is_a_classifier_over_a_critic_has_its_own_head(tmp_path):
    earlier_critic(tmp_path, 'gpt2')
    reward = RewardModel(trunk_of(tiny_causal_lm('gpt2', seed=1))).eval()
    reward.save_pretrained(tmp_path)
    torch.testing.assert_close(RewardModel.from_pretrained(tmp_path).eval()(BATCH), reward(BATCH))


def test_an_ilql_model_over_an_actor_and_an_actor_over_it(tmp_path):
    Actor(tiny_causal_lm('t5'), value_head=True).save_pretrained(tmp_path)
    ILQLModel(tiny_causal_lm('t5', seed=1)).save_pretrained(tmp_path)
    assert Actor.from_pretrained(tmp_path).value_head is None
    Actor(tiny_causal_lm('t5', seed=2)).save_pretrained(tmp_path)
    new = ILQLModel.from_pretrained(tmp_path, two_qs=False)
    assert len(new.q_heads) == 1  # not the two that were there


def test_an_adapter_over_that_of_a_reward_model_has_no_head(tmp_path):
    tiny_causal_lm('gpt2').save_pretrained(tmp_path / 'base')
    earlier_critic(tmp_path / 'adapter', 'gpt2')
    for name in ('model.safetensors', 'config.json'):  # what an adapter's folder has not
        (tmp_path / 'adapter' / name).unlink()
    actor = Actor.from_pretrained(tmp_path / 'base')
    convert_to_lora(actor.model, 2)
    export_peft(actor, tmp_path / 'adapter')
    assert load_scorer(tmp_path / 'adapter').head is None


def test_an_adapter_beside_its_base_leaves_the_base_its_head(tmp_path):
    earlier = earlier_critic(tmp_path, 'gpt2')
    adapted = Critic.from_pretrained(tmp_path)
    convert_to_lora(adapted.model, 2)
    export_peft(adapted, tmp_path)
    assert (tmp_path / 'adapter_model.safetensors').is_file()
    torch.testing.assert_close(Critic.from_pretrained(tmp_path).eval()(BATCH), earlier(BATCH))


def test_a_save_that_transformers_refuses_leaves_the_earlier_critic_whole(tmp_path):
    earlier = earlier_critic(tmp_path, 'gpt2')
    model = tiny_causal_lm('gpt2', seed=1)
    model.generation_config.do_sample, model.generation_config.top_p = False, 0.5
    with pytest.raises(ValueError, match='top_p'):
        Actor(model).save_pretrained(tmp_path)
    torch.testing.assert_close(Critic.from_pretrained(tmp_path).eval()(BATCH), earlier(BATCH))
