"""Where experience waits between collect and learn: single sequences, unpadded, in the order of their sample index.

Every rank holds the same buffer (see docs/design.md), so batch order needs no communication. Left out: padding,
batching and anything that knows a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from chatgpt.types import Experience, tensors_to


class ReplayBuffer:
    """A list of experiences with a limit.

    Args:
        limit: keep at most this many sequences, dropping the oldest; 0 keeps all.
        device: where the tensors wait; 'cpu' keeps them out of the accelerator's memory.
    """

    def __init__(self, limit: int = 0, device: torch.device | str = 'cpu') -> None:
        if limit < 0:
            raise ValueError(f'limit={limit}: a buffer holds at least one sequence, or 0 for no limit')
        self.limit = limit
        self.device = torch.device(device)
        self._items: list[Experience] = []

    def append(self, experiences: Iterable[Experience]) -> None:
        self._items.extend(tensors_to(e, self.device) for e in experiences)
        if self.limit and len(self._items) > self.limit:
            del self._items[: len(self._items) - self.limit]

    def clear(self) -> None:
        self._items.clear()

    def sample(self, num: int, generator: torch.Generator) -> list[Experience]:
        """`num` different sequences drawn at random (all of them when there are fewer)."""
        return [self._items[i] for i in torch.randperm(len(self._items), generator=generator)[:num].tolist()]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Experience]:
        return iter(self._items)

    def __getitem__(self, position: int) -> Experience:
        return self._items[position]
