"""The items of `Strategy.prepare`: their checks, the record of a trained pair, and their saved files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.strategies.checkpoint.files import load_object, load_tensors
from chatgpt.strategies.checkpoint.layout import CheckpointMismatch, DictReader, TensorReader
from chatgpt.strategies.checkpoint.reader import CheckpointReader
from chatgpt.strategies.precision import LossScaler
from chatgpt.strategies.sums import TreeSum


@dataclass(eq=False)
class Trained:
    """A prepared (model, optimizer) pair."""

    user_model: nn.Module
    """the module that the user built"""
    model: nn.Module
    """the module that `prepare` returned for it"""
    optimizer: Optimizer
    """the optimizer that `prepare` returned"""
    names: list[list[str]]
    """parameter names as in `user_model`, for each parameter group, in the group's order"""
    scaler: LossScaler | None = None
    tree: TreeSum | None = None
    """partial sums of gradients, in an exact run"""
    ran_backward: bool = False
    """there was a backward for this optimizer since its last round; other optimizers may train the same model"""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the optimizer's parameters with their names in `user_model`."""
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            yield from zip(names, group['params'], strict=True)

    def parameters(self) -> list[Tensor]:
        return [parameter for _, parameter in self.named_parameters()]


def is_pair(item: Any) -> bool:
    """Returns True for (model, optimizer), a tuple or a list."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    return isinstance(item[0], nn.Module) and isinstance(item[1], Optimizer)


def check_items(items: Iterable[Any], pairs: list[tuple[nn.Module, Optimizer]]) -> None:
    """Appends the pairs among `items` to `pairs`. ValueError for an item that cannot be prepared."""
    for item in items:
        if is_pair(item):
            pairs.append((item[0], item[1]))
        elif isinstance(item, Optimizer):
            raise ValueError('prepare: an optimizer came without its model; give them as a pair (model, optimizer)')
        elif isinstance(item, (tuple, list)):
            weighted = len(item) == 2 and isinstance(item[0], (int, float)) and _is_ready(item[1])  # a reward's weight
            check_items(item[1:] if weighted else item, pairs)
        elif not (item is None or _is_ready(item)):
            raise ValueError(
                f'prepare: cannot prepare a {type(item).__name__}; give modules, (model, optimizer) pairs, functions, '
                'None, or lists and tuples of them'
            )


def _is_ready(item: Any) -> bool:
    """Returns True for a function, a module and an object that scores."""
    return callable(item) or callable(getattr(item, 'score', None))


def rebuilt(original: Any, parts: list[Any]) -> Any:
    """Returns `parts` as a sequence of the type of `original` (tuple, list, named tuple)."""
    return type(original)(*parts) if hasattr(original, '_fields') else type(original)(parts)


def open_saved(path: str | os.PathLike[str], kind: str) -> tuple[TensorReader, dict[str, Any]]:
    """Opens a file or folder of `save_model` (kind 'model') or `save_optimizer` (kind 'optimizer'): tensors and meta.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointError: if it is damaged.
        CheckpointMismatch: if it is of the other kind.
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


def check_max_norm(max_norm: float | None) -> None:
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f'max_norm={max_norm} must be positive; None turns clipping off')
