"""Rollout engines: prompts as ids in, samples out, no tokenizer inside. What one can do (`Abilities`), and three base
classes: the face that trainers know, engines that generate, engines around engines.

An engine that copies weights is checked by its base class: before the first sample is drawn with weights that it was
handed, its log-probs of a few tokens are compared with the actor's (`chatgpt.rollout.handshake`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """What an engine can do."""

    copies_weights: bool
    """it has weights of its own, whole ones: what `begin` was given may be freed when it returns. Every engine says so
    or not, since such a one is checked after each transfer"""
    reproducible: bool = False
    """draws follow (seed, sample index, position): the same random numbers in any batch order and on any number of
    ranks, and the same samples where sums of another batch shape do not round to the other side of a draw"""
    exact_logprobs: bool = True
    """its log-probs are the policy's up to rounding; else a trainer takes old log-probs from a forward of its own"""
    runs_actor: bool = False
    """tokens come from the actor's own `trunk` and `head`, which may be more than its model"""
    answers_ahead: bool = False
    """`submit`, `take` and `cancel`: it generates while the trainer learns"""
    plays_turns: bool = False
    """`converse`: it keeps its cache between the turns of an episode"""
    takes_environments: bool = False
    """`put_around`: episodes run where its workers are"""
    spans_ranks: bool = False
    """every call but `cancel` and `end` is a collective of all ranks"""


class Turns(Protocol):
    """What `converse` asks between the turns of its sequences; `i` is a position in the call's prompts."""

    def limit(self, i: int) -> int:
        """The most tokens of sequence i's next turn."""

    def ended(self, i: int, turn: Sample) -> None:
        """Sequence i's turn is there, as a sample whose response is this turn alone. Returns at once."""

    def next(self, i: int) -> Tensor | None:
        """(n,) int64 ids, n >= 0, to append before sequence i's next turn; None: its episode is over. Waits for the
        environment."""


class RolloutEngine(ABC):
    """Generates responses for one collect phase: `begin`, any number of `generate`, `end`.

    Raises TypeError for a class without `abilities`, and for one that copies weights and goes around the check of them.
    """

    abilities: Abilities
    environment: Mapping[str, Any] | None = None
    """of an engine of episodes: what they follow from, as JSON, for telling whether a run goes on with another"""
    longest_opening = 0
    """of an engine of episodes: most tokens before the first turn so far, dataset prompt and first observation"""
    keeping = False
    """whether what it made of this phase's policy is wanted in the next: then a copy in 16 bits is kept too"""

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
        """An engine whose tokens `wrap` of this one draws; engines around it stay around."""
        return wrap(self)

    @abstractmethod
    def begin(self, actor: Actor) -> None:
        """Take the policy's weights for one collect phase; dropout is off until `end`."""

    @abstractmethod
    def generate(self, call: Call) -> list[Sample]:
        """One sample per prompt, in the order of the prompts; tensors are on the CPU.

        Raises ValueError before any work for what `Call.checked` refuses, or a setting that the engine cannot do.
        """

    @abstractmethod
    def end(self) -> None:
        """Give the weights back and free what only generating needs."""

    def submit(self, call: Call) -> Any:
        """A ticket for what `generate` would give, with the weights of the latest `begin`; returns at once, and raises
        what `generate` raises before any work. `end`, and a `begin` with newer weights, do not touch it."""
        raise NotImplementedError

    def take(self, ticket: Any) -> list[Sample]:
        """The samples of a ticket, once; waits for them. Tickets may be taken in any order."""
        raise NotImplementedError

    def cancel(self, ticket: Any) -> None:
        """Forget a ticket."""
        raise NotImplementedError

    def converse(self, call: Call, turns: Turns) -> None:
        """Draw all turns of the call's sequences, whose keys and values stay in a cache while `turns` says what
        follows. `sampling`'s `max_new_tokens` and `max_length` bound all that stands after a prompt; end tokens, `stop`
        and `min_new_tokens` are those of a turn."""
        raise NotImplementedError

    def put_around(self, around: Any) -> None:
        """Let the workers answer with `around(their engine)`, such as an engine of episodes."""
        raise NotImplementedError

    @property
    def generator(self) -> RolloutEngine:
        """Who computes: the innermost of engines around engines."""
        return self

    def counts(self) -> dict[str, int]:
        """What was counted since this was last asked, by the names of `perf/` metrics; the same names on every rank."""
        return {}

    def release(self) -> None:
        """Free what is kept for the next phase."""

    def close(self) -> None:
        """End workers and environments. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CheckedEngine(RolloutEngine):
    """Base of engines that generate: they have the actor from `begin` to `end`, or a copy of its weights, and answer
    checked calls. A subclass writes `answer` and, with `abilities.copies_weights`, `transfer`."""

    abilities = Abilities(copies_weights=False)
    dtype: torch.dtype | None = None
    """of a copy of the weights; None: the actor's"""
    tolerance: float | None = None
    """largest difference of a copy's log-prob in nats; None: what the dtypes explain (`chatgpt.rollout.handshake`)"""
    difference: float | None = None
    """of log-probs, that the latest check of a copy found"""

    _actor: Any = None
    _config: Any = None  # of the policy, from `begin` to `end`
    _modes: Sequence[tuple[Any, bool]] = ()
    _handshake: Handshake | None = None  # of weights that were handed over and not checked yet

    def begin(self, actor: Actor) -> None:
        """Take the actor, dropout off; or a copy of its weights, adapters folded in.

        Raises:
            ValueError: a policy that the engine cannot generate with. Of one that copies weights: logits that are not
                its model's alone, or weights that are not whole.
            FloatingPointError: the log-probs of an actor that is copied are not finite.
        """
        if self._config is not None:
            self.end()
        if not self.abilities.copies_weights:
            self.hold(actor)
        else:
            check_policy(actor, type(self).__name__)
            with merged(actor.model):
                tensors, self.difference = self.tensors_of(actor.model), None
                self.expect(Handshake.of(actor, type(self).__name__, self.tolerance))
                self.transfer(actor.model, tensors)
        self._config = actor.model.config

    def hold(self, actor: Actor) -> None:
        """Keep the actor, dropout off, until `end`."""
        self._modes = [(module, module.training) for module in actor.modules()]
        self._actor = actor
        actor.eval()

    def expect(self, handshake: Handshake) -> None:
        """Check weights by this before they generate."""
        self._handshake, self.difference = handshake, None

    def tensors_of(self, model: Any) -> Mapping[str, Tensor]:
        """The tensors to transfer, by name; a checkpoint's."""
        return checkpoint_tensors(model)

    def transfer(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weights of a model."""
        raise NotImplementedError

    def end(self) -> None:
        """Give the actor back with the training flags it came with."""
        for module, training in self._modes:
            module.training = training
        self._actor, self._config, self._modes, self._handshake = None, None, (), None

    def generate(self, call: Call) -> list[Sample]:
        """See `RolloutEngine.generate`. Raises RuntimeError where copied weights are not the actor's."""
        limits = self.checked(call)
        if not call.prompts:
            return []
        self.check_weights()
        return self.answer(call, limits)

    def check_weights(self) -> None:
        """Check weights that were handed over, once. Raises RuntimeError where they are not the actor's."""
        if self._handshake is None:
            return

        def generate(prompts: list[Prompt], sampling: SamplingParams) -> list[Sample]:
            call = Call.of(prompts, sampling, seed=0, indices=range(len(prompts)))
            return self.answer(call, self.checked(call))

        self.difference = self._handshake.check(self._handshake.ask(generate), self.dtype)
        self._handshake = None

    def checked(self, call: Call) -> list[int]:
        """The most new tokens of each prompt of a call."""
        if self._config is None:
            raise ValueError(f'{type(self).__name__}: no actor; call begin(actor) first')
        return self.check(text_config(self._config), call)

    def check(self, config: Any, call: Call) -> list[int]:
        """Raises ValueError before any work for what this engine cannot do with the text model's config. Returns the
        most new tokens of each prompt."""
        return call.checked(config)

    @abstractmethod
    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        """The samples of a checked call with at least one prompt."""


class EngineAround(RolloutEngine):
    """Base of engines around an engine. Their abilities are that one's, but for what a subclass changes."""

    abilities = Abilities(copies_weights=False)  # until there is an engine

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.abilities = engine, engine.abilities

    def with_draws_of(self, wrap: Callable[[RolloutEngine], RolloutEngine]) -> RolloutEngine:
        self.engine = self.engine.with_draws_of(wrap)
        self.abilities = replace(self.abilities, exact_logprobs=self.engine.abilities.exact_logprobs)
        return self

    @property
    def generator(self) -> RolloutEngine:
        return self.engine.generator

    @property
    def keeping(self) -> bool:  # type: ignore[override]
        return self.engine.keeping

    def begin(self, actor: Actor) -> None:
        self.engine.begin(actor)

    def generate(self, call: Call) -> list[Sample]:
        return self.engine.generate(call)

    def end(self) -> None:
        self.engine.end()

    def submit(self, call: Call) -> Any:
        return self.engine.submit(call)

    def take(self, ticket: Any) -> list[Sample]:
        return self.engine.take(ticket)

    def cancel(self, ticket: Any) -> None:
        self.engine.cancel(ticket)

    def put_around(self, around: Any) -> None:
        self.engine.put_around(around)

    def counts(self) -> dict[str, int]:
        return self.engine.counts()

    def release(self) -> None:
        self.engine.release()


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
