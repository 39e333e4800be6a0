"""The checkpoint format: pieces, readers, the manifest and its checks.

A checkpoint names parameters, not ranks. Its unit is a piece: a flat, row-major range of a named tensor.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

FORMAT_VERSION = 1
MANIFEST = 'manifest.json'
STATE = 'state.json'


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written, or is incomplete or damaged."""


class CheckpointMismatch(CheckpointError, ValueError):
    """Raised if a checkpoint does not fit the model or optimizer that it is loaded into."""


class Piece(NamedTuple):
    """Elements [start, stop) of the row-major tensor `name`.

    >>> second_row = Piece('head.weight', (2, 3), 3, 6, torch.zeros(3))    # of a (2, 3) matrix
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: Tensor
    """(stop - start,), any device"""

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        return cls(name, tuple(tensor.shape), 0, tensor.numel(), tensor.detach().reshape(-1))


class TensorReader(Protocol):
    """A reader of any range of any named tensor, independent of the layout that wrote it."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) as a 1-D CPU tensor."""
        ...


class DictReader:
    """A `TensorReader` over tensors in memory, or mapped from a file and then loaded as they are read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name].detach().reshape(-1)[start:stop].cpu()


class RenamedReader:
    """A `TensorReader` of another reader's tensors under other names: {name: name in that reader}."""

    def __init__(self, reader: TensorReader, stored: Mapping[str, str]) -> None:
        self.reader, self.stored = reader, stored
        self.left_out: frozenset[str] = frozenset()
        """names that need not be here: the model keeps its own weights of these names"""

    def names(self) -> set[str]:
        return set(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.reader.shape(self.stored[name])

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.reader.read(self.stored[name], start, stop)


@dataclass(frozen=True)
class StoredPiece:
    """The location of elements [start, stop) of a tensor: `key` in the safetensors file `file`."""

    file: str
    key: str
    start: int
    stop: int


@dataclass
class StoredTensor:
    """Shape, dtype and pieces of one tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[StoredPiece]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class StoredFile:
    """Size and CRC-32 of one file of a checkpoint."""

    bytes: int
    crc32: int


@dataclass
class Manifest:
    """The content of a checkpoint. `meta` is JSON of the writer, such as step and score."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return with_checksum({'format': FORMAT_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, data: Any, where: Path | str) -> Manifest:
        """Parses and checks a manifest; raises `CheckpointError` with `where` for every fault."""
        version = data.get('format') if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise CheckpointError(f'{where}: format version {version!r}, this library reads version {FORMAT_VERSION}')
        try:
            manifest = cls(
                tensors={name: _stored_tensor(entry) for name, entry in data['tensors'].items()},
                files={name: StoredFile(int(f['bytes']), int(f['crc32'])) for name, f in data['files'].items()},
                meta=dict(data['meta']),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f'{where}: malformed manifest ({type(error).__name__}: {error})') from error
        manifest.check(where)
        if data.get('crc32') != (found := with_checksum(data)['crc32']):
            raise CheckpointError(f'{where}: checksum {found} instead of {data.get("crc32")}; the file is damaged')
        return manifest

    def check(self, where: Path | str) -> None:
        """Checks that file names stay in the folder, pieces are in listed files, and they cover each tensor once."""
        for name in self.files:
            check_file_name(name, where)
        for name, tensor in self.tensors.items():
            if dtype_of(tensor.dtype) is None:
                raise CheckpointError(f'{where}: tensor {name!r} has the unknown dtype {tensor.dtype!r}')
            for piece in tensor.pieces:
                if piece.file not in self.files:
                    raise CheckpointError(
                        f'{where}: tensor {name!r} lies in {piece.file!r}, which is not among the files'
                    )
            fault = coverage_fault([(p.start, p.stop) for p in tensor.pieces], tensor.numel)
            if fault:
                raise CheckpointError(f'{where}: tensor {name!r} of shape {tensor.shape} {fault}')


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest's JSON with `crc32`, the CRC-32 of its other fields, ignoring key order and white space."""
    rest = {name: value for name, value in content.items() if name != 'crc32'}
    as_read = json.loads(json.dumps(rest))  # keys that are not strings sort differently
    return rest | {'crc32': zlib.crc32(json.dumps(as_read, sort_keys=True).encode())}


def _stored_tensor(entry: dict[str, Any]) -> StoredTensor:
    pieces = [StoredPiece(str(p['file']), str(p['key']), int(p['start']), int(p['stop'])) for p in entry['pieces']]
    shape = tuple(int(n) for n in entry['shape'])
    if any(n < 0 for n in shape):
        raise ValueError(f'negative size in shape {shape}')
    return StoredTensor(shape, str(entry['dtype']), sorted(pieces, key=lambda p: p.start))


def dtype_of(name: str) -> torch.dtype | None:
    """Returns the dtype called `name` ('float32'), or None."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def check_file_name(name: str, where: Path | str) -> None:
    """Raises CheckpointError unless `name` is a plain relative path inside the checkpoint's folder."""
    path = PurePosixPath(name)
    if not name or '\\' in name or '\0' in name or path.is_absolute() or '..' in path.parts or name != str(path):
        raise CheckpointError(
            f'{where}: the path {name!r} leaves the checkpoint folder; only plain relative paths are allowed'
        )


def coverage_fault(ranges: Sequence[tuple[int, int]], numel: int) -> str | None:
    """Returns None if the ranges cover [0, numel) exactly once, else a description of the first fault."""
    position = 0
    for start, stop in sorted(ranges):
        if stop <= start:
            return f'has an empty piece [{start}, {stop})'
        if start > position:
            return f'lacks elements [{position}, {start})'
        if start < position:
            return f'holds elements [{start}, {min(position, stop)}) twice'
        position = stop
    if position < numel:
        return f'lacks elements [{position}, {numel})'
    return f'has elements past its end ({position} > {numel})' if position > numel else None
