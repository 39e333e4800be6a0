"""Episodes under reproducible='exact': the same weights to the bit on one rank and two."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.nn import Actor, Critic
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer


class Answers(Environment):
    """Says a number and what it heard; three turns."""

    def reset(self, seed: int, **columns: Any) -> str:
        self.turn = 0
        return f'n{random.Random(seed).randint(0, 99)}:'

    def step(self, response: str) -> Any:
        self.turn += 1
        done = self.turn == 3
        return f'<{len(response)}>', float(sum(map(ord, response)) % 7), done, False, {}


def weights_after(kind: str, seed: int = 1) -> str:
    """SHA-256 of actor and critic after three phases."""
    strategy: Any = {'naive': NaiveStrategy, 'ddp': DDPStrategy}[kind](
        seed=seed, device='cpu', reproducible='exact', atoms=4
    )
    tokenizer = byte_tokenizer()
    size = {'vocab_size': len(tokenizer), 'n_positions': 128}
    models = Actor(tiny_causal_lm('gpt2', **size)), Critic(tiny_causal_lm('gpt2', seed=1, **size))
    (actor, actor_optim), (critic, critic_optim) = strategy.prepare(
        *((m, torch.optim.AdamW(m.parameters(), lr=1e-3)) for m in models)
    )
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        None,
        None,
        actor_optim,
        critic_optim,
        tokenizer=tokenizer,
        environment=Answers,
        environment_settings=EnvironmentSettings(max_turn_tokens=6),
        gae_over='turn',
        experience_batch_size=8,
        train_batch_size=8,
        kl_coef=0.0,
        max_new_tokens=40,
    )
    trainer.fit(max_timesteps=3, update_timesteps=1)
    assert trainer.collector.engine.environment['name'].endswith('Answers')
    digest = hashlib.sha256()
    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_one_hash_on_one_rank_and_two():
    (alone,) = run_distributed(weights_after, 1, 'naive')  # a process as fresh as the others
    assert run_distributed(weights_after, 2, 'ddp') == [alone, alone]
    assert run_distributed(weights_after, 1, 'naive', 2) != [alone]
