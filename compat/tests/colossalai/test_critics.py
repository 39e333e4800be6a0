"""Critics and modules of ColossalAI's `chatgpt` that this library does not have under these names."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from chatgpt.testing import tiny_causal_lm, tiny_config
from chatgpt_compat.coati.models import Critic, GPTCritic
from chatgpt_compat.colossalai import SERVED
from chatgpt_compat.colossalai.models import Actor


def test_critics_take_use_action_mask():
    model = tiny_causal_lm('gpt2')
    positional = Critic(model, None, 0, 'none', True)
    assert positional.value_head is not None and Critic(model, use_action_mask=False).value_head is not None
    assert GPTCritic(config=tiny_config('gpt2'), use_action_mask=True).value_head is not None


@pytest.mark.parametrize('role', [Critic, Actor])
def test_padded_ids_are_an_error_that_says_what_to_give(role):
    with pytest.raises(
        ValueError, match=r'ids of shape \(1, 3\) given; it takes a Batch, which chatgpt.batching.collate'
    ):
        role(tiny_causal_lm('gpt2'))(torch.tensor([[3, 4, 5]]))


@pytest.mark.parametrize(
    'name',
    [
        *('nn.GPTCritic', 'nn.critic.Critic', 'models.base.critic.Critic', 'models.opt.opt_critic.OPTCritic'),
        *('models.base.lm.LM', 'models.gpt.gpt_lm.GPTLM', 'models.bloom.bloom_lm.BLOOMLM'),
        *('models.deberta.deberta_critic.DebertaCritic', 'models.deberta.deberta_rm.DebertaRM'),
        'trainer.strategies.base.Strategy',
    ],
)
def test_names_are_served(name):
    module, attribute = SERVED[name].split(':')
    assert hasattr(import_module(module), attribute)
