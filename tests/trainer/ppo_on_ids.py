"""Small runs of PPOTrainer on token ids, without text."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from phase_log import Log
from torch import nn

from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar

VOCAB, GOOD = 16, 7


def prompts(num: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1 + i % 4,), generator=generator) for i in range(num)]


class CountGood(nn.Module):
    """A reward model that needs no text: the share of token GOOD in a sequence, per token of its response."""

    def forward(self, batch: Any) -> torch.Tensor:
        hits = ((batch.action_ids == GOOD) & batch.action_mask).float()
        total = torch.zeros(batch.num_sequences).index_add(0, batch.action_rows, hits)
        return total / torch.zeros(batch.num_sequences).index_add(
            0, batch.action_rows, batch.action_mask.float()
        ).clamp(min=1)


def make(
    seed: int = 0, *, shared: bool = False, dropout: float = 0.0, lora_rank: int = 0, reward: Any = None, **kwargs: Any
) -> PPOTrainer:
    strategy = NaiveStrategy(seed=seed)
    config = tiny_config('gpt2', vocab_size=VOCAB, hidden=16, positions=32, dropout=dropout)
    actor = GPTActor(config=config, lora_rank=lora_rank, value_head=True if shared else None)
    critic = None if shared else GPTCritic(config=config)
    initial = None if lora_rank else deepcopy(actor)
    actor_optim = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad], lr=3e-3, eps=1e-5)
    critic_optim = None if critic is None else torch.optim.AdamW(critic.parameters(), lr=3e-3, eps=1e-5)
    (actor, actor_optim), reward, initial = strategy.prepare((actor, actor_optim), reward or CountGood(), initial)
    if critic is not None:
        critic, critic_optim = strategy.prepare((critic, critic_optim))
    defaults: dict[str, Any] = {
        'experience_batch_size': 16,
        'train_batch_size': 8,
        'max_epochs': 2,
        'kl_coef': 0.01,
        'max_new_tokens': 6,
        'eos_token_id': 2,
        'callbacks': [ProgressBar(enabled=False)],
    }
    return PPOTrainer(strategy, actor, critic, reward, initial, actor_optim, critic_optim, **defaults | kwargs)


def run(phases: int = 3, **kwargs: Any) -> tuple[PPOTrainer, list[dict[str, float]]]:
    recorder = Log()
    trainer = make(callbacks=[recorder], **kwargs)
    trainer.fit(prompts(), num_episodes=1, max_timesteps=phases, update_timesteps=1)
    return trainer, recorder.phases


def weights(trainer: PPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for m in trainer.models().values() for p in m.parameters()])
