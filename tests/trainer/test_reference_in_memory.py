"""The reference is the model as given, in memory: what stands in the folder that it came from is never read again."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import chatgpt
from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar

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


def first_phase(run_dir: Path) -> dict[str, float]:
    return json.loads((run_dir / 'metrics.jsonl').read_text().splitlines()[0])


def kl_by_hand(folder: Path, run_dir: Path, initial: Any, actor: Any) -> float:
    """The first phase's KL of PPO with a critic."""
    strategy = NaiveStrategy(seed=3)
    critic = GPTCritic(config=tiny_config('gpt2', positions=48))
    prepared = strategy.prepare(
        (actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)),
        (critic, torch.optim.AdamW(critic.parameters(), lr=1e-3)),
        initial,
    )
    (actor, actor_optim), (critic, critic_optim), initial = prepared
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        lambda prompts, responses: [1.0] * len(responses),
        initial,
        actor_optim,
        critic_optim,
        tokenizer=char_tokenizer(),
        run_dir=run_dir,
        callbacks=[ProgressBar(enabled=False)],
        **PHASE,
    )
    trainer.fit(['a', 'b', 'c', 'd'], num_episodes=1, max_timesteps=1, update_timesteps=1)
    return first_phase(run_dir)['rollout/kl_mean']


def test_ppo_starts_at_no_divergence_from_an_actor_changed_in_memory(folder, tmp_path):
    actor = changed(GPTActor(pretrained=str(folder)))
    assert kl_by_hand(folder, tmp_path / 'memory', deepcopy(actor), deepcopy(actor)) == pytest.approx(0.0, abs=1e-4)
    # Negative control: a reference that is read from the folder again.
    assert abs(kl_by_hand(folder, tmp_path / 'folder', GPTActor(pretrained=str(folder)), deepcopy(actor))) > 0.1


@pytest.mark.parametrize('estimator', ['gae', 'grpo'])
def test_train_starts_at_no_divergence_from_a_model_changed_in_memory(folder, tmp_path, estimator):
    model = changed(AutoModelForCausalLM.from_pretrained(folder))
    assert model.config.name_or_path == str(folder)  # it could be read again
    chatgpt.train(
        model,
        reward_fn=lambda prompts, responses: [float(len(r)) for r in responses],
        prompts=['a', 'b', 'c', 'd'],
        run_dir=tmp_path,
        num_timesteps=1,
        advantage_estimator=estimator,
        num_samples_per_prompt=2,
        callbacks=[ProgressBar(enabled=False)],
        **PHASE,
    )
    seen = first_phase(tmp_path)
    assert seen['rollout/kl_mean'] == pytest.approx(0.0, abs=1e-4)
    assert seen['rollout/kl_k3_mean'] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize('precompute', [True, False])
def test_dpo_starts_at_no_reward_of_a_model_changed_in_memory(folder, tmp_path, precompute):
    model = changed(AutoModelForCausalLM.from_pretrained(folder))
    pairs = [{'prompt': 'a', 'chosen': 'bc', 'rejected': 'd'}, {'prompt': 'b', 'chosen': 'c', 'rejected': 'de'}]
    chatgpt.train(
        model,
        preferences=pairs,
        run_dir=tmp_path,
        max_epochs=1,
        train_batch_size=2,
        log_interval=1,
        precompute_ref_logprobs=precompute,
        callbacks=[ProgressBar(enabled=False)],
    )
    seen = first_phase(tmp_path)
    assert seen['dpo/reward_chosen'] == pytest.approx(0.0, abs=1e-4)
    assert seen['dpo/reward_rejected'] == pytest.approx(0.0, abs=1e-4)
