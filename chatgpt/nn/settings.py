"""What a module computes with beside the numbers of its tensors: plain settings, and where its tensors lie.

Whoever keeps something made from a module (a copy in another dtype, a captured CUDA graph) compares these before using
it again: adapters switched off, a changed factor or a tensor in other memory make it another computation.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))
_OF_CALLING = {'training'}


def plain_settings(module: nn.Module) -> tuple[Any, ...]:
    """Of every submodule its class and its attributes that are numbers, strings or lists of these; `training` is left
    out."""
    found: list[Any] = []
    for part in module.modules():
        found.append(type(part))
        for name, value in vars(part).items():
            if name in _OF_CALLING:
                continue
            if isinstance(value, _PLAIN):
                found.append((name, value))
            elif isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value):
                found.append((name, tuple(value)))
    return tuple(found)


def addresses(module: nn.Module) -> tuple[Any, ...]:
    """Name, address, shape and dtype of every parameter and buffer."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return tuple((name, t.data_ptr(), tuple(t.shape), t.dtype) for name, t in tensors)
