"""The protocol of a rollout engine: prompts as ids in, samples out. No tokenizer inside. And what engines share: a
checked call, and a base for those that generate in this process.

Left out: who scores the samples, and where the weights come from (a strategy yields the full model for a collect
phase).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from chatgpt.nn.trunk import position_limit, positions_of, text_config
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.types import FinishReason, Prompt, Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor


class RolloutEngine(Protocol):
    """Generates responses for one collect phase: `begin`, any number of `generate`, `end`."""

    reproducible: bool
    """draws follow (seed, sample index, position): the same random numbers in any batch order and on any number of
    ranks, and the same samples where sums of another batch shape do not round to the other side of a draw"""

    def begin(self, actor: Actor) -> None:
        """Take the policy's weights for one collect phase; dropout is off until `end`."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        seed: int,
        indices: Sequence[int],
        groups: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        limits: Sequence[int | None] | None = None,
    ) -> list[Sample]:
        """One sample per prompt, in the order of the prompts; tensors are on the CPU.

        `indices` are run-wide sample numbers; `groups` default to them. `offsets` default to 0: the position of each
        response's first token, where its prompt ends with what was drawn or appended before (a later turn of an
        episode), so that no position of a sample is drawn twice. `limits`: the most new tokens of each, where that
        is less than `sampling` allows. Raises ValueError before any work for an empty
        prompt, one that leaves no room for a response, or a setting that the engine cannot do.
        """
        ...

    def end(self) -> None:
        """Give the weights back and free what only generating needs."""
        ...


class AheadEngine(RolloutEngine, Protocol):
    """An engine that can be asked now and answer later, with the weights of now: it generates while the trainer
    learns."""

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        seed: int,
        indices: Sequence[int],
        groups: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        limits: Sequence[int | None] | None = None,
    ) -> Any:
        """A ticket for what `generate` would give, with the weights of the latest `begin`; returns at once, and raises
        what `generate` raises before any work. `end`, and a `begin` with newer weights, do not touch it.
        """
        ...

    def take(self, ticket: Any) -> list[Sample]:
        """The samples of a ticket, once; waits for them. Tickets may be taken in any order."""
        ...

    def cancel(self, ticket: Any) -> None:
        """Forget a ticket."""
        ...


class Turns(Protocol):
    """What an engine with `converse` asks between the turns of its sequences; `i` is a position in its prompts."""

    def limit(self, i: int) -> int:
        """The most tokens of sequence i's next turn."""
        ...

    def ended(self, i: int, turn: Sample) -> None:
        """Sequence i's turn is there, as a sample whose response is this turn alone. Returns at once."""
        ...

    def next(self, i: int) -> Tensor | None:
        """(n,) int64 ids, n >= 0, to append before sequence i's next turn; None: its episode is over. Waits for the
        environment."""
        ...


def check_prompts(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    indices: Sequence[int],
    groups: Sequence[int] | None,
    offsets: Sequence[int] | None = None,
    own_limits: Sequence[int | None] | None = None,
    *,
    config: Any,
) -> list[int]:
    """What every engine checks before any work, with the text model's config. Returns the most new tokens of each
    prompt."""
    max_positions, vocab_size = position_limit(config), getattr(config, 'vocab_size', None)
    if len(indices) != len(prompts):
        raise ValueError(
            f'generate: {len(prompts)} prompts but {len(indices)} sample indices; give one index per prompt'
        )
    if groups is not None and len(groups) != len(prompts):
        raise ValueError(f'generate: {len(prompts)} prompts but {len(groups)} groups; give one group per prompt')
    if offsets is not None and len(offsets) != len(prompts):
        raise ValueError(f'generate: {len(prompts)} prompts but {len(offsets)} offsets; give one offset per prompt')
    if own_limits is not None and len(own_limits) != len(prompts):
        raise ValueError(f'generate: {len(prompts)} prompts but {len(own_limits)} limits; give one limit per prompt')
    if vocab_size is not None:
        for token in sampling.eos_token_ids:
            if token >= vocab_size:
                raise ValueError(f'generate: end token {token} is outside the vocabulary of {vocab_size}')
    limits = []
    for i, prompt in enumerate(prompts):
        length = len(prompt.ids)
        if length == 0:
            raise ValueError(f'generate: prompt {i} is empty; give it at least a begin token')
        if vocab_size is not None and (int(prompt.ids.min()) < 0 or int(prompt.ids.max()) >= vocab_size):
            raise ValueError(
                f'generate: prompt {i} holds token ids outside the vocabulary of {vocab_size}; does the tokenizer '
                'match the model?'
            )
        limit = sampling.room(length)
        own = None if own_limits is None else own_limits[i]
        limit = limit if own is None else min(limit, own)
        if limit < 1:
            raise ValueError(
                f'generate: prompt {i} has {length} tokens and max_length={sampling.max_length} leaves no room for a '
                'response; shorten the prompt or raise max_length'
            )
        apart = getattr(config, 'is_encoder_decoder', False)
        if max_positions is not None and apart and max(length, limit + 1) > max_positions:
            raise ValueError(
                f'generate: prompt {i} has {length} tokens and its response may have {limit} and a start token, and '
                f'each side has {positions_of(config)}; shorten the prompt or lower max_new_tokens'
            )
        if max_positions is not None and not apart and length + limit > max_positions:
            raise ValueError(
                f'generate: prompt {i} has {length} tokens and may grow by {limit}, past {positions_of(config)}; '
                'shorten the prompt or lower max_new_tokens or max_length'
            )
        limits.append(limit)
    return limits


@dataclass(frozen=True)
class Call:
    """The arguments of `RolloutEngine.generate`, groups, offsets and limits filled in."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    seed: int
    indices: list[int]
    groups: list[int]
    offsets: list[int]
    own_limits: list[int | None]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
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
            list([0] * len(prompts) if offsets is None else offsets),
            list([None] * len(prompts) if limits is None else limits),
        )

    def limits(self, config: Any) -> list[int]:
        """What every engine checks before any work, with the text model's config. Returns the most new tokens of each
        prompt."""
        return check_prompts(
            self.prompts,
            self.sampling,
            self.indices,
            self.groups,
            self.offsets,
            self.own_limits,
            config=config,
        )

    def part(self, where: slice | Sequence[int]) -> Call:
        """The call for some of the prompts, in that order."""
        places = range(len(self.prompts))[where] if isinstance(where, slice) else where
        return replace(
            self,
            prompts=[self.prompts[i] for i in places],
            indices=[self.indices[i] for i in places],
            groups=[self.groups[i] for i in places],
            offsets=[self.offsets[i] for i in places],
            own_limits=[self.own_limits[i] for i in places],
        )

    def sample(
        self,
        i: int,
        response_ids: Tensor,
        logprobs: Tensor,
        filtered_logprobs: Tensor,
        edge_distances: Tensor,
        reason: FinishReason,
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


@contextmanager
def changing_shapes(device: torch.device) -> Iterator[None]:
    """Around forwards whose shapes change from token to token: on a GPU without cuDNN's attention, which torch prefers
    on Hopper and which makes a plan for every new shape."""
    if device.type != 'cuda' or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


class InProcessEngine(ABC):
    """Base of the engines that generate in this process: they have the actor from `begin` to `end`, and answer checked
    calls."""

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
        offsets: Sequence[int] | None = None,
        limits: Sequence[int | None] | None = None,
    ) -> list[Sample]:
        """See `RolloutEngine.generate`."""
        call, most = self.checked(prompts, sampling, seed, indices, groups, offsets, limits)
        return self.answer(call, most) if prompts else []

    def checked(self, *args: Any) -> tuple[Call, list[int]]:
        """The call of these arguments of `Call.of`, and the most new tokens of each prompt."""
        if self._actor is None:
            raise ValueError(f'{type(self).__name__}: no actor; call begin(actor) first')
        call = Call.of(*args)
        return call, self.check(text_config(self._actor.model.config), call)

    def check(self, config: Any, call: Call) -> list[int]:
        """What is checked before any work, with the text model's config. Returns the most new tokens of each prompt."""
        return call.limits(config)

    @abstractmethod
    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        """The samples of a checked call with at least one prompt."""
