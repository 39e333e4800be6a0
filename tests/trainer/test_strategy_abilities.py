"""Methods that need an ability ask the strategy for it, by no name of a class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ilql_runs import model
from phase_log import sequence

from chatgpt.nn import GPTActor
from chatgpt.strategies import ColossalAIStrategy, DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.strategies.base import Abilities
from chatgpt.strategies.precision import Numerics
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import ILQLTrainer, PPOConfig, rewarded
from chatgpt.trainer.nlpo import NLPOPolicy


class Hidden(NaiveStrategy):
    """A third party's, whose masters are elsewhere."""

    abilities = Abilities(weights_in_place=False)


class Renamed(ColossalAIStrategy):
    """Not built as a whole: what is refused is refused before anything is asked of it."""

    def __init__(self) -> None:
        self.numerics, self._prepared = Numerics(precision='fp32'), {}


class ColossalAILike(NaiveStrategy):
    """Has the name, and every ability."""


def ilql(strategy: Any) -> ILQLTrainer:
    net = model()
    optim = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    if isinstance(strategy, NaiveStrategy):
        net, optim = strategy.prepare((net, optim))
    return ILQLTrainer(strategy, net, optim, rewarded([sequence([3], [4, 5])], [1.0]))


def nlpo(strategy: Any) -> None:
    actor, mask = (GPTActor(config=tiny_config('gpt2')) for _ in range(2))
    NLPOPolicy(strategy, actor, PPOConfig(nlpo_top_p=0.9), 1.0, mask, None)


@pytest.mark.parametrize('kind', [Hidden, Renamed])
@pytest.mark.parametrize(
    ('method', 'reason'), [(ilql, 'masters hide the target heads'), (nlpo, 'cannot be copied between models')]
)
def test_masters_elsewhere_are_refused(kind, method, reason):
    sentence = f'{method.__name__.upper()} does not run under {kind.__name__}, whose .*{reason}; use ddp or fsdp'
    with pytest.raises(ValueError, match=sentence):
        method(kind())


@pytest.mark.parametrize('method', [ilql, nlpo])
def test_a_name_refuses_nothing(method):
    method(ColossalAILike())


def test_who_keeps_weights_in_place():
    kinds = (NaiveStrategy, DDPStrategy, FSDPStrategy, ColossalAIStrategy)
    assert [kind.abilities.weights_in_place for kind in kinds] == [True, True, True, False]
