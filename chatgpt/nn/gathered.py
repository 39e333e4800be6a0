"""A policy whose whole weights are nowhere: processes that hold parts of them read it together, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.nn.trunk import in_eval_mode


@torch.no_grad()
def logits_after(actor: Any, ids: Sequence[int], ends: Sequence[int], device: torch.device) -> Tensor:
    """Returns the logits after each of the prefixes `ids[:end]`, (E, V), from one forward in eval mode."""
    row, position_ids = torch.tensor([ids], device=device), torch.arange(len(ids), device=device)[None]
    with in_eval_mode(actor):
        hidden = actor.trunk(row, position_ids=position_ids)[0]
        return actor.head(hidden[[end - 1 for end in ends]])


class Gathered:
    """Reads a policy. It is the attribute `gathered` of a copy on the meta device, and of the copy's `model`.

    `tensor` and `logits` are collectives of the processes that hold the weights.

    Args:
        copied: the copy, with the names, shapes and dtypes of the whole tensors.
        device: where the policy computes.
        whole: returns the whole tensor with this name in the dtype of the copy, adapters folded in.
        compute: calls a function of the policy, with its weights gathered as for learning.
    """

    def __init__(
        self,
        copied: nn.Module,
        device: torch.device,
        whole: Callable[[str], Tensor],
        compute: Callable[[Callable[[Any], Tensor]], Tensor],
    ) -> None:
        self.device, self._whole, self._compute = device, whole, compute
        named = [*copied.named_parameters(), *copied.named_buffers()]
        self._names = {id(t): name for name, t in named}
        self._tell: Callable[[Any], Any] = lambda command: None
        for module in (copied, getattr(copied, 'model', copied)):
            object.__setattr__(module, 'gathered', self)

    def name_of(self, tensor: Tensor) -> str:
        """Returns the name of a parameter or buffer of the copy."""
        return self._names[id(tensor)]

    def tensor(self, name: str) -> Tensor:
        """Returns a whole tensor, which the caller may not change."""
        self._tell(('tensor', name))
        return self._whole(name)

    def logits(self, ids: Sequence[int], ends: Sequence[int]) -> Tensor:
        """See `logits_after`."""
        self._tell(('logits', ids, ends))
        return self._compute(lambda actor: logits_after(actor, ids, ends, self.device))

    @contextmanager
    def read_on_rank_0(self, ranks: Any) -> Iterator[None]:
        """Context of all ranks in which rank 0 alone reads; the others take part in what it reads until its context
        ends, and then enter theirs."""
        if not ranks.is_rank_0:
            while (command := ranks.broadcast_object(None)) is not None:
                getattr(self, command[0])(*command[1:])
            yield
            return
        self._tell = ranks.broadcast_object
        try:
            yield
        finally:
            self._tell(None)
            self._tell = lambda command: None
