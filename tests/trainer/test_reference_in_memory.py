"""The reference is the model as given, in memory: what stands in the folder that it came from is never read again."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Log, assemble, vowels
from transformers import AutoModelForCausalLM

import chatgpt
from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config

PROMPTS = ['a', 'b', 'c', 'd']
PHASE = {'experience_batch_size': 4, 'train_batch_size': 4, 'max_new_tokens': 4}


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp('model')
    GPTActor(config=tiny_config('gpt2', positions=48)).save_pretrained(folder, tokenizer=char_tokenizer())
    return folder


def changed(model: Any) -> Any:
    """Other weights than those in the folder, by far."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize('read_again', [False, True])
def test_ppo_starts_at_no_divergence_from_an_actor_changed_in_memory(folder, read_again):
    actor = changed(GPTActor(pretrained=str(folder)))
    initial = GPTActor(pretrained=str(folder)) if read_again else deepcopy(actor)  # the negative control
    critic = GPTCritic(config=tiny_config('gpt2', positions=48))
    trainer = assemble(NaiveStrategy(seed=3), actor, critic, vowels, initial, tokenizer=char_tokenizer(), **PHASE)
    trainer.fit(PROMPTS, num_episodes=1, max_timesteps=1, update_timesteps=1)
    kl = trainer.log.phases[0]['rollout/kl_mean']
    assert abs(kl) > 0.1 if read_again else kl == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize('method', ['gae', 'grpo', 'dpo', 'dpo with its batch'])
def test_train_starts_at_no_divergence_from_a_model_changed_in_memory(folder, tmp_path, method):
    model, log = changed(AutoModelForCausalLM.from_pretrained(folder)), Log()
    assert model.config.name_or_path == str(folder)  # it could be read again
    pairs = [{'prompt': 'a', 'chosen': 'bc', 'rejected': 'd'}, {'prompt': 'b', 'chosen': 'c', 'rejected': 'de'}]
    if 'dpo' in method:
        names = ('dpo/reward_chosen', 'dpo/reward_rejected')
        given = {'preferences': pairs, 'max_epochs': 1, 'train_batch_size': 2, 'log_interval': 1}
        given['precompute_ref_logprobs'] = method == 'dpo'
    else:
        names = ('rollout/kl_mean', 'rollout/kl_k3_mean')
        given = {'reward_fn': vowels, 'prompts': PROMPTS, 'num_timesteps': 1, 'num_samples_per_prompt': 2, **PHASE}
        given['advantage_estimator'] = method
    chatgpt.train(model, run_dir=tmp_path, callbacks=[log], **given)
    for name in names:
        assert log.phases[0][name] == pytest.approx(0.0, abs=1e-4)
