"""What `Strategy.prepare` accepts, and exceptions that cross ranks. Left out: doing anything with them."""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from chatgpt.checkpoint.layout import CheckpointError, CheckpointMismatch


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


def same_kind(kind: str, message: str) -> Exception:
    """Rank 0's exception on another rank: of the same class where it is a builtin or ours."""
    ours: dict[str, type[Exception]] = {'CheckpointError': CheckpointError, 'CheckpointMismatch': CheckpointMismatch}
    found = ours.get(kind) or getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(message)
        except TypeError:  # UnicodeDecodeError and the like want more than a message
            pass
    return RuntimeError(f'rank 0: {kind}: {message}')
