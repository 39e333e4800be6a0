"""What a strategy remembers of a trained pair, and files of one model or one optimizer as tensors to read.

Left out: training checkpoints as a whole, which are the trainer's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.checkpoint.files import load_object, load_tensors
from chatgpt.checkpoint.layout import CheckpointMismatch, DictReader, TensorReader
from chatgpt.checkpoint.reader import CheckpointReader
from chatgpt.trainer.strategies.exact import TreeSum
from chatgpt.trainer.strategies.precision import LossScaler


@dataclass(eq=False)
class Trained:
    """A prepared (model, optimizer) pair."""

    user_model: nn.Module
    """the module the user built"""
    model: nn.Module
    """what `prepare` returned for it"""
    optimizer: Optimizer
    """what `prepare` returned for the optimizer"""
    names: list[list[str]]
    """parameter names as in `user_model`, for each parameter group, in the group's order"""
    scaler: LossScaler | None = None
    tree: TreeSum | None = None
    """of gradients, where their sum has one order"""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's parameters under the names they have in `user_model`."""
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            yield from zip(names, group['params'], strict=True)


def open_saved(path: str | os.PathLike[str], kind: str) -> tuple[TensorReader, dict[str, Any]]:
    """Tensors and meta of what `save_model` (kind 'model') or `save_optimizer` (kind 'optimizer') wrote, file or
    folder.

    Raises FileNotFoundError, `CheckpointError` for a damaged file, `CheckpointMismatch` for one of the other kind.
    """
    if Path(path).is_dir():
        reader = CheckpointReader(path)
        if reader.meta.get('kind') != kind:
            found = reader.meta.get('kind') or 'something else'
            raise CheckpointMismatch(f'{path}: expected a saved {kind}, but it holds {found}')
        return reader, reader.meta
    if kind == 'model':
        return DictReader(load_tensors(path)), {}
    content = load_object(path)
    if not isinstance(content, dict) or set(content) != {'meta', 'state'}:
        raise CheckpointMismatch(f'{path}: expected a saved optimizer, but it was not written by save_optimizer')
    return DictReader(content['state']), content['meta']
