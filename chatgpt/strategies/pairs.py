"""The items of `Strategy.prepare`: which are accepted, what is remembered of a trained pair, and their files."""

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
    fed: bool = False
    """there was a backward for this optimizer since its last round: another optimizer of the same model has none"""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's parameters under the names they have in `user_model`."""
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            yield from zip(names, group['params'], strict=True)

    def parameters(self) -> list[Tensor]:
        return [parameter for _, parameter in self.named_parameters()]


def is_pair(item: Any) -> bool:
    """(model, optimizer), as a tuple or a list."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    return isinstance(item[0], nn.Module) and isinstance(item[1], Optimizer)


def check_items(items: Iterable[Any], pairs: list[tuple[nn.Module, Optimizer]]) -> None:
    """Refuse what cannot be prepared before anything is touched; collect the pairs."""
    for item in items:
        if is_pair(item):
            pairs.append((item[0], item[1]))
        elif isinstance(item, Optimizer):
            raise ValueError('prepare: an optimizer came without its model; give them as a pair (model, optimizer)')
        elif isinstance(item, (tuple, list)):
            weighted = len(item) == 2 and isinstance(item[0], (int, float)) and callable(item[1])  # a reward's weight
            check_items(item[1:] if weighted else item, pairs)
        elif not (item is None or callable(item)):
            raise ValueError(
                f'prepare: cannot prepare a {type(item).__name__}; give modules, (model, optimizer) pairs, functions, '
                'None, or lists and tuples of them'
            )


def rebuilt(original: Any, parts: list[Any]) -> Any:
    """`parts` in the kind of sequence that `original` is (tuple, list, named tuple)."""
    return type(original)(*parts) if hasattr(original, '_fields') else type(original)(parts)


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
