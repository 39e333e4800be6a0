"""Small runs of PPOTrainer on token ids, without text."""

from __future__ import annotations

from typing import Any

import tiny_runs
import torch
from torch import nn

from chatgpt.testing.fakes import tiny_config

VOCAB, GOOD = 16, 7


def prompts(num: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1 + i % 4,), generator=generator) for i in range(num)]


class CountGood(nn.Module):
    """A reward model that needs no text: the share of token GOOD in a sequence, per token of its response."""

    def forward(self, batch: Any) -> torch.Tensor:
        hits = ((batch.action_ids == GOOD) & batch.action_mask).float()
        rows = (hits, batch.action_mask.float())
        hits, counts = (torch.zeros(batch.num_sequences).index_add(0, batch.action_rows, x) for x in rows)
        return hits / counts.clamp(min=1)


def make(seed: int = 0, *, dropout: float = 0.0, reward: Any = None, **settings: Any) -> Any:
    config = tiny_config('gpt2', **tiny_runs.SMALL, dropout=dropout)
    defaults = {'experience_batch_size': 16, 'train_batch_size': 8, 'max_epochs': 2, 'kl_coef': 0.01}
    defaults |= {'eos_token_id': 2, 'tokenizer': None, 'lr': 3e-3}
    return tiny_runs.ppo(reward=reward or CountGood(), seed=seed, config=config, **defaults | settings)


def fit(trainer: Any, phases: int = 3) -> Any:
    return tiny_runs.fit(trainer, phases, prompts())


def run(phases: int = 3, **settings: Any) -> tuple[Any, list[dict[str, float]]]:
    trainer = fit(make(**settings), phases)
    return trainer, trainer.log.phases
