"""What generates and learns: the actor.

`PPOTrainer` asks a `Policy` for the model that an engine generates with and for the forward that is learned, and tells
it when a phase has ended. Left out: the one other kind, which restricts the actor (`nlpo`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from chatgpt.functional.logprobs import WithEntropy
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.types import Batch


class Policy:
    """The actor as it is.

    Args:
        actor: as prepared.
        temperature: of the sampling, which log-probs are taken at.
        with_entropy: True where the loss has an entropy bonus; 'detached' where it is a metric only.
    """

    def __init__(
        self, strategy: Strategy, actor: nn.Module, temperature: float, with_entropy: WithEntropy = True
    ) -> None:
        self.strategy, self.actor, self.temperature, self.with_entropy = strategy, actor, temperature, with_entropy

    @contextmanager
    def generating(self) -> Iterator[Any]:
        """What an engine generates with: whole weights, for one collect phase."""
        with self.strategy.full_model(self.actor) as full:
            yield full

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The output that is learned, with entropy. `model` is the actor."""
        return model(batch, temperature=self.temperature, with_entropy=self.with_entropy)

    def models(self) -> Mapping[str, nn.Module]:
        """Further models whose weights belong to a checkpoint."""
        return {}

    def end_phase(self, phase: int) -> None:
        """Learning phase number `phase`, counted from 1, is done."""
