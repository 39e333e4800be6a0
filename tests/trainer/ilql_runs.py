"""A small ILQL model and small runs of ILQLTrainer."""

from __future__ import annotations

from typing import Any

import torch
from tiny_runs import SMALL, Log, trained
from transformers import GPT2LMHeadModel

from chatgpt.nn import ILQLModel
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import ILQLTrainer

VOCAB = 16


def model(seed: int = 5, two_qs: bool = True, vocab: int = VOCAB) -> ILQLModel:
    torch.manual_seed(seed)
    made = ILQLModel(GPT2LMHeadModel(tiny_config('gpt2', **SMALL | {'vocab_size': vocab})), two_qs=two_qs)
    with torch.no_grad():  # targets that differ from the heads, as after some steps
        for number, p in enumerate(made.target_q_heads.parameters()):
            torch.manual_seed(number)
            p.add_(0.1 * torch.randn(p.shape))
    return made


def make(
    data: Any,
    eval_data: Any = None,
    *,
    strategy: Any = None,
    more: Any = (),
    lr: float = 3e-3,
    two_qs: bool = True,
    **settings: Any,
) -> Any:
    strategy = strategy or NaiveStrategy(seed=5, device='cpu')
    net, optim = trained(strategy, model(two_qs=two_qs), lr, eps=1e-4)
    log = Log()
    settings = {'train_batch_size': 4, 'log_interval': 1} | settings
    trainer: Any = ILQLTrainer(strategy, net, optim, data, eval_data, callbacks=[log, *more], **settings)
    trainer.log = log
    return trainer
