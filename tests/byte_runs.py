"""PPO of a tiny model on bytes without a critic, for tests of run folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from chatgpt.nn import Actor
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm
from chatgpt.trainer import PPOTrainer

SIZES = {'vocab_size': 259, 'pad_token_id': 256, 'bos_token_id': 257, 'eos_token_id': 258}
SETTINGS = {'advantage_estimator': 'rloo', 'num_samples_per_prompt': 2, 'experience_batch_size': 2}
SETTINGS |= {'train_batch_size': 4, 'kl_coef': 0.0, 'max_new_tokens': 3}


def lengths(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(r)) for r in responses]


def byte_trainer(
    run_dir: Path | None, callbacks: Any = (), *, tokenizer: bool = True, model: Mapping[str, Any] | None = None
) -> PPOTrainer:
    """Returns a trainer with the length of a response as reward. model: options of the actor."""
    strategy = NaiveStrategy(seed=3)
    torch.manual_seed(0)
    actor = Actor(tiny_causal_lm('gpt2', **SIZES), **(model or {}))
    trained = [p for p in actor.parameters() if p.requires_grad]
    actor, optimizer = strategy.prepare((actor, torch.optim.SGD(trained, 0.1)))
    words = byte_tokenizer() if tokenizer else None
    models = (actor, None, lengths, None, optimizer)
    return PPOTrainer(strategy, *models, tokenizer=words, run_dir=run_dir, callbacks=callbacks, **SETTINGS)
