"""`torch.compile` for the blocks of a model in learning and scoring. Generating runs uncompiled.

The parts of a block are compiled (attention's projections, the MLP, norms), each class as one function for all layers
of all models, with dynamic shapes. The block itself stays eager, so gradient checkpointing, FSDP2's gathering and
hydra's recording work as before. Only `forward` of each part is replaced: names, weights and copies do not change.
Attention over a packed batch is not compiled, because it loops over groups in Python. `Actor.trunk` and every call with
a key/value cache run uncompiled.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from chatgpt.nn.packing import ATTENTION, packed_attention

MOST_GRAPHS = 64
"""most graphs per function, beyond which torch runs uncompiled; four models with and without gradients reach torch's
own limit of 8"""

_state = threading.local()
_compiled: dict[tuple[Any, str], Callable[..., Any]] = {}


def compile_blocks(model: nn.Module, *, backend: str = 'inductor') -> int:
    """Compiles the parts of `model`'s transformer blocks for every forward that does not generate; returns the number
    of parts. Results agree with the eager ones up to rounding. The first call of each part compiles, for seconds to
    minutes. The model may be on the meta device, or prepared by a strategy. A second call of this function changes
    nothing.

    Raises ValueError for a model without blocks, or if the C++ compiler that inductor needs is missing.
    """
    if backend == 'inductor' and not has_compiler():
        raise ValueError('compile_blocks needs a C++ compiler (g++ or clang++, or CXX) for torch.compile; leave it out')
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not blocks:
        raise ValueError(
            f'compile_blocks: {type(model).__name__} has no transformer blocks that transformers marks as such; leave '
            'it out'
        )
    # The packed attention has a graph break before and after it. What is compiled inside `not_compiled`,
    # such as a decode step, has no break.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    AttentionInterface.register(ATTENTION, _attention)
    number = 0
    for block in blocks:
        if 'forward' not in vars(block):
            block.forward = MethodType(_plain_with_cache, block)
        for part in _parts(block):
            part.forward = MethodType(_forward_of(type(part).forward, backend), part)
            number += 1
    return number


def is_compiled(model: nn.Module) -> bool:
    """Returns True if `compile_blocks` has compiled parts of the model."""
    return any(getattr(vars(m).get('forward'), '__func__', None) is _plain_with_cache for m in model.modules())


@contextmanager
def not_compiled() -> Iterator[None]:
    """Inside this context, on this thread, compiled parts run eagerly."""
    before = getattr(_state, 'plain', False)
    _state.plain = True
    try:
        yield
    finally:
        _state.plain = before


def _plain_with_cache(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a block: its class's own, with uncompiled parts if it is called with a cache."""
    forward = type(self).forward
    if not any(_is_cache(x) for x in (*args, *kwargs.values())):
        return forward(self, *args, **kwargs)
    with not_compiled():
        return forward(self, *args, **kwargs)


def _is_cache(value: Any) -> bool:
    return hasattr(value, 'get_seq_length') or hasattr(value, 'update') and not isinstance(value, dict)


def _forward_of(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Returns a class's forward, compiled except inside `not_compiled`; one function for all objects of the class."""
    key = (forward, backend)
    if key not in _compiled:
        graph = torch.compile(forward, dynamic=True, backend=backend)

        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (forward if getattr(_state, 'plain', False) else graph)(self, *args, **kwargs)

        _compiled[key] = run
    return _compiled[key]


def _parts(block: nn.Module) -> list[nn.Module]:
    """Returns the submodules of a block that run several kernels: no torch modules or linear layers, and none with a
    replaced forward."""
    return [
        part
        for child in block.children()
        for part in (child if isinstance(child, nn.ModuleList) else [child])  # T5 has a block's parts in a list
        if 'forward' not in vars(part)
        and not type(part).__module__.startswith('torch.')
        and not isinstance(part, nn.Linear)
        and any(True for _ in part.parameters())
    ]


_uncompiled_attention = torch.compiler.disable(packed_attention)


def _attention(*args: Any, **kwargs: Any) -> Any:
    return (packed_attention if getattr(_state, 'plain', False) else _uncompiled_attention)(*args, **kwargs)


def has_compiler() -> bool:
    """Returns True if there is a C++ compiler for inductor."""
    return any(shutil.which(name) for name in (os.environ.get('CXX', ''), 'c++', 'g++', 'clang++') if name)
