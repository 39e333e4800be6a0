"""Dropout off: with gradient checkpointing still on, or in eval mode for a while.

`eval()` alone would also switch gradient checkpointing off, because transformers' layers checkpoint only while
training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def dropout_off(module: nn.Module) -> None:
    """Put `module` in eval mode, but leave layers that checkpoint in train mode with every dropout probability of
    theirs at 0."""
    module.eval()
    for layer in module.modules():
        if getattr(layer, 'gradient_checkpointing', False):
            layer.training = True
            for name, value in vars(layer).items():
                # Layers such as OPT's call F.dropout with their own float attribute and their own training flag.
                if 'dropout' in name and isinstance(value, float):
                    setattr(layer, name, 0.0)


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Eval mode inside; every submodule's own training flag restored after."""
    flags = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, flag in flags.items():
            m.training = flag
