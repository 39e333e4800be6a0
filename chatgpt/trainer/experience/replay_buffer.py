"""Where experience waits between collect and learn: single sequences, unpadded, in the order of their sample index.

Every rank holds the same buffer (see docs/design.md), so batch order needs no communication.
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
        self.limit, self.device = limit, torch.device(device)
        self._items: list[Experience] = []

    def append(self, experiences: Iterable[Experience]) -> None:
        self._items.extend(tensors_to(e, self.device) for e in experiences)
        if self.limit:
            del self._items[: -self.limit]

    def clear(self) -> None:
        self._items.clear()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Experience]:
        return iter(self._items)
