"""Dropout off: with gradient checkpointing still on, or in eval mode for a while.

`eval()` alone would also switch gradient checkpointing off, because transformers' layers checkpoint only while
training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def dropout_off(module: nn.Module) -> None:
    """Put `module` in eval mode, but leave what checkpoints in train mode, without any dropout.

    A layer that checkpoints itself looks at its training flag before its forward, which then runs with the flag off,
    wherever the probabilities come from. A model that checkpoints in its own forward gets probabilities of 0.
    """
    module.eval()
    for part in module.modules():
        if not getattr(part, 'gradient_checkpointing', False):
            continue
        part.training = True
        if isinstance(part, GradientCheckpointingLayer):
            own: Any = part._gradient_checkpointing_func
            if not isinstance(own, _FlagOff):
                part._gradient_checkpointing_func = _FlagOff(part, own)  # type: ignore[assignment]
            continue
        for name, value in vars(part).items():
            if 'drop' in name and isinstance(value, float):  # of F.dropout, and of whole layers
                setattr(part, name, 0.0)


def layer_drop_off(module: nn.Module) -> bool:
    """Leave no block out in training (LayerDrop, Fan et al. 2019). Whether one could have been."""
    drops = [part for part in module.modules() if getattr(part, 'layerdrop', 0.0) > 0.0]
    for part in drops:
        part.layerdrop = 0.0  # type: ignore[assignment]
    return bool(drops)


class _FlagOff:
    """A layer's checkpointing whose forward, and its repetition in the backward pass, see the training flag off."""

    def __init__(self, layer: nn.Module, checkpoint: Callable[..., Any]) -> None:
        self.layer, self.checkpoint = layer, checkpoint

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        return self.checkpoint(partial(self._run, run), *args)

    def _run(self, run: Callable[..., Any], *args: Any) -> Any:
        flag, self.layer.training = self.layer.training, False
        try:
            return run(*args)
        finally:
            self.layer.training = flag


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
