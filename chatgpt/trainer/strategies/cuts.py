"""Parts of tensors that a few processes hold together, and their way into checkpoints and out of them.

A checkpoint knows whole tensors by name, in flat ranges of their rows. A part along dimension 0 is such a range. A part
along dimension 1 (columns) is not: its rows are gathered over the tensor group, one tensor at a time and no more of it
than this rank's shard, and written whole by the first process of the group; reading takes the rows and keeps the
columns. So a folder does not show how many processes wrote it. Left out: how parts compute (`tensor_parallel`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from chatgpt.checkpoint.layout import Piece, TensorReader
from chatgpt.trainer.strategies.tensor_group import TensorGroup, part_of


@dataclass(frozen=True)
class Cut:
    """Part `index` of `size` of a tensor of `shape`, along dimension `dim` (0, or 1 of a matrix)."""

    shape: tuple[int, ...]
    dim: int
    index: int
    size: int

    @property
    def start(self) -> int:
        return part_of(self.shape[self.dim], self.index, self.size)[0]

    @property
    def stop(self) -> int:
        return part_of(self.shape[self.dim], self.index, self.size)[1]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor, as a view."""
        return whole.narrow(self.dim, self.start, self.stop - self.start)

    def join(self, part: Tensor, group: TensorGroup) -> Tensor:
        """The whole tensor out of all processes' parts. A collective."""
        return group.joined(part, self.shape[self.dim], self.dim)

    def piece(self, name: str, start: int, stop: int, flat: Tensor, group: TensorGroup) -> Piece | None:
        """Of elements [start, stop) of the flattened part, what this process writes. A collective of the group for
        columns, with the same range on all."""
        if self.dim == 0:
            offset = self.start * math.prod(self.shape[1:])
            return Piece(name, self.shape, start + offset, stop + offset, flat) if stop > start else None
        if stop == start:
            return None
        width, own = self.shape[1], self.local_shape[1]
        rows = group.joined(flat.view(-1, own), width)
        first = start // own * width
        return Piece(name, self.shape, first, first + rows.numel(), rows.reshape(-1)) if group.index == 0 else None


class CutReader:
    """Another reader's tensors as this process's parts of them.

    Args:
        cuts: by name; the names 'NAME/SLOT' of optimizer states are cut like NAME. A stored tensor of another shape
            than the cut's is given as it is.
    """

    def __init__(self, reader: TensorReader, cuts: Mapping[str, Cut]) -> None:
        self.reader, self.cuts = reader, cuts

    def _cut(self, name: str) -> Cut | None:
        cut = self.cuts.get(name) or self.cuts.get(name.rpartition('/')[0])
        return cut if cut is not None and tuple(self.reader.shape(name)) == cut.shape else None

    def names(self) -> set[str]:
        return self.reader.names()

    def shape(self, name: str) -> tuple[int, ...]:
        cut = self._cut(name)
        return self.reader.shape(name) if cut is None else cut.local_shape

    def read(self, name: str, start: int, stop: int) -> Tensor:
        cut = self._cut(name)
        if cut is None or stop == start:
            return self.reader.read(name, start, stop)
        if cut.dim == 0:
            offset = cut.start * math.prod(cut.shape[1:])
            return self.reader.read(name, start + offset, stop + offset)
        width, own = cut.shape[1], cut.local_shape[1]
        first, last = start // own, -(-stop // own)
        # a few rows at a time: they are read whole
        step = max(1, (1 << 22) // width)
        parts = [
            self.reader.read(name, row * width, min(row + step, last) * width)
            .view(-1, width)[:, cut.start : cut.stop]
            .reshape(-1)
            for row in range(first, last, step)
        ]
        return torch.cat(parts)[start - first * own : stop - first * own]
