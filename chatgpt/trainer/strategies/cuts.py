"""Parts of tensors that a few processes hold together, and their way into checkpoints and out of them.

A checkpoint knows whole tensors by name, in flat ranges of their rows. A part along dimension 0 is such a range. A part
along dimension 1 (columns) is not: its rows are gathered over the tensor group, one tensor at a time and no more of it
than this rank's shard, and written whole by the first process of the group; reading takes the rows and keeps the
columns. So is a part of each of several blocks (queries, keys and values in one tensor): a block is a row then. So a
folder does not show how many processes wrote it. Left out: how parts compute (`tensor_parallel`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from chatgpt.checkpoint.layout import Piece, TensorReader
from chatgpt.trainer.strategies.tensor_group import TensorGroup, part_of


@dataclass(frozen=True)
class Cut:
    """Part `index` of `size` of a tensor of `shape`, along dimension `dim` (0, or 1 of a matrix); with `blocks`, of
    each of so many equal blocks that lie behind one another along it, which the parts must divide.

    Example: process 1 of 2 holds rows 2, 3, 6 and 7 of a (8, 4) weight that is cut in two blocks.
    """

    shape: tuple[int, ...]
    dim: int
    index: int
    size: int
    blocks: int = 1

    @property
    def start(self) -> int:
        """Where this part of a block begins, along `dim`."""
        return part_of(self.shape[self.dim] // self.blocks, self.index, self.size)[0]

    @property
    def stop(self) -> int:
        return part_of(self.shape[self.dim] // self.blocks, self.index, self.size)[1]

    @property
    def local_shape(self) -> tuple[int, ...]:
        length = self.blocks * (self.stop - self.start)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def rows(self) -> int:
        """In how many equal ranges of elements the tensor lies of which this part has one range each."""
        return self.blocks * math.prod(self.shape[: self.dim])

    @property
    def columns(self) -> tuple[int, int, int]:
        """Elements of such a row, and [start, stop) of this part's among them."""
        inner = math.prod(self.shape[self.dim + 1 :])
        return self.shape[self.dim] // self.blocks * inner, self.start * inner, self.stop * inner

    def take(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor: a view, or with several blocks a copy."""
        blocks = whole.unflatten(self.dim, (self.blocks, self.shape[self.dim] // self.blocks))
        return blocks.narrow(self.dim + 1, self.start, self.stop - self.start).flatten(self.dim, self.dim + 1)

    def join(self, part: Tensor, group: TensorGroup) -> Tensor:
        """The whole tensor out of all processes' parts. A collective."""
        blocks = part.unflatten(self.dim, (self.blocks, self.stop - self.start))
        width = self.shape[self.dim] // self.blocks
        return group.joined(blocks, width, self.dim + 1).flatten(self.dim, self.dim + 1)

    def pieces(self, name: str, start: int, stop: int, flat: Tensor, group: TensorGroup) -> Iterator[Piece]:
        """Of elements [start, stop) of the flattened part, what this process writes. Where there are several rows, a
        collective of the group with the same range on all: rows that are whole in it are gathered, and what is left at
        its ends each process writes itself."""
        width, first_column, last_column = self.columns
        own = last_column - first_column
        first, last = (-(-start // own), stop // own) if self.rows > 1 and own else (stop + 1, 0)
        ends = [(start, min(first * own, stop)), (max(last * own, start), stop)][: 2 if first <= last else 1]
        for begin, end in ends:
            if end > begin:
                row = begin // own
                at = row * width + first_column + begin - row * own
                yield Piece(name, self.shape, at, at + end - begin, flat[begin - start : end - start])
        if first < last:
            rows = group.joined(flat[first * own - start : last * own - start].view(-1, own), width)
            if group.index == 0:
                yield Piece(name, self.shape, first * width, last * width, rows.reshape(-1))


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
        width, begin, end = cut.columns
        if cut.rows == 1:
            return self.reader.read(name, start + begin, stop + begin)
        own = end - begin
        first, last = start // own, -(-stop // own)
        # a few rows at a time: they are read whole
        step = max(1, (1 << 22) // width)
        parts = [
            self.reader.read(name, row * width, min(row + step, last) * width).view(-1, width)[:, begin:end].reshape(-1)
            for row in range(first, last, step)
        ]
        return torch.cat(parts)[start - first * own : stop - first * own]
