"""Heads and critics."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from model_cases import SIZES, close, deberta_config, sequences
from torch import nn
from transformers import BertConfig, BertModel, OPTConfig

from chatgpt.batching import collate
from chatgpt.nn import Critic, DebertaCritic, GPTCritic, OPTCritic, RewardModel, critic_head, mlp_head, reward_head
from chatgpt.nn.heads import in_fp32
from chatgpt.nn.lora import lora_layers
from chatgpt.testing import FAMILIES, tiny_causal_lm


def slow_values(critic, seqs, shift=0):
    values = []
    for s in seqs:
        with torch.no_grad():
            states = critic.model(torch.cat([s.prompt_ids, s.response_ids])[None]).last_hidden_state[0].double()
        head = deepcopy(critic.value_head).double()
        for i in range(len(s.response_ids)):
            values.append(head(states[len(s.prompt_ids) - 1 + i + shift])[0])
    return torch.stack(values).detach()


@pytest.mark.parametrize('family', FAMILIES)
def test_values_are_read_before_each_action_whatever_the_padding(family):
    critic, seqs = Critic(tiny_causal_lm(family).base_model, reward_head(32)).eval(), sequences()
    values = critic(collate(seqs))
    assert values.shape == (10,) and values.dtype == torch.float32
    assert close(values, slow_values(critic, seqs))
    assert not close(values, slow_values(critic, seqs, shift=1), 1e-2)
    wide = collate([*seqs, *sequences([(30, 20)], seed=1)], pad_id=9)
    assert close(critic(wide)[:10], values)


def test_a_causal_lm_gives_its_trunk():
    model = tiny_causal_lm('gpt2')
    critic = Critic(model)
    assert critic.model is model.transformer
    assert not any('lm_head' in n for n in critic.state_dict())


def test_opt_with_a_projection_has_the_projected_width():
    critic = OPTCritic(config=OPTConfig(**SIZES, word_embed_proj_dim=16, ffn_dim=32, do_layer_norm_before=False))
    assert critic.value_head.in_features == 16
    assert critic(collate(sequences())).shape == (10,)


def test_how_heads_start():
    torch.manual_seed(0)
    width = 4096
    reward = reward_head(width)
    assert float(reward.weight.detach().std()) == pytest.approx(1 / math.sqrt(width + 1), rel=0.05)
    assert abs(float(reward.weight.detach().mean())) < 4 / width and float(reward.bias.detach()) == 0.0
    states = torch.randn(50, width)
    assert float(in_fp32(reward, states).detach().std()) == pytest.approx(1.0, rel=0.4)
    for head in (critic_head(width), mlp_head(width)):
        values = in_fp32(head, states).detach()
        assert 0 < float(values.abs().max()) < 0.02


def test_heads_follow_the_global_seed():
    def drawn(seed):
        torch.manual_seed(seed)
        return [p.detach().clone() for head in (critic_head(8), reward_head(8), mlp_head(8)) for p in head.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(drawn(1), drawn(1), strict=True))
    assert not torch.equal(drawn(1)[0], drawn(2)[0])
    assert not torch.equal(drawn(1)[0] * 1e3, drawn(1)[2]), 'two heads drew the same numbers'


@pytest.mark.parametrize(
    'head', [critic_head(16), mlp_head(16), nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 1))]
)
def test_a_head_cast_to_bf16_still_multiplies_in_fp32(head):
    head = head.to(torch.bfloat16)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    states = torch.randn(20, 16).to(torch.bfloat16)
    exact = deepcopy(head).double()(states.double())[:, 0]
    got = in_fp32(head, states)
    assert got.dtype == torch.float32 and close(got, exact, 1e-4)
    assert not close(head(states)[:, 0], exact, 1e-3)


def test_a_deberta_critic_sees_no_later_token():
    torch.manual_seed(0)
    critic = DebertaCritic(config=deberta_config()).eval()
    nn.init.normal_(critic.value_head.weight)
    seqs = sequences([(2, 6), (3, 1)])
    values = critic(collate(seqs))
    changed = deepcopy(seqs)
    changed[0].response_ids[3] = 60  # the state after action 3 is the first that may see it
    after = critic(collate(changed))
    assert close(after[:4], values[:4]) and not close(after[4:6], values[4:6], 1e-3)
    assert close(critic(collate(seqs[1:])), values[6:]), 'padding changed a value'
    with torch.no_grad():
        both_ways = critic.model(torch.cat([seqs[0].prompt_ids, seqs[0].response_ids])[None]).last_hidden_state[0]
    assert not close(in_fp32(critic.value_head, both_ways)[1:7], values[:6], 1e-3), 'uncut attention gives other values'


def test_encoders_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match='must not look ahead, and BertModel does'):
        Critic(BertModel(BertConfig(**SIZES)))
    with pytest.raises(ValueError, match='must not look ahead'):
        DebertaCritic(config=deberta_config(conv_kernel_size=3))
    with pytest.raises(ValueError, match='a Linear given; it must be a transformers PreTrainedModel'):
        Critic(nn.Linear(2, 2))


@pytest.mark.parametrize('head', [critic_head, mlp_head])
def test_a_critic_survives_a_folder(head, tmp_path):
    critic, batch = Critic(tiny_causal_lm('llama'), head(32), lora_rank=2).eval(), collate(sequences())
    for tensor in (*critic.value_head.parameters(), *(layer.lora_B for layer in lora_layers(critic).values())):
        nn.init.normal_(tensor)
    critic.save_pretrained(tmp_path)
    again = Critic.from_pretrained(tmp_path).eval()
    assert close(again(batch), critic(batch), 1e-4) and not lora_layers(again)
    with pytest.raises(ValueError, match="family 'gpt2'.*'llama'; use AutoCritic"):
        GPTCritic.from_pretrained(tmp_path)


def test_a_critic_from_a_reward_model_values_the_end_at_its_score():
    reward_model = RewardModel(tiny_causal_lm('gpt2'))
    reward_model.calibrate(0.75)
    critic = Critic.from_reward_model(reward_model)
    one = sequences([(3, 4)])
    longer = deepcopy(one)
    longer[0].response_ids = torch.cat([longer[0].response_ids, torch.tensor([2])])
    longer[0].response_mask = torch.ones(5, dtype=torch.bool)
    assert close(critic(collate(longer))[-1:], reward_model(collate(one)))
    with torch.no_grad():
        critic.value_head.weight.zero_()
    assert float(reward_model.value_head.weight.detach().abs().sum()) > 0, 'the two share their head'
