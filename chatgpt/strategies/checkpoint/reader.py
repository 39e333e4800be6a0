"""Reading of a checkpoint folder: checks, then any range of any tensor. Unpickles nothing."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chatgpt.strategies.checkpoint.layout import MANIFEST, STATE, CheckpointError, Manifest, RenamedReader, dtype_of

BLOCK = 1 << 22


class CheckpointReader:
    """A `TensorReader` over a checkpoint folder.

    Checks the manifest, that every file exists in the folder with the right size, and with `verify=True` all checksums.
    Ranks can share the latter: open with `verify=False` and call `verify(rank, world_size)` on each.

    Raises:
        CheckpointError: with the damaged file or tensor.
        FileNotFoundError: if the folder does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(f'{self.folder}: no such checkpoint folder')
        path = self.folder / MANIFEST
        if not path.is_file():
            raise CheckpointError(
                f'{self.folder}: no {MANIFEST}, so this is not a checkpoint, or its writing did not finish'
            )
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, OSError) as error:
            raise CheckpointError(f'{path}: damaged ({error})') from error
        self.manifest = Manifest.from_json(content, path)
        self._open: dict[str, Any] = {}
        self._check_files()
        if verify:
            self.verify()

    @property
    def meta(self) -> dict[str, Any]:
        """The writer's JSON in the manifest."""
        return self.manifest.meta

    def _check_files(self) -> None:
        root = self.folder.resolve()
        for name, entry in self.manifest.files.items():
            path = self.folder / name
            if not path.exists():
                raise CheckpointError(f'{path}: the file is missing')
            if not path.resolve().is_relative_to(root) or not path.is_file():
                raise CheckpointError(f'{path}: leads out of the checkpoint folder')
            size = path.stat().st_size
            if size != entry.bytes:
                raise CheckpointError(
                    f'{path}: {size} bytes instead of {entry.bytes}; the file is truncated or was changed'
                )

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Checks the checksum of every `world_size`-th file, beginning with file `rank`."""
        for name in sorted(self.manifest.files)[rank::world_size]:
            path = self.folder / name
            crc = 0
            with open(path, 'rb') as file:
                while block := file.read(BLOCK):
                    crc = zlib.crc32(block, crc)
            if crc != self.manifest.files[name].crc32:
                raise CheckpointError(
                    f'{path}: checksum {crc} instead of {self.manifest.files[name].crc32}; the file is damaged'
                )

    def names(self) -> set[str]:
        return set(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        dtype = dtype_of(self._tensor(name).dtype)
        assert dtype is not None  # checked when the manifest was read
        return dtype

    def _tensor(self, name: str) -> Any:
        if name not in self.manifest.tensors:
            raise CheckpointError(f'{self.folder}: no tensor {name!r}')
        return self.manifest.tensors[name]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) of the row-major tensor, shape (stop - start,), CPU; reads no other bytes."""
        tensor = self._tensor(name)
        if not 0 <= start <= stop <= tensor.numel:
            raise ValueError(f'read: [{start}, {stop}) is not within the {tensor.numel} elements of {name!r}')
        parts = []
        for piece in tensor.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            try:
                stored = self._file(piece.file).get_slice(piece.key)
                if list(stored.get_shape()) != [piece.stop - piece.start]:
                    raise CheckpointError(
                        f'{self.folder / piece.file}: {piece.key!r} is not as long as the manifest says'
                    )
                parts.append(stored[low - piece.start : high - piece.start])
            except SafetensorError as error:
                raise CheckpointError(f'{self.folder / piece.file}: damaged ({error})') from error
        if not parts:
            return torch.empty(0, dtype=self.dtype(name))
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        if data.dtype != self.dtype(name):
            raise CheckpointError(
                f'{self.folder}: {name!r} is {data.dtype} in its file and {self.dtype(name)} in the manifest'
            )
        return data

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework='pt', device='cpu')
        return self._open[name]

    def sub(self, prefix: str) -> RenamedReader:
        """Returns a reader of the tensors that begin with `prefix` ('actor/'), under names without it."""
        return RenamedReader(self, {n.removeprefix(prefix): n for n in self.names() if n.startswith(prefix)})

    def json(self, name: str = STATE) -> Any:
        """Returns the content of a JSON file of the checkpoint."""
        if name not in self.manifest.files:
            raise CheckpointError(f'{self.folder}: no file {name!r}')
        try:
            return json.loads((self.folder / name).read_bytes())
        except ValueError as error:
            raise CheckpointError(f'{self.folder / name}: damaged ({error})') from error

    def close(self) -> None:
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
