"""One engine for all ranks: rank 0 has its workers, the other ranks ask through it. Or one for the processes of a rank
(`OfOneRank`).

    each rank's prompts ─▶ gathered ─▶ rank 0: submit, take ─▶ samples to every rank, which keeps its own

For workers that are larger than a rank's share of them, such as vLLM over several GPUs. Every call but `cancel` and
`end` is a collective: all ranks make it, in the same order. Left out: the engine itself (`RemoteEngine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from chatgpt.nn.actor import Actor
from chatgpt.rollout.remote import RemoteEngine
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.types import Prompt, Sample


class Ranks(Protocol):
    """What of a strategy is wanted."""

    rank: int
    is_rank_0: bool

    def all_gather_object(self, obj: Any) -> list[Any]: ...

    def broadcast_object(self, obj: Any, src: int = 0) -> Any: ...


class OfOneRank:
    """The processes that compute one rank together, as `SharedEngine` asks for ranks: the first has the rank's workers.

    Args:
        ranks: those of the strategy.
    """

    rank = 0

    def __init__(self, ranks: Any) -> None:
        self.is_rank_0, self.from_leader = ranks.leads, ranks.from_leader

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [self.from_leader(obj)]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.from_leader(obj)


@dataclass(eq=False)
class _Ticket:
    own: slice
    """this rank's samples among all"""
    asked: Any = None
    """the engine's ticket, on rank 0"""


class SharedEngine:
    """An `AheadEngine` over ranks.

    Args:
        ranks: the strategy.
        engine: the same on every rank; only that of rank 0 starts its workers.

    >>> engine = SharedEngine(strategy, VLLMRemoteEngine(RayWorkers(2, resources={'GPU': 2})))     # doctest: +SKIP
    """

    is_shared = True

    def __init__(self, ranks: Ranks, engine: RemoteEngine) -> None:
        self.ranks, self.engine = ranks, engine
        self.reproducible = engine.reproducible
        self.recompute_logprobs = getattr(engine, 'recompute_logprobs', False)
        self.copies_weights = getattr(engine, 'copies_weights', False)

    def put_around(self, around: Any) -> None:
        self.engine.put_around(around)

    def _on_rank_0(self, function: Callable[[], Any]) -> Any:
        """What it returns there, or raises there, on every rank."""
        value: Any = None
        error: Exception | None = None
        if self.ranks.is_rank_0:
            try:
                value = function()
            except Exception as raised:
                error = raised
        value, told = self.ranks.broadcast_object((value, error))
        if told is not None:
            raise error or told
        return value

    def begin(self, actor: Actor) -> None:
        """See `RemoteEngine.begin`; the weights are rank 0's."""
        self._on_rank_0(lambda: self.engine.begin(actor))

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
        return self.take(
            self.submit(prompts, sampling, seed=seed, indices=indices, groups=groups, offsets=offsets, limits=limits)
        )

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
    ) -> _Ticket:
        """See `AheadEngine.submit`."""
        own = (
            list(prompts),
            list(indices),
            list(indices if groups is None else groups),
            [0] * len(prompts) if offsets is None else list(offsets),
            [None] * len(prompts) if limits is None else list(limits),
        )
        shares = self.ranks.all_gather_object(own)
        every = [[one for share in shares for one in share[part]] for part in range(len(own))]
        first = sum(len(share[0]) for share in shares[: self.ranks.rank])
        ticket = _Ticket(slice(first, first + len(prompts)))

        def ask() -> None:
            ticket.asked = self.engine.submit(
                every[0], sampling, seed=seed, indices=every[1], groups=every[2], offsets=every[3], limits=every[4]
            )

        self._on_rank_0(ask)
        return ticket

    def take(self, ticket: _Ticket) -> list[Sample]:
        """See `AheadEngine.take`."""
        return self._on_rank_0(lambda: self.engine.take(ticket.asked))[ticket.own]

    def cancel(self, ticket: _Ticket) -> None:
        if ticket.asked is not None:
            self.engine.cancel(ticket.asked)

    def end(self) -> None:
        if self.ranks.is_rank_0:
            self.engine.end()

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
