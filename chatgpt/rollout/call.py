"""One `generate` call as an engine sees it: what was asked, checked, and the record of a response. And the base of engines in this process.

Left out: how tokens come about, which is each engine's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chatgpt.rollout.check import model_config
from chatgpt.rollout.engine import check_prompts
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.types import FinishReason, Prompt, Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor


@dataclass(frozen=True)
class Call:
    """The arguments of `RolloutEngine.generate`, groups filled in."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    seed: int
    indices: list[int]
    groups: list[int]

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int, indices: Sequence[int], groups: Sequence[int] | None
    ) -> Call:
        return cls(prompts, sampling, seed, list(indices), list(indices if groups is None else groups))

    def limits(self, config: Any) -> list[int]:
        """What every engine checks before any work, with the text model's config. Returns the most new tokens of each prompt."""
        return check_prompts(
            self.prompts,
            self.sampling,
            self.indices,
            self.groups,
            max_positions=getattr(config, 'max_position_embeddings', None),
            vocab_size=config.vocab_size,
        )

    def part(self, where: slice) -> Call:
        """The call for some of the prompts."""
        return replace(self, prompts=self.prompts[where], indices=self.indices[where], groups=self.groups[where])

    def sample(
        self, i: int, response_ids: Tensor, logprobs: Tensor, filtered_logprobs: Tensor, edge_distances: Tensor, reason: FinishReason
    ) -> Sample:
        """The record of prompt `i`'s response, from (A,) tensors on the CPU."""
        prompt = self.prompts[i]
        return Sample(
            index=self.indices[i],
            group=int(self.groups[i]),
            prompt_ids=prompt.ids.cpu(),
            response_ids=response_ids,
            response_mask=torch.ones(len(response_ids), dtype=torch.bool),
            logprobs=logprobs,
            filtered_logprobs=filtered_logprobs,
            edge_distances=edge_distances,
            finish_reason=reason,
            temperature=self.sampling.temperature,
            prompt_text=prompt.text,
            columns=prompt.columns,
        )


class InProcessEngine(ABC):
    """Base of the engines that generate in this process: they have the actor from `begin` to `end`, and answer checked calls."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._modes: dict[Any, bool] = {}

    def hold(self, actor: Actor) -> None:
        """Keep the actor, dropout off, until `end`."""
        self._modes = {module: module.training for module in actor.modules()}
        self._actor = actor
        actor.eval()

    def end(self) -> None:
        """Give the actor back with the training flags it came with."""
        for module, training in self._modes.items():
            module.training = training
        self._actor, self._modes = None, {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        seed: int,
        indices: Sequence[int],
        groups: Sequence[int] | None = None,
    ) -> list[Sample]:
        """See `RolloutEngine.generate`."""
        if self._actor is None:
            raise ValueError(f'{type(self).__name__}.generate: no actor; call begin(actor) first')
        call = Call.of(prompts, sampling, seed, indices, groups)
        limits = self.check(model_config(self._actor), call)
        return self.answer(call, limits) if prompts else []

    def check(self, config: Any, call: Call) -> list[int]:
        """What is checked before any work, with the text model's config. Returns the most new tokens of each prompt."""
        return call.limits(config)

    @abstractmethod
    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        """The samples of a checked call with at least one prompt."""
