"""Parallel, atomic writing of a checkpoint folder.

Every rank writes its pieces to safetensors files of bounded size in a temporary folder; rank 0 merges the lists of
pieces, writes the manifest last and renames the folder. Collectives are done by `all_gather_object`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from safetensors.torch import save
from torch import Tensor

from chatgpt.strategies.checkpoint.files import fsync_folder
from chatgpt.strategies.checkpoint.folder import backup_of, list_checkpoints, temporary_of
from chatgpt.strategies.checkpoint.layout import (
    MANIFEST,
    CheckpointError,
    Manifest,
    Piece,
    StoredFile,
    StoredPiece,
    StoredTensor,
    check_file_name,
    dtype_name,
)

MAX_FILE_BYTES = 256 << 20
"""maximum size of a file without its header, and so of the memory that writing needs on a rank"""

Gather = Callable[[Any], list[Any]]


def single_process(obj: Any) -> list[Any]:
    """The `all_gather_object` of a single process."""
    return [obj]


class CheckpointWriter:
    """A writer of one checkpoint folder. Every rank calls the same methods in the same order.

    ::

        with CheckpointWriter(folder, rank=..., all_gather_object=...) as writer:
            writer.add('actor/', strategy.model_pieces(actor))
            writer.add_json('state.json', {'step': 12})        # rank 0's content is written
            writer.commit(meta={'step': 12})

    Until `commit` returns, an existing checkpoint at `folder` is not changed. A failure on any rank (a full disk)
    removes the temporary folder and raises `CheckpointError` with the reason on every rank, after all ranks have
    iterated over their pieces, since that may be collective.

    Args:
        background: `add` copies to host memory, and after the `with` block a thread writes the files. `commit`, then
            called after the block, waits for it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int = 0,
        all_gather_object: Gather = single_process,
        max_file_bytes: int = MAX_FILE_BYTES,
        background: bool = False,
    ) -> None:
        self.folder = Path(os.path.abspath(folder))
        self.rank, self.gather, self.max_file_bytes = rank, all_gather_object, max_file_bytes
        self.temporary = temporary_of(self.folder)
        self.manifest = Manifest()
        self.error: Exception | None = None
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._num_files = 0
        self.committed = False
        self._files: deque[tuple[str, Callable[[], bytes]]] = deque()
        """names of files to write in the background, and functions that return their bytes"""
        self._thread = threading.Thread(target=self._work, name='chatgpt-checkpoint', daemon=True)
        self.background = background

    def __enter__(self) -> Self:
        if self.rank == 0:
            self._attempt(self._begin)
        self._agree()
        return self

    def _begin(self) -> None:
        if (backup := backup_of(self.folder)).exists() and not self.folder.exists():
            os.rename(backup, self.folder)  # an earlier commit was killed between its two renames
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise CheckpointError(f'{self.folder}: a file of this name is in the way')
        if self.folder.is_dir() and any(self.folder.iterdir()) and not (self.folder / MANIFEST).exists():
            raise CheckpointError(
                f'{self.folder}: the folder holds other files and will not be replaced by a checkpoint'
            )
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if self.temporary.exists():
            shutil.rmtree(self.temporary)
        self.temporary.mkdir()

    def add(self, prefix: str, pieces: Iterable[Piece]) -> None:
        """Writes this rank's pieces, with `prefix` ('actor/') before their names."""
        group = prefix.strip('/').replace('/', '-') or 'tensors'
        try:
            # After a failed write it still exhausts the iterator, in which other ranks may be waiting.
            for piece in pieces:
                self._attempt(functools.partial(self._add, prefix + piece.name, piece, group))
        except Exception as error:
            self.error = self.error or error
        self._attempt(lambda: self._flush(group))

    def _add(self, name: str, piece: Piece, group: str) -> None:
        if piece.data.dim() != 1 or len(piece.data) != piece.stop - piece.start:
            raise ValueError(
                f'piece {name!r} [{piece.start}, {piece.stop}) has data of shape {tuple(piece.data.shape)}'
            )
        dtype = dtype_name(piece.data.dtype)
        stored = self.manifest.tensors.setdefault(name, StoredTensor(tuple(piece.shape), dtype, []))
        if stored.shape != tuple(piece.shape) or stored.dtype != dtype:
            raise ValueError(
                f'pieces of {name!r} disagree: {stored.shape} {stored.dtype} and {tuple(piece.shape)} {dtype}'
            )
        size = piece.data.element_size()
        start = piece.start
        while start < piece.stop:
            space = (self.max_file_bytes - self._pending_bytes) // size
            if space < 1 and self._pending:
                self._flush(group)
                continue
            stop = min(piece.stop, start + max(space, 1))
            key = f'{name}[{start}:{stop}]'
            values = piece.data[start - piece.start : stop - piece.start].detach()
            self._pending[key] = values.to('cpu', copy=True).contiguous()
            self._pending_bytes += (stop - start) * size
            stored.pieces.append(StoredPiece(self._file_name(group), key, start, stop))
            start = stop

    def _file_name(self, group: str) -> str:
        return f'{group}-rank{self.rank:05d}-{self._num_files:04d}.safetensors'

    def _flush(self, group: str) -> None:
        if self._pending:
            tensors, self._pending, self._pending_bytes = self._pending, {}, 0
            name = self._file_name(group)
            self._num_files += 1
            self._put(name, functools.partial(save, tensors))

    def add_json(self, name: str, content: Any) -> None:
        """Writes rank 0's `content` as a JSON file."""
        check_file_name(name, self.folder)
        if self.rank == 0:
            self._attempt(lambda: self._put(name, json.dumps(content, indent=1).encode))

    def _put(self, name: str, data: Callable[[], bytes]) -> None:
        if self.background:
            self._files.append((name, data))
        else:
            self._write(name, data())

    def _work(self) -> None:
        while self._files:
            name, data = self._files.popleft()
            self._attempt(lambda name=name, data=data: self._write(name, data()))  # type: ignore[misc]

    @property
    def written(self) -> bool:
        """False while files are being written in the background."""
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Stops writing and removes what is not committed."""
        self._files.clear()
        if self._thread.is_alive():
            self._thread.join()
        if not self.committed:
            self._remove()

    def _write(self, name: str, data: bytes) -> None:
        with open(self.temporary / name, 'wb') as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.manifest.files[name] = StoredFile(len(data), zlib.crc32(data))

    def commit(self, meta: dict[str, Any] | None = None) -> None:
        """Merges the pieces of all ranks, writes the manifest and renames the folder to its final name."""
        if self.background:
            self._thread.join()
        parts = self._agree((self.manifest.tensors, self.manifest.files))
        if self.rank == 0:
            self._attempt(lambda: self._finish(parts, meta or {}))
        self._agree()
        self.committed = True

    def _finish(self, parts: list[tuple[dict[str, StoredTensor], dict[str, StoredFile]]], meta: dict[str, Any]) -> None:
        merged = Manifest(meta=meta)
        for tensors, files in parts:
            merged.files.update(files)
            for name, tensor in tensors.items():
                known = merged.tensors.setdefault(name, StoredTensor(tensor.shape, tensor.dtype, []))
                if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                    raise CheckpointError(f'{self.folder}: ranks disagree about the shape or dtype of {name!r}')
                known.pieces.extend(tensor.pieces)
        for tensor in merged.tensors.values():
            tensor.pieces.sort(key=lambda p: p.start)
        merged.check(self.folder)
        with open(self.temporary / MANIFEST, 'wb') as file:
            file.write(json.dumps(merged.to_json(), indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(self.temporary)
        backup = backup_of(self.folder)
        if backup.exists():
            shutil.rmtree(backup)
        if self.folder.exists():
            os.rename(self.folder, backup)  # `folder.recover` undoes this if the process is killed before the next line
        try:
            os.rename(self.temporary, self.folder)
        except OSError:
            if backup.exists():
                os.rename(backup, self.folder)
            raise
        fsync_folder(self.folder.parent)
        shutil.rmtree(backup, ignore_errors=True)

    def _attempt(self, act: Callable[[], None]) -> None:
        """Calls `act` unless this rank has failed; stores its exception."""
        if self.error is None:
            try:
                act()
            except Exception as error:
                self.error = error

    def _agree(self, payload: Any = None) -> list[Any]:
        """Returns the payloads of all ranks, or raises the failure of the first rank that has one."""
        reason = None
        if isinstance(self.error, CheckpointError):
            reason = str(self.error)
        elif isinstance(self.error, OSError):
            reason = f'{self.folder}: checkpoint not written ({self.error.strerror or self.error})'
        elif self.error is not None:
            reason = f'{self.folder}: checkpoint not written ({type(self.error).__name__}: {self.error})'
        answers = self.gather((reason, payload if reason is None else None))
        for rank, (fault, _) in enumerate(answers):
            if fault is not None:
                self._remove()
                where = f'rank {rank}: ' if len(answers) > 1 else ''
                raise CheckpointError(f'{where}{fault}{self._untouched()}') from self.error
        return [answer for _, answer in answers]

    def _untouched(self) -> str:
        if (self.folder / MANIFEST).is_file():
            return '; the earlier checkpoint there is untouched'
        return '; earlier checkpoints beside it are untouched' if list_checkpoints(self.folder.parent) else ''

    def _remove(self) -> None:
        self.committed = True
        if self.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.background and kind is None:
            self._thread.start()
        else:
            self.abandon()


def write_checkpoint(
    folder: str | os.PathLike[str],
    groups: Mapping[str, Iterable[Piece]],
    *,
    meta: dict[str, Any] | None = None,
    state: dict[str, Any] | None = None,
    rank: int = 0,
    all_gather_object: Gather = single_process,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a checkpoint of groups {prefix: pieces}, with rank 0's `state` as state.json."""
    with CheckpointWriter(
        folder, rank=rank, all_gather_object=all_gather_object, max_file_bytes=max_file_bytes
    ) as writer:
        for prefix, pieces in groups.items():
            writer.add(prefix, pieces)
        if state is not None:
            writer.add_json('state.json', state)
        writer.commit(meta)


def pieces_of(tensors: Mapping[str, Tensor]) -> Iterable[Piece]:
    """Returns whole tensors as pieces."""
    return (Piece.whole(name, tensor) for name, tensor in tensors.items() if tensor.numel())
