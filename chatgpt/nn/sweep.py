"""Runs a model over many sequences without gradients, for scoring, references, evaluation and calibration.

Every rank runs equally many forwards, because a sharded forward is a collective; a rank without data runs a dummy
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from chatgpt.types import Batch

T = TypeVar('T')


SWEEP_TOKENS = 16384
"""padded tokens of a forward without gradients, unless `max_tokens_per_batch` is set"""


class Communicator(Protocol):
    """The part of a strategy that this module uses."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def sums(self) -> Any: ...
    def autocast(self, *, scoring: bool = False) -> Any: ...
    def unwrap(self, model: Any) -> Any: ...
    def onload(self, model: nn.Module) -> Any: ...
    def all_reduce(self, tensor: Tensor, op: Any = 'sum') -> Tensor: ...
    def all_gather_object(self, obj: Any) -> list[Any]: ...
    def exchange(self, sent: SequenceOf[Tensor]) -> list[Tensor]: ...
    def from_leader(self, obj: Any) -> Any: ...
    def run_on_rank0(self, fn: Callable[[], Any]) -> Any: ...


def gathered(strategy: Communicator, items: list[T], index: Callable[[T], int]) -> list[T]:
    """Returns the items of all ranks on every rank, ordered by sample index. A collective."""
    return sorted((item for rank in strategy.all_gather_object(items) for item in rank), key=index)


def cuts_of_own(strategy: Communicator, lengths: SequenceOf[int], max_tokens: int | None) -> list[list[int]]:
    """Returns micro-batches of this rank's own list, as positions; as many as on the rank with the most. A collective.

    Raises:
        ValueError: ranks have different numbers of items and the strategy's `sums` do not allow that.
    """
    cuts = strategy.sums.own(lengths, max_tokens)
    most = len(cuts)
    if strategy.world_size > 1:
        own = torch.tensor([len(cuts), len(lengths), -len(lengths)], dtype=torch.float64, device=strategy.device)
        most, high, low = map(int, strategy.all_reduce(own, op='max').tolist())
        strategy.sums.check_counts(-low, high)
    return cuts + [[] for _ in range(most - len(cuts))]


@torch.no_grad()
def sweep(
    strategy: Communicator,
    cuts: Iterable[list[int]],
    make_batch: Callable[[list[int]], Batch],
    forward: Callable[[Batch], T],
) -> Iterator[tuple[list[int], T]]:
    """Yields (positions, result of `forward`) for every micro-batch; positions are empty for a dummy batch."""
    on_cuda = strategy.device.type == 'cuda'
    for positions in cuts:
        batch = make_batch(positions).to(strategy.device, pin_memory=on_cuda)
        with strategy.autocast(scoring=True):
            given = forward(batch)
        yield positions, given
        del given  # logits, which the next forward has of its own


def read_back(results: SequenceOf[Tensor]) -> list[Tensor]:
    """Returns 1-D results of micro-batches on the CPU in fp32, by a single copy, for which the host waits once."""
    if not results:
        return []
    return list(torch.cat([r.float() for r in results]).cpu().split([len(r) for r in results]))
