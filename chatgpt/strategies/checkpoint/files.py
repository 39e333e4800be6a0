"""Single files: written atomically, and read without executing their content."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, BinaryIO, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from chatgpt.strategies.checkpoint.layout import CheckpointError


def fsync_folder(folder: Path) -> None:
    """Makes renames and new names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Writes a file under a temporary name, fsyncs it, and renames it to `path`. A failure leaves `path` unchanged."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        with open(temporary, 'wb') as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            write(file)
        with open(temporary, 'rb') as file:  # safetensors replaces the file with one that only its owner may read
            os.chmod(temporary, mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise CheckpointError(
            f'{path}: could not be written ({reason}); the file there, if any, is unchanged'
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


class _Counted(io.RawIOBase):
    """A file that keeps the first OSError of a write, which torch.save replaces by another message."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def save_object(content: Any, path: str | os.PathLike[str]) -> None:
    """Writes `content`, plain containers, numbers, strings and tensors, with `torch.save`, atomically."""

    def write(file: BinaryIO) -> None:
        counted = _Counted(file)
        try:
            torch.save(content, cast(IO[bytes], counted))
        except (RuntimeError, OSError):
            if counted.error is not None:
                raise counted.error from None
            raise

    write_atomically(path, write)


def save_tensors(tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Writes a dict of tensors for `torch.load(path, weights_only=True)`, or safetensors if `path` has that suffix.

    Safetensors files hold each tensor once: further names of tied weights are not written, as in transformers.
    """
    if str(path).endswith('.safetensors'):
        from safetensors.torch import save_file

        seen: set[tuple[int, int]] = set()
        unique = {}
        for name, tensor in tensors.items():
            key = (tensor.data_ptr(), tensor.numel())
            if tensor.numel() and key in seen:
                continue
            seen.add(key)
            unique[name] = tensor.contiguous()
        write_atomically(path, lambda file: save_file(unique, file.name, metadata={'format': 'pt'}))
    else:
        save_object(dict(tensors), path)


def load_object(path: str | os.PathLike[str], *, mmap: bool = True) -> Any:
    """Loads a file to the CPU with `torch.load(weights_only=True)`. `CheckpointError` if it holds more than data."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f'{path}: no such file')
    try:
        return torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)
    except Exception as error:
        if mmap and 'mmap' in str(error):  # files of torch < 1.6 cannot be mapped
            return load_object(path, mmap=False)
        if isinstance(error, UnpicklingError) and ('nsupported' in str(error) or 'GLOBAL' in str(error)):
            raise CheckpointError(
                f'{path}: a pickle that holds more than tensors; reading it could run code, so it is not read. If you '
                'trust who made it, convert it where code may run: load it with plain torch, then '
                "safetensors.torch.save_file(state_dict, 'weights.safetensors')"
            ) from None
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f'{path}: not a file of plain tensors, or damaged ({first})') from error


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Loads the named tensors of a file written by `save_tensors`, torch or safetensors, memory-mapped if possible."""
    if str(path).endswith('.safetensors'):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not Path(path).is_file():
            raise FileNotFoundError(f'{path}: no such file')
        try:
            return load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f'{path}: not a safetensors file, or damaged ({error})') from error
    content = load_object(path)
    if not isinstance(content, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items()
    ):
        raise CheckpointError(f'{path}: expected a dict from names to tensors')
    return content
