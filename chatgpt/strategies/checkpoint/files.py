"""Single files, written whole or not at all, and read without running anything that is in them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from chatgpt.strategies.checkpoint.layout import CheckpointError


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a file under a temporary name, fsync it, and rename it to `path`. On failure the file at `path` is as
    before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        with open(temporary, 'wb') as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            write(file)
        with open(temporary, 'rb') as file:  # safetensors has put another file there, which only its owner may read
            os.chmod(temporary, mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(
            f'{path}: could not be written ({reason}); the file there, if any, is unchanged'
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


class _Counted(io.RawIOBase):
    """Passes writes on and keeps the first OSError, which torch.save would turn into a message of its own."""

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
    """`torch.save`, atomically. Give it only plain containers, numbers, strings and tensors: `load_object` reads
    nothing else."""

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
    """A plain dict of tensors that `torch.load(path, weights_only=True)` reads, or safetensors when the path ends so.

    Safetensors holds each tensor once: a second name of the same storage (tied weights) is left out, as transformers
    does.
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
    """`torch.load(weights_only=True)` onto the CPU. A file that holds anything but data is refused by name and runs
    nothing."""
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
    """The named tensors of a file that `save_tensors` (or plain torch, or safetensors) wrote, mapped where possible."""
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
