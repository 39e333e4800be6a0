"""An engine shared by all ranks, with workers owned by rank 0, or by the processes of one rank (`RankProcesses`).

    every rank's share of the weights ─▶ all workers
    each rank's prompts ─▶ gathered ─▶ rank 0: submit, take ─▶ samples to every rank, which keeps its own

For workers that are larger than the share of one rank, such as vLLM on several GPUs. Every call except `cancel` and
`end` is a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from chatgpt.nn.actor import Actor
from chatgpt.rollout.call import Call, joined
from chatgpt.rollout.engine import EngineAround, RolloutEngine
from chatgpt.rollout.remote import Order
from chatgpt.types import Sample


class Ranks(Protocol):
    """The methods of a strategy that `SharedEngine` uses."""

    rank: int
    world_size: int
    is_rank_0: bool

    def all_gather_object(self, obj: Any) -> list[Any]: ...

    def broadcast_object(self, obj: Any, src: int = 0) -> Any: ...

    def untimed(self) -> AbstractContextManager[None]: ...


class RankProcesses:
    """The processes that compute a rank together, as `Ranks`; the first owns the rank's workers.

    Args:
        ranks: the strategy's `ranks`.
    """

    rank, world_size = 0, 1

    def __init__(self, ranks: Any) -> None:
        self.is_rank_0, self.from_leader, self.untimed = ranks.leads, ranks.from_leader, ranks.untimed

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [self.from_leader(obj)]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.from_leader(obj)


@dataclass(eq=False)
class _Ticket:
    own: slice  # this rank's samples
    inner: Any = None  # the engine's ticket, on rank 0


class SharedEngine(EngineAround):
    """An engine shared by all ranks.

    Args:
        ranks: the strategy.
        engine: an engine with `answers_ahead`, created alike on every rank; only that of rank 0 starts its workers.
    """

    def __init__(self, ranks: Ranks, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.ranks, self.abilities = ranks, replace(engine.abilities, spans_ranks=True)

    def _on_rank_0(self, function: Callable[[], Any], on_others: Callable[[Order], None] | None = None) -> Any:
        """Calls the function on rank 0, and returns its result or raises its error on every rank. The others call
        `on_others` with each `Order` that rank 0 broadcasts meanwhile."""
        value: Any = None
        error: Exception | None = None
        with self.ranks.untimed():
            if self.ranks.is_rank_0:
                try:
                    value = function()
                except Exception as raised:
                    error = raised
        message = self.ranks.broadcast_object((value, error))
        while isinstance(message, Order):
            assert on_others is not None
            try:
                on_others(message)
            except Exception as raised:  # rank 0 fails as well, without this share
                error = raised
            message = self.ranks.broadcast_object(None)
        value, sent_error = message
        if sent_error is not None:
            raise error or sent_error
        return value

    def begin(self, actor: Actor) -> None:
        """Starts a collect phase. Every rank has the same weights; each process that has them sends a share."""
        sender: Any = self.engine.generator
        ranks = getattr(self.ranks, 'processes', self.ranks)
        sender.sending_ranks = ranks if ranks.world_size > 1 else None
        self._on_rank_0(lambda: self.engine.begin(actor), lambda order: sender.send_share(actor.model, order))

    def generate(self, call: Call) -> list[Sample]:
        return self.take(self.submit(call))

    def submit(self, call: Call) -> _Ticket:
        # the stop callable is not sent: rank 0 uses its own
        shares = self.ranks.all_gather_object(replace(call, sampling=replace(call.sampling, stop=None)))
        first = sum(len(share.prompts) for share in shares[: self.ranks.rank])
        ticket = _Ticket(slice(first, first + len(call.prompts)))

        def ask() -> None:
            ticket.inner = self.engine.submit(replace(joined(shares), sampling=call.sampling))

        self._on_rank_0(ask)
        return ticket

    def take(self, ticket: _Ticket) -> list[Sample]:
        return self._on_rank_0(lambda: self.engine.take(ticket.inner))[ticket.own]

    def cancel(self, ticket: _Ticket) -> None:
        if ticket.inner is not None:
            self.engine.cancel(ticket.inner)

    def end(self) -> None:
        if self.ranks.is_rank_0:
            self.engine.end()

    def close(self) -> None:
        self.engine.close()
