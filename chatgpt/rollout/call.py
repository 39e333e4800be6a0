"""The input of an engine: prompts as token ids, sampling parameters, and the numbers that determine random draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from chatgpt.nn.layouts import layout_of
from chatgpt.nn.trunk import position_limit, positions_of
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.types import FinishReason, Prompt, Sample

_LISTS = ('prompts', 'indices', 'groups', 'offsets', 'limits')


@dataclass(frozen=True)
class Call:
    """A request for one sample per prompt. `Call.of` fills in defaults."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    seed: int
    indices: list[int]
    """run-wide sample indices, which with the seed determine every draw"""
    groups: list[int]
    """group of each sample; by default its index"""
    offsets: list[int]
    """position of each response's first token in the random stream of its sample, by default 0. The prompt of a later
    turn contains the earlier turns and observations, and its offset is their length, so no random number is reused"""
    limits: list[int | None]
    """maximum number of new tokens of each response, where it is lower than that of `sampling`"""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        seed: int,
        indices: Sequence[int],
        groups: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        limits: Sequence[int | None] | None = None,
    ) -> Call:
        return cls(
            prompts,
            sampling,
            seed,
            list(indices),
            list(indices if groups is None else groups),
            [0] * len(prompts) if offsets is None else list(offsets),
            [None] * len(prompts) if limits is None else list(limits),
        )

    def room(self, i: int) -> int:
        """Returns the maximum number of new tokens for prompt `i`; below 1 if none fits."""
        room, own = self.sampling.room(len(self.prompts[i].ids)), self.limits[i]
        return room if own is None else min(room, own)

    def checked(self, config: Any) -> list[int]:
        """Checks the call against a text model's config and returns the maximum number of new tokens per prompt.

        Raises:
            ValueError: lists of different lengths; a prompt that is empty, has ids outside the vocabulary or exceeds
                the model's positions; no room for a response; an end token outside the vocabulary.
        """
        for name in ('indices', 'groups', 'offsets', 'limits'):
            if len(getattr(self, name)) != len(self.prompts):
                noun = 'sample indices' if name == 'indices' else name
                raise ValueError(
                    f'generate: {len(self.prompts)} prompts but {len(getattr(self, name))} {noun}; give one per prompt'
                )
        vocab_size = getattr(config, 'vocab_size', None)
        for token in self.sampling.eos_token_ids:
            if vocab_size is not None and token >= vocab_size:
                raise ValueError(f'generate: end token {token} is outside the vocabulary of {vocab_size}')
        return [self._checked(i, config, vocab_size) for i in range(len(self.prompts))]

    def _checked(self, i: int, config: Any, vocab_size: int | None) -> int:
        ids, limit, positions = self.prompts[i].ids, self.room(i), position_limit(config)
        length = len(ids)
        if length == 0:
            raise ValueError(f'generate: prompt {i} is empty; give it at least a begin token')
        if vocab_size is not None and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            raise ValueError(
                f'generate: prompt {i} holds token ids outside the vocabulary of {vocab_size}; does the tokenizer '
                'match the model?'
            )
        if (own := self.limits[i]) is not None and own < 1:
            raise ValueError(f'generate: limits[{i}]={own} must be at least 1')
        if limit < 1:
            raise ValueError(
                f'generate: prompt {i} has {length} tokens and max_length={self.sampling.max_length} leaves no room '
                'for a response; shorten the prompt or raise max_length'
            )
        layout = layout_of(config)
        if positions is not None and layout.length(length, limit) > positions:
            raise ValueError(
                f'generate: prompt {i} has {length} tokens and may grow by {limit}, past {positions_of(config)}'
                f'{layout.counted}; shorten the prompt or lower max_new_tokens or max_length'
            )
        return limit

    def part(self, where: slice | Sequence[int]) -> Call:
        """Returns the call for a subset of the prompts, in the given order."""
        places = range(len(self.prompts))[where] if isinstance(where, slice) else where
        lists: Any = {name: [getattr(self, name)[i] for i in places] for name in _LISTS}
        return replace(self, **lists)

    def sample(
        self,
        i: int,
        response_ids: Tensor,
        logprobs: Tensor,
        filtered_logprobs: Tensor,
        edge_distances: Tensor,
        reason: FinishReason,
    ) -> Sample:
        """Makes the sample of prompt `i` from (A,) tensors on the CPU."""
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
            last_turn=prompt.last_turn,
            columns=prompt.columns,
        )

    def not_finite(self, i: int, position: int) -> FloatingPointError:
        return FloatingPointError(
            f'generate: the logits of sample {self.indices[i]} are not finite at response position {position}; check '
            "the policy's weights and precision"
        )

    def check_finite(self, logprobs: Tensor, filtered_logprobs: Tensor, lengths: Sequence[int]) -> None:
        """Raises FloatingPointError if a number of (prompts, T) tables is not finite within the responses."""
        counted = torch.arange(logprobs.shape[1]) < torch.tensor(lengths)[:, None]
        bad = (counted & ~(torch.isfinite(filtered_logprobs) & torch.isfinite(logprobs))).nonzero()
        if len(bad):
            raise self.not_finite(*bad[0].tolist())

    def samples(
        self, tables: Sequence[Tensor], lengths: Sequence[int], reasons: Sequence[FinishReason]
    ) -> list[Sample]:
        """Makes the samples of all prompts from (prompts, T) tensors on the CPU: ids, log-probs, filtered log-probs and
        edge distances. Rows are copied, so that a sample does not keep the whole tensor in memory."""
        samples = []
        for i, (n, reason) in enumerate(zip(lengths, reasons, strict=True)):
            ids, logprobs, filtered, edges = (table[i, :n].clone() for table in tables)
            samples.append(self.sample(i, ids, logprobs, filtered, edges, reason))
        return samples


def joined(calls: Sequence[Call]) -> Call:
    """Concatenates calls that differ only in their prompts."""
    lists: Any = {name: [one for call in calls for one in getattr(call, name)] for name in _LISTS}
    return replace(calls[0], **lists)
