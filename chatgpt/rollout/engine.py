"""Base classes of rollout engines, which take prompts as token ids and return samples, without a tokenizer.

`RolloutEngine` is the interface that trainers use, `CheckedEngine` the base of engines that generate, and
`EngineAround` that of engines that wrap another one. `CheckedEngine` verifies copied weights: before the first sample
after a transfer, log-probs of a few tokens are compared with the actor's (`chatgpt.rollout.handshake`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from chatgpt.nn.trunk import text_config
from chatgpt.rollout.call import Call
from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.rollout.wire import check_policy, checkpoint_tensors, merged
from chatgpt.types import Prompt, Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """The features that an engine supports."""

    copies_weights: bool
    """the engine holds its own full copy of the weights, so the actor may be freed when `begin` returns. Required,
    because copied weights are checked after each transfer"""
    reproducible: bool = False
    """random numbers depend on (seed, sample index, position) only, so samples are the same in any batch order and on
    any number of ranks, except where rounding in another batch shape moves a draw across an edge"""
    exact_logprobs: bool = True
    """recorded log-probs equal the policy's up to rounding; if False, a trainer recomputes the old log-probs"""
    runs_actor: bool = False
    """tokens are computed by the actor's own `trunk` and `head`, which may differ from its transformers model"""
    answers_ahead: bool = False
    """supports `submit`, `take` and `cancel`: it can generate while the trainer learns"""
    plays_turns: bool = False
    """supports `converse`: its cache is kept between the turns of an episode"""
    takes_environments: bool = False
    """supports `put_around`: environments run in its workers"""
    takes_adapters: bool = False
    """`begin` takes a policy whose adapters are not merged, and reads its weights only once"""
    spans_ranks: bool = False
    """every call except `cancel` and `end` is a collective of all ranks"""


class Turns(Protocol):
    """Callbacks of `converse` between the turns of sequences; `i` is a position in the call's prompts."""

    def limit(self, i: int) -> int:
        """Returns the maximum number of tokens of sequence i's next turn."""

    def ended(self, i: int, turn: Sample) -> None:
        """Receives a finished turn of sequence i, as a sample with only this turn as its response. Does not block."""

    def next(self, i: int) -> Tensor | None:
        """Waits for the environment and returns the (n,) int64 ids, n >= 0, to append before sequence i's next turn, or
        None if its episode is over."""


class WeightsLost(RuntimeError):
    """Raised by `take` if nothing has the weights of a ticket any more; `begin` gives them, or newer ones, again."""


class RolloutEngine(ABC):
    """Generates responses during a collect phase: `begin`, any number of `generate`, `end`.

    Raises TypeError for a subclass without `abilities`, or one that copies weights and overrides the check of them.
    """

    abilities: Abilities
    environment: Mapping[str, Any] | None = None
    """for an engine of episodes: its environment and settings as JSON, compared when a run resumes"""
    keeping = False
    """True if state made from the policy in this phase is reused in the next, so a 16-bit copy of it is kept too"""
    slice_tokens: int | None = None
    """for an engine whose responses are generated in parts: the most tokens of one"""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if getattr(cls, 'abilities', None) is None:
            raise TypeError(
                f'{cls.__name__} does not say what it can do: give it abilities = Abilities(copies_weights=...)'
            )
        if not cls.abilities.copies_weights:
            return
        if (cls.begin, cls.generate) != (CheckedEngine.begin, CheckedEngine.generate):
            raise TypeError(
                f'{cls.__name__} copies weights, which begin and generate of CheckedEngine compare with the actor: '
                'derive from it and write transfer and answer, not begin and generate'
            )

    def with_draws_of(self, wrap: Callable[[RolloutEngine], RolloutEngine]) -> RolloutEngine:
        """Applies `wrap` to the innermost engine, which samples the tokens, and returns the outermost one."""
        return wrap(self)

    @abstractmethod
    def begin(self, actor: Actor) -> None:
        """Starts a collect phase with the actor's current weights; dropout is off until `end`."""

    @abstractmethod
    def generate(self, call: Call) -> list[Sample]:
        """Returns one sample per prompt, in the order of the prompts, with tensors on the CPU. Raises ValueError before
        any work if `Call.checked` rejects the call or the engine does not support a setting."""

    @abstractmethod
    def end(self) -> None:
        """Ends the collect phase: releases the actor and frees memory used only for generation."""

    def submit(self, call: Call) -> Any:
        """Starts generating with the weights of the latest `begin` and returns a ticket at once. Raises the errors of
        `generate` that are raised before any work. `end` and later calls of `begin` do not affect the ticket."""
        raise NotImplementedError

    def take(self, ticket: Any) -> list[Sample]:
        """Waits for the samples of a ticket and returns them. Each ticket is taken once, in any order."""
        raise NotImplementedError

    def cancel(self, ticket: Any) -> None:
        """Cancels a ticket and discards its samples."""
        raise NotImplementedError

    def first(self, tickets: Sequence[Any], timeout_s: float | None = None) -> Any:
        """Returns the ticket to take next, by default the oldest; None if it is not known after `timeout_s`."""
        return tickets[0]

    def converse(self, call: Call, turns: Turns) -> None:
        """Generates all turns of the call's sequences, keeping their keys and values in the cache in between. End
        tokens, `stop` and `min_new_tokens` apply to a turn, `max_new_tokens` and `max_length` to turns and
        observations."""
        raise NotImplementedError

    def put_around(self, around: Any, identity: Any = None) -> None:
        """Makes each worker wrap its engine as `around(engine)`, for example in an engine of episodes. `identity`: what
        differs if and only if the environment does; None: `around`."""
        raise NotImplementedError

    @property
    def generator(self) -> RolloutEngine:
        """The innermost engine, which computes the tokens."""
        return self

    def counts(self) -> dict[str, int]:
        """Returns counts since the last call, by the names of `perf/` metrics; the same names on every rank."""
        return {}

    def release(self) -> None:
        """Frees memory that is kept between phases."""

    def close(self) -> None:
        """Stops workers and environments. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CheckedEngine(RolloutEngine):
    """Base of engines that generate, with the actor itself or with a copy of its weights. A subclass implements
    `answer` and, with `abilities.copies_weights`, `transfer`."""

    abilities = Abilities(copies_weights=False)
    dtype: torch.dtype | None = None
    """dtype of the copied weights; None means the actor's"""
    tolerance: float | None = None
    """largest allowed difference of a log-prob in nats after a transfer; None chooses by dtype (`TOLERANCES`)"""
    difference: float | None = None
    """largest difference of a log-prob in the latest check"""

    _actor: Any = None
    _config: Any = None  # of the policy, from `begin` to `end`
    _modes: Sequence[tuple[Any, bool]] = ()
    _handshake: Handshake | None = None  # of transferred weights that are not checked yet

    def begin(self, actor: Actor) -> None:
        """Keeps the actor with dropout off, or copies its weights with adapters merged in.

        Raises:
            ValueError: the engine cannot generate with this policy. An engine that copies weights also rejects an actor
                that changes its model's logits, and sharded weights.
            FloatingPointError: the actor's log-probs are not finite, checked before its weights are copied.
        """
        if self._config is not None:
            self.end()
        if not self.abilities.copies_weights:
            self.hold(actor)
        else:
            check_policy(actor, type(self).__name__)
            with nullcontext() if self.abilities.takes_adapters else merged(actor.model):
                tensors, self.difference = self.tensors_of(actor.model), None
                self.expect(Handshake.of(actor, type(self).__name__, self.tolerance))
                self.transfer(actor.model, tensors)
        self._config = actor.model.config

    def hold(self, actor: Actor) -> None:
        """Keeps the actor, with dropout off, until `end`."""
        self._modes = [(module, module.training) for module in actor.modules()]
        self._actor = actor
        actor.eval()

    def expect(self, handshake: Handshake) -> None:
        """Sets the handshake that the transferred weights must pass before they are used."""
        self._handshake, self.difference = handshake, None

    def tensors_of(self, model: Any) -> Mapping[str, Tensor]:
        """Returns the tensors to transfer, by their names in a checkpoint."""
        return checkpoint_tensors(model)

    def transfer(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        """Copies the weights of a model."""
        raise NotImplementedError

    def end(self) -> None:
        """Releases the actor and restores the training flags of its modules."""
        for module, training in self._modes:
            module.training = training
        self._actor, self._config, self._modes, self._handshake = None, None, (), None

    def generate(self, call: Call) -> list[Sample]:
        """See `RolloutEngine.generate`. Raises RuntimeError if the copied weights differ from the actor's."""
        limits = self.checked(call)
        if not call.prompts:
            return []
        self.check_weights()
        return self.answer(call, limits)

    def check_weights(self) -> None:
        """Checks transferred weights, once per transfer. Raises RuntimeError if they differ from the actor's."""
        if self._handshake is None:
            return

        def generate(prompts: list[Prompt], sampling: SamplingParams) -> list[Sample]:
            call = Call.of(prompts, sampling, seed=0, indices=range(len(prompts)))
            return self.answer(call, self.checked(call))

        self.difference = self._handshake.check(self._handshake.ask(generate), self.dtype)
        self._handshake = None

    def checked(self, call: Call) -> list[int]:
        """Checks a call and returns the maximum number of new tokens per prompt."""
        if self._config is None:
            raise ValueError(f'{type(self).__name__}: no actor; call begin(actor) first')
        return self.check(text_config(self._config), call)

    def check(self, config: Any, call: Call) -> list[int]:
        """Checks a call against the text model's config and returns the maximum number of new tokens per prompt. Raises
        ValueError for a setting that the engine does not support."""
        return call.checked(config)

    @abstractmethod
    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        """Generates the samples of a checked call with at least one prompt."""


_OF_WORKERS = ('chunk_size', 'num_able', 'version', 'workers')
"""attributes of an engine with workers that responses in parts need"""


class EngineAround(RolloutEngine):
    """Base of engines that wrap another engine, with its abilities unless a subclass changes them."""

    abilities = Abilities(copies_weights=False)  # until there is an engine

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.abilities = engine, engine.abilities

    def with_draws_of(self, wrap: Callable[[RolloutEngine], RolloutEngine]) -> RolloutEngine:
        self.engine = self.engine.with_draws_of(wrap)
        self.abilities = replace(self.abilities, exact_logprobs=self.engine.abilities.exact_logprobs)
        return self

    def refuse_parts(self, whole: str) -> None:
        """Raises ValueError if the inner engine generates in parts."""
        if self.engine.slice_tokens is not None:
            raise ValueError(
                f'slice_tokens={self.engine.slice_tokens} cuts responses into parts, and {whole}: make the engine '
                'without slice_tokens'
            )

    @property
    def generator(self) -> RolloutEngine:
        return self.engine.generator

    @property
    def keeping(self) -> bool:  # type: ignore[override]
        return self.engine.keeping

    @property
    def slice_tokens(self) -> int | None:  # type: ignore[override]
        return self.engine.slice_tokens

    def begin(self, actor: Actor) -> None:
        self.engine.begin(actor)

    def generate(self, call: Call) -> list[Sample]:
        return self.engine.generate(call)

    def end(self) -> None:
        self.engine.end()

    def submit(self, call: Call, *version: Any) -> Any:
        return self.engine.submit(call, *version)

    def take(self, ticket: Any) -> list[Sample]:
        return self.engine.take(ticket)

    def cancel(self, ticket: Any) -> None:
        self.engine.cancel(ticket)

    def first(self, tickets: Sequence[Any], timeout_s: float | None = None) -> Any:
        return self.engine.first(tickets, timeout_s)

    def converse(self, call: Call, turns: Turns) -> None:
        self.engine.converse(call, turns)

    def put_around(self, around: Any, identity: Any = None) -> None:
        self.engine.put_around(around, identity)

    def counts(self) -> dict[str, int]:
        return self.engine.counts()

    def release(self) -> None:
        self.engine.release()

    def __getattr__(self, name: str) -> Any:
        if name in _OF_WORKERS:
            return getattr(self.engine, name)
        raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')


@contextmanager
def changing_shapes(device: torch.device) -> Iterator[None]:
    """Context for forwards with a new shape at each token. On a GPU it disables cuDNN's attention, which torch prefers
    on Hopper and which builds a plan for every new shape."""
    if device.type != 'cuda' or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
