"""State dicts whose tensors are computed when they are read, and tensors in memory-mapped files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor


class ComputedTensors(Mapping[str, Tensor]):
    """Tensors by name, some of which are computed at each access, because together they may exceed the memory."""

    def __init__(self, kept: Mapping[str, Tensor], computed: Mapping[str, Callable[[], Tensor]]) -> None:
        self.kept, self.computed = kept, computed

    def __getitem__(self, name: str) -> Tensor:
        return self.computed[name]() if name in self.computed else self.kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.kept, **self.computed})

    def __len__(self) -> int:
        return len({**self.kept, **self.computed})


def on_disk(tensor: Tensor, folder: str | os.PathLike[str]) -> Tensor:
    """Returns a copy in an unnamed memory-mapped file in `folder`. Raises OSError if the disk is full."""
    # written, then mapped: a write to a mapping of a full disk would kill the process
    with tempfile.NamedTemporaryFile(dir=folder, prefix='.weights-') as file:
        tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tofile(file)
        file.flush()
        mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape)
