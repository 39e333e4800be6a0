"""NLPO (Ramamurthy et al. 2022, algorithm 1): PPO with the actor restricted to the likely tokens of a slower copy of
it.

Holds its settings, their rules and its policy; the formulas are in `chatgpt.nn.nlpo`. Importing this module does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatgpt.rules import Rule, changed
from chatgpt.trainer.policy import POLICIES, Policy
from chatgpt.trainer.rules import DECODE_RULES, PPO_RULES, STEP_RULES, reads_decode
from chatgpt.trainer.settings import COUNT, RANGES

if TYPE_CHECKING:
    from torch import nn

    from chatgpt.functional.logprobs import WithEntropy
    from chatgpt.strategies.base import Strategy
    from chatgpt.types import Batch


@dataclass(kw_only=True)
class NLPOSettings:
    """NLPO's fields of `PPOConfig`."""

    nlpo_top_p: float | None = None
    """NLPO: sample and learn only tokens among the likeliest, up to this total probability, of a slower copy of the
    policy (Ramamurthy et al. 2022 use 0.9); none: off"""
    nlpo_update_interval: int = 1
    """learning phases after which that copy takes over the policy's weights"""


POLICIES['nlpo_top_p'] = f'{__name__}:NLPOPolicy'
RANGES['NLPOSettings'] = {'nlpo_top_p': '(0, 1]', 'nlpo_update_interval': COUNT}
PPO_RULES += [
    *changed(
        ('nlpo_update_interval',),
        lambda s: s.nlpo_top_p is None,
        '{name}={value!r} is of the copy that nlpo_top_p needs: give nlpo_top_p, such as 0.9',
    ),
    Rule(
        lambda s: s.nlpo_top_p is not None and s.recompute_logprobs is True,
        'nlpo_top_p takes the old log-probs from the decode: leave recompute_logprobs out',
    ),
    Rule(
        lambda s: s.nlpo_top_p is not None and s.tis_cap,
        'nlpo_top_p takes the old log-probs from the decode, so there is nothing to weigh: leave tis_cap out',
    ),
]
DECODE_RULES.append(reads_decode('nlpo_top_p', lambda value: value is not None))
STEP_RULES += [
    Rule(
        lambda s: s.nlpo_top_p is not None,
        'nlpo_top_p draws from the masked policy, which generate and step do not know: use fit',
    )
]


class NLPOPolicy(Policy):
    """The actor restricted to the tokens that are likely under `mask_model`, a copy of it prepared as a frozen model.

    Raises:
        ValueError: no mask model, or an unsupported strategy, actor or engine.
    """

    takes_copy = True

    def __init__(
        self,
        strategy: Strategy,
        actor: nn.Module,
        config: Any,
        temperature: float,
        mask_model: nn.Module | None,
        engine: Any,
        with_entropy: WithEntropy = True,
    ) -> None:
        from chatgpt.nn.layouts import check_causal
        from chatgpt.nn.lora import has_lora

        super().__init__(strategy, actor, temperature, with_entropy)
        bare: Any = strategy.unwrap(actor)
        if mask_model is None:
            raise ValueError('NLPO needs both: nlpo_top_p, and mask_model, a prepared copy of the actor')
        check_causal(getattr(bare, 'model', None), 'NLPO draws with one cache from two', 'leave nlpo_top_p out')
        if engine is not None and not engine.abilities.runs_actor:
            raise ValueError(
                f'NLPO draws from two models at once, which only LocalEngine does: {type(engine).__name__} would '
                'ignore the mask'
            )
        self.check(strategy)
        if getattr(bare, 'has_reference', False) or has_lora(bare):
            raise ValueError('NLPO copies the actor as a whole: use an actor without LoRA and num_layers_unfrozen')
        self.mask_model, self.top_p, self.interval = mask_model, config.nlpo_top_p, config.nlpo_update_interval

    @contextmanager
    def generating(self, **needs: Any) -> Iterator[Any]:
        from chatgpt.nn.nlpo import MaskedPolicy

        with (
            self.strategy.full_model(self.actor, **needs) as full,
            self.strategy.full_model(self.mask_model, **needs) as mask,
        ):
            yield MaskedPolicy(full, mask, self.top_p, self.temperature)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        from chatgpt.nn.nlpo import masked_output

        options: Any = {'top_p': self.top_p, 'temperature': self.temperature, 'with_entropy': self.with_entropy}
        return masked_output(model, self.mask_model, batch, **options)

    def models(self) -> Mapping[str, nn.Module]:
        return {'mask': self.mask_model}

    def end_phase(self, phase: int) -> None:
        """Copies the actor's weights to the mask model, each rank its own part."""
        import torch

        from chatgpt.nn.packing import reshard

        if phase % self.interval:
            return
        bare, mask = self.strategy.unwrap(self.actor), self.strategy.unwrap(self.mask_model)
        reshard(bare)  # a forward without gradients leaves the outermost part of each gathered
        reshard(mask)
        with torch.no_grad():
            for pair in zip(mask.parameters(), bare.parameters(), strict=True):
                target, source = (getattr(t, 'to_local', lambda t=t: t)() for t in pair)
                target.copy_(source)

    @classmethod
    def check(cls, strategy: Strategy) -> None:
        """Raises ValueError for a strategy that NLPO cannot run under."""
        import torch

        if strategy.numerics.dtype != torch.float32:
            raise ValueError(
                'NLPO takes the old log-probs from the decode, which agree with the trainer in fp32 only: use '
                'precision=fp32'
            )
        if not strategy.abilities.weights_in_place:
            raise ValueError(
                f'NLPO does not run under {type(strategy).__name__}, whose weights cannot be copied between models; '
                'use ddp or fsdp'
            )
