"""Engines shared by ranks. A `SharedEngine` has workers owned by rank 0, or by the first process of a rank
(`RankProcesses`); the tokens of a `NeighboursEngine` are computed by neighbouring ranks together.

    every rank's share of the weights ─▶ all workers
    each rank's prompts ─▶ gathered ─▶ rank 0: submit, take ─▶ to every rank its own samples

For workers that are larger than the share of one rank, such as vLLM on several GPUs. Every call except `cancel` and
`end` is a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

from chatgpt.nn.actor import Actor
from chatgpt.rollout.call import Call, joined
from chatgpt.rollout.engine import EngineAround, RolloutEngine
from chatgpt.rollout.remote import Order, SendingRanks
from chatgpt.types import Sample


class Ranks(SendingRanks, Protocol):
    """The methods of a strategy that `SharedEngine` uses."""

    is_rank_0: bool

    def scatter_object(self, objs: list[Any]) -> Any: ...

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

    def scatter_object(self, objs: list[Any]) -> Any:
        return self.from_leader(objs[0])


@dataclass(eq=False)
class _Ticket:
    own: list[slice]  # each rank's samples
    inner: Any = None  # the engine's ticket, on rank 0


class SharedEngine(EngineAround):
    """An engine shared by all ranks.

    Args:
        ranks: the strategy.
        engine: an engine with `answers_ahead`, created alike on every rank; only that of rank 0 starts its workers.

    Raises ValueError for an engine with `slice_tokens`.
    """

    def __init__(self, ranks: Ranks, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.refuse_parts('workers that several processes share answer whole requests')
        self.ranks, self.abilities = ranks, replace(engine.abilities, spans_ranks=True)

    def _on_rank_0(self, function: Callable[[], Any], on_others: Callable[[Order], None] | None = None) -> Any:
        """Calls the function on rank 0, which returns None or a list with one value per rank. Returns this one's, or
        raises the function's error on every rank. Meanwhile the others call `on_others` with each `Order` that rank 0
        broadcasts."""
        value: Any = None
        error: Exception | None = None
        # `untimed` ends where all ranks meet, and rank 0 may need the others before that
        with self.ranks.untimed() if on_others is None else nullcontext():
            if self.ranks.is_rank_0:
                try:
                    value = function()
                except Exception as raised:
                    error = raised
        # orders end with None; on rank 0 all have been broadcast
        while on_others is not None and (order := self.ranks.broadcast_object(None)) is not None:
            try:
                on_others(order)
            except Exception as raised:  # rank 0 fails as well, without this share
                error = raised
        values = value or [None] * self.ranks.world_size
        value, sent_error = self.ranks.scatter_object([(own, error) for own in values])
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

    def submit(self, call: Call) -> _Ticket:  # type: ignore[override]  # no responses in parts
        # the stop callable is not sent: rank 0 uses its own
        shares = self.ranks.all_gather_object(replace(call, sampling=replace(call.sampling, stop=None)))
        ends = [0, *accumulate(len(share.prompts) for share in shares)]
        ticket = _Ticket([slice(*ends[i : i + 2]) for i in range(len(shares))])

        def ask() -> None:
            ticket.inner = self.engine.submit(replace(joined(shares), sampling=call.sampling))

        self._on_rank_0(ask)
        return ticket

    def take(self, ticket: _Ticket) -> list[Sample]:
        def take() -> list[list[Sample]]:
            samples = self.engine.take(ticket.inner)
            return [samples[own] for own in ticket.own]

        return self._on_rank_0(take)

    def cancel(self, ticket: _Ticket) -> None:
        if ticket.inner is not None:
            self.engine.cancel(ticket.inner)

    def end(self) -> None:
        if self.ranks.is_rank_0:
            self.engine.end()

    def close(self) -> None:
        self.engine.close()


class NeighboursEngine(EngineAround):
    """An engine whose tokens `size` neighbouring ranks compute together: a `VLLMEngine` with tensor parallelism. Each
    generates the prompts of all, in the same order, and keeps the samples of its own.

    Args:
        ranks: the strategy; each of its ranks is one process.
        engine: created alike on every rank.
        size: number of ranks of a group: rank r is in group r // size.
    """

    def __init__(self, ranks: Ranks, engine: RolloutEngine, size: int) -> None:
        super().__init__(engine)
        self.ranks, self.size, self.abilities = ranks, size, replace(engine.abilities, spans_ranks=True)

    def generate(self, call: Call) -> list[Sample]:
        # the stop callable is not sent: an engine that takes one calls this rank's
        shares = self.ranks.all_gather_object(replace(call, sampling=replace(call.sampling, stop=None)))
        first = self.ranks.rank // self.size * self.size
        group = shares[first : first + self.size]
        samples = self.engine.generate(replace(joined(group), sampling=call.sampling))
        start = sum(len(share.prompts) for share in group[: self.ranks.rank - first])
        return samples[start : start + len(call.prompts)]
