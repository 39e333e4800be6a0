"""Methods that need an ability ask the strategy for it, by no name of a class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ilql_runs import model
from tiny_runs import sequence

from chatgpt.nn import GPTActor
from chatgpt.strategies import ColossalAIStrategy, DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.strategies.base import Abilities
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import ILQLTrainer, PPOConfig, rewarded
from chatgpt.trainer.nlpo import NLPOPolicy


class Hidden(NaiveStrategy):
    """A third party's, whose masters are elsewhere."""

    abilities = Abilities(weights_in_place=False)


class ColossalAILike(NaiveStrategy):
    """Has the name, and every ability."""


def ilql(strategy: Any) -> None:
    net = model()
    net, optim = strategy.prepare((net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])))
    ILQLTrainer(strategy, net, optim, rewarded([sequence([3], [4, 5])], [1.0]))


def nlpo(strategy: Any) -> None:
    actor, mask = (GPTActor(config=tiny_config('gpt2')) for _ in range(2))
    NLPOPolicy(strategy, actor, PPOConfig(nlpo_top_p=0.9), 1.0, mask, None)


def test_masters_elsewhere_are_refused_and_a_name_refuses_nothing():
    for method, reason in ((ilql, 'masters hide the target heads'), (nlpo, 'cannot be copied between models')):
        sentence = f'{method.__name__.upper()} does not run under Hidden, whose .*{reason}; use ddp or fsdp'
        with pytest.raises(ValueError, match=sentence):
            method(Hidden())
        method(ColossalAILike())
    kinds = (NaiveStrategy, DDPStrategy, FSDPStrategy, ColossalAIStrategy)
    assert [kind.abilities.weights_in_place for kind in kinds] == [True, True, True, False]
