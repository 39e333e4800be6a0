"""One engine for all ranks: rank 0 has its workers, the other ranks ask through it. Or one for the processes of a rank
(`OfOneRank`).

    each rank's prompts ─▶ gathered ─▶ rank 0: submit, take ─▶ samples to every rank, which keeps its own

For workers that are larger than a rank's share of them, such as vLLM over several GPUs. Every call but `cancel` and
`end` is a collective: all ranks make it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from chatgpt.nn.actor import Actor
from chatgpt.rollout.call import Call, joined
from chatgpt.rollout.engine import EngineAround, RolloutEngine
from chatgpt.types import Sample


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
    own: slice  # this rank's samples among all
    asked: Any = None  # the engine's ticket, on rank 0


class SharedEngine(EngineAround):
    """One engine over ranks.

    Args:
        ranks: the strategy.
        engine: one that answers ahead, the same on every rank; only that of rank 0 starts its workers.
    """

    def __init__(self, ranks: Ranks, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.ranks, self.abilities = ranks, replace(engine.abilities, spans_ranks=True)

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
        """The weights are rank 0's."""
        self._on_rank_0(lambda: self.engine.begin(actor))

    def generate(self, call: Call) -> list[Sample]:
        return self.take(self.submit(call))

    def submit(self, call: Call) -> _Ticket:
        # what asks for a stop need not travel
        shares = self.ranks.all_gather_object(replace(call, sampling=replace(call.sampling, stop=None)))
        first = sum(len(share.prompts) for share in shares[: self.ranks.rank])
        ticket = _Ticket(slice(first, first + len(call.prompts)))

        def ask() -> None:
            ticket.asked = self.engine.submit(replace(joined(shares), sampling=call.sampling))

        self._on_rank_0(ask)
        return ticket

    def take(self, ticket: _Ticket) -> list[Sample]:
        return self._on_rank_0(lambda: self.engine.take(ticket.asked))[ticket.own]

    def cancel(self, ticket: _Ticket) -> None:
        if ticket.asked is not None:
            self.engine.cancel(ticket.asked)

    def end(self) -> None:
        if self.ranks.is_rank_0:
            self.engine.end()

    def close(self) -> None:
        self.engine.close()
