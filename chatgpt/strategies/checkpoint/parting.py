"""Comparison of the tensors of two checkpoints of any layout, and a SHA-256 of the weights.

The hash is that of a stream of bytes: for every tensor of the models, in the order of their names, the line

    <name> <dtype> <shape, sizes with x between them>\\n

in UTF-8, then the tensor's elements, row-major and little-endian. Names, dtypes and shapes are those of the checkpoint:
`actor/model.transformer.wte.weight float32 50257x768`; the shape of a scalar is empty.
"""

from __future__ import annotations

import hashlib
import math
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from chatgpt.strategies.checkpoint.layout import dtype_name
from chatgpt.strategies.checkpoint.reader import CheckpointReader

BLOCK = 1 << 22
"""elements read at once"""


class TensorDifference(NamedTuple):
    """The first difference of two checkpoints: an element of the first tensor by name."""

    tensor: str
    element: tuple[int, ...] | None
    """None if name, shape or dtype differ"""
    values: tuple[Any, Any]
    elements: int
    """number of elements of this tensor that differ"""
    tensors: int
    """number of tensors that differ, including this one"""


def weights_hash(reader: CheckpointReader) -> str:
    """Returns the hash of the weights, 64 hexadecimal digits. Checkpoints hold adapters and no frozen models."""
    sha = hashlib.sha256()
    for name in sorted(n for n in reader.names() if _owner(reader, n) == 'models'):
        shape = reader.shape(name)
        sha.update(f'{name} {dtype_name(reader.dtype(name))} {"x".join(map(str, shape))}\n'.encode())
        size = math.prod(shape)
        for start in range(0, size, BLOCK):
            sha.update(_bytes(reader.read(name, start, min(start + BLOCK, size))))
    return sha.hexdigest()


def compare_checkpoints(a: CheckpointReader, b: CheckpointReader) -> TensorDifference | None:
    """Returns the first difference, or None: in weights, then in states of optimizers and callbacks. Ignores states of
    global generators, which differ by rank."""
    names = {n for reader in (a, b) for n in reader.names() if _owner(reader, n) != 'rng'}
    first: TensorDifference | None = None
    tensors = 0
    for name in sorted(names, key=lambda n: (_owner(a if n in a.names() else b, n) != 'models', n)):
        difference = _compare(a, b, name)
        if difference is not None:
            first, tensors = first or difference, tensors + 1
    return first._replace(tensors=tensors) if first is not None else None


def _owner(reader: CheckpointReader, name: str) -> str:
    return str(reader.meta.get('owners', {}).get(name.split('/')[0], ''))


def _compare(a: CheckpointReader, b: CheckpointReader, name: str) -> TensorDifference | None:
    kinds = _kind(a, name), _kind(b, name)
    if kinds[0] != kinds[1]:
        return TensorDifference(name, None, kinds, 0, 1)
    shape = a.shape(name)
    values: tuple[Any, Any] = (None, None)
    size, different, at = math.prod(shape), 0, -1
    for start in range(0, size, BLOCK):
        one, other = (reader.read(name, start, min(start + BLOCK, size)) for reader in (a, b))
        unequal = (_bits(one) != _bits(other)).any(dim=1)
        if unequal.any():
            if at < 0:
                i = int(unequal.nonzero()[0])
                at, values = start + i, (one[i].item(), other[i].item())
            different += int(unequal.sum())
    if not different:
        return None
    return TensorDifference(name, tuple(map(int, np.unravel_index(at, shape))), values, different, 1)


def _kind(reader: CheckpointReader, name: str) -> str | None:
    if name not in reader.names():
        return None
    return f'{dtype_name(reader.dtype(name))} {"x".join(map(str, reader.shape(name)))}'


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bytes of each element, uint8, shape (n, itemsize): NaN equals itself, and 0.0 is not -0.0."""
    return tensor.contiguous().view(torch.uint8).view(len(tensor), -1)


def _bytes(tensor: Tensor) -> bytes:
    bits = _bits(tensor)
    return bits.numpy().tobytes() if sys.byteorder == 'little' else bits.flip(1).contiguous().numpy().tobytes()
