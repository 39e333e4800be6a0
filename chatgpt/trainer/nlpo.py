"""What generates and learns: the actor, or under NLPO the actor restricted by a slower copy of it.

`PPOTrainer` asks a `Policy` for the model that an engine generates with, for the forward that is learned, and tells it
when a phase has ended. NLPO (Ramamurthy et al. 2022, algorithm 1) is the one other kind; its maths are in
`chatgpt.nn.nlpo`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from chatgpt.nn.nlpo import MaskedPolicy, masked_output
from chatgpt.rollout import LocalEngine
from chatgpt.trainer.reference import has_reference
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.types import Batch


class Policy:
    """The actor as it is.

    Args:
        actor: as prepared.
        temperature: of the sampling, which log-probs are taken at.
    """

    def __init__(self, strategy: Strategy, actor: nn.Module, temperature: float) -> None:
        self.strategy, self.actor, self.temperature = strategy, actor, temperature

    @contextmanager
    def generating(self) -> Iterator[Any]:
        """What an engine generates with: whole weights, for one collect phase."""
        with self.strategy.full_model(self.actor) as full:
            yield full

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The output that is learned, with entropy. `model` is the actor."""
        return model(batch, temperature=self.temperature, with_entropy=True)

    def models(self) -> Mapping[str, nn.Module]:
        """Further models whose weights belong to a checkpoint."""
        return {}

    def end_phase(self, phase: int) -> None:
        """Learning phase number `phase`, counted from 1, is done."""


class NLPOPolicy(Policy):
    """The actor, at every state, on the tokens that `mask_model` holds likely.

    Args:
        mask_model: a copy of the actor, prepared as a frozen model.
        top_p: mass of the mask policy that is kept.
        interval: learning phases after which the mask policy takes over the actor's weights.

    Raises:
        ValueError: a strategy, actor or engine that cannot do this.
    """

    def __init__(
        self,
        strategy: Strategy,
        actor: nn.Module,
        temperature: float,
        *,
        mask_model: nn.Module,
        top_p: float,
        interval: int,
        engine: Any,
    ) -> None:
        super().__init__(strategy, actor, temperature)
        self.mask_model, self.top_p, self.interval = mask_model, top_p, interval
        if engine is not None and not isinstance(engine, LocalEngine):
            raise ValueError(
                f'NLPO draws from two models at once, which only LocalEngine does: {type(engine).__name__} would '
                'ignore the mask'
            )
        if strategy.dtype != torch.float32:
            raise ValueError(
                'NLPO takes the old log-probs from the decode, which agree with the trainer in fp32 only: use '
                'precision=fp32'
            )
        if not strategy.weights_in_place:
            raise ValueError(
                f'NLPO does not run under {type(strategy).__name__}, whose weights cannot be copied between models; '
                'use ddp or fsdp'
            )
        if has_reference(strategy.unwrap(actor)):
            raise ValueError('NLPO copies the actor as a whole: use an actor without LoRA and num_layers_unfrozen')

    @contextmanager
    def generating(self) -> Iterator[Any]:
        with self.strategy.full_model(self.actor) as full, self.strategy.full_model(self.mask_model) as mask:
            yield MaskedPolicy(full, mask, self.top_p, self.temperature)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return masked_output(model, self.mask_model, batch, top_p=self.top_p, temperature=self.temperature)

    def models(self) -> Mapping[str, nn.Module]:
        return {'mask': self.mask_model}

    @torch.no_grad()
    def end_phase(self, phase: int) -> None:
        """Copy the actor's weights, on whatever part of them this rank holds."""
        if phase % self.interval:
            return
        pairs = zip(
            self.strategy.unwrap(self.mask_model).parameters(),
            self.strategy.unwrap(self.actor).parameters(),
            strict=True,
        )
        for mine, given in pairs:
            target, source = (t.to_local() if hasattr(t, 'to_local') else t for t in (mine, given))
            target.copy_(source)
