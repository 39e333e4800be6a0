"""NLPO's policy (Ramamurthy et al. 2022, algorithm 1): the actor restricted by a slower copy of it. Its maths are in
`chatgpt.nn.nlpo`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from chatgpt.functional.logprobs import WithEntropy
from chatgpt.nn.nlpo import MaskedPolicy, masked_output
from chatgpt.nn.trunk import is_encoder_decoder
from chatgpt.rollout import LocalEngine
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.policy import Policy
from chatgpt.trainer.reference import has_reference
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.types import Batch


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
        with_entropy: WithEntropy = True,
    ) -> None:
        super().__init__(strategy, actor, temperature, with_entropy)
        self.mask_model, self.top_p, self.interval = mask_model, top_p, interval
        if is_encoder_decoder(getattr(strategy.unwrap(actor), 'model', None)):
            raise ValueError(
                'NLPO draws from two causal language models with one cache, and the actor is an encoder-decoder: leave '
                'nlpo_top_p out'
            )
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
        options: Any = {'top_p': self.top_p, 'temperature': self.temperature, 'with_entropy': self.with_entropy}
        return masked_output(model, self.mask_model, batch, **options)

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


def policy_for(
    strategy: Strategy,
    actor: nn.Module,
    config: PPOConfig,
    temperature: float,
    mask_model: nn.Module | None,
    engine: Any,
) -> Policy:
    """The actor as it is, or NLPO's policy where `nlpo_top_p` is set.

    Raises:
        ValueError: `nlpo_top_p` without a mask model or the other way round, and what `NLPOPolicy` raises.
    """
    if (config.nlpo_top_p is None) != (mask_model is None):
        raise ValueError('NLPO needs both: nlpo_top_p, and mask_model, a prepared copy of the actor')
    with_entropy: WithEntropy = True if config.entropy_coef else 'detached'
    if config.nlpo_top_p is None or mask_model is None:
        return Policy(strategy, actor, temperature, with_entropy)
    return NLPOPolicy(
        strategy,
        actor,
        temperature,
        mask_model=mask_model,
        top_p=config.nlpo_top_p,
        interval=config.nlpo_update_interval,
        engine=engine,
        with_entropy=with_entropy,
    )
