"""A short SFT run on sequences of ids, and what its EMA has become."""

from __future__ import annotations

from typing import Any

import torch

from chatgpt.nn import GPTActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import SFTTrainer
from chatgpt.trainer.callbacks import EMA, ProgressBar
from chatgpt.types import Sequence


def make(strategy: Any = None, callbacks: Any = (), **kw: Any) -> SFTTrainer:
    strategy = strategy or NaiveStrategy(seed=2, device='cpu')
    torch.manual_seed(2)
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16, hidden=16, positions=32))
    optim = strategy.make_optimizer(actor.parameters(), lr=1e-2, eps=1e-4)
    actor, optim = strategy.prepare((actor, optim))
    data = [
        Sequence(
            prompt_ids=torch.tensor([3 + i % 5]),
            response_ids=torch.tensor([4 + i % 7, 2]),
            response_mask=torch.tensor([True, True]),
        )
        for i in range(16)
    ]
    quiet = ProgressBar(enabled=False)
    return SFTTrainer(
        strategy,
        actor,
        optim,
        data,
        callbacks=[quiet, *callbacks],
        train_batch_size=4,
        max_epochs=2,
        log_interval=1,
        **kw,
    )


def averages(ema: EMA) -> dict[str, torch.Tensor]:
    return {p.name: p.data for p in ema._pieces.values() if p.data.is_floating_point()}
