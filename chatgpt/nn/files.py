"""Weights on disk with the rights of any other file, and heads beside a model.

safetensors writes a temporary file of its own and renames it, and only its owner may read that. Left out: checkpoints,
which `chatgpt.checkpoint` writes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

HEAD_FILE = 'value_head.safetensors'
Q_HEADS_FILE = 'ilql_heads.safetensors'


def share_by_umask(folder: str | os.PathLike[str], pattern: str = '*.safetensors') -> None:
    """Give the files of `folder` that match the rights that a new file gets there."""
    probe = Path(folder, f'.rights-{os.getpid()}')
    handle = os.open(probe, os.O_CREAT | os.O_WRONLY, 0o666)
    mode = os.fstat(handle).st_mode & 0o777
    os.close(handle)
    probe.unlink()
    for path in Path(folder).glob(pattern):
        path.chmod(mode)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file of copies on the CPU."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    share_by_umask(path.parent, path.name)


def remove_heads(folder: str | os.PathLike[str]) -> None:
    """Remove the heads of a model that was saved there before, which would be read as those of the one that took its
    place."""
    for name in (HEAD_FILE, Q_HEADS_FILE):
        Path(folder, name).unlink(missing_ok=True)
