"""The blocks of a model compiled by torch (`torch.compile`) for learning and scoring; generating stays as it is.

The parts of a block are compiled (attention's projections, the MLP, norms), each kind as one function for all layers of
all models, with symbols for sizes. The block stays ordinary code, and with it gradient checkpointing, FSDP2's gathering
and hydra's recording. Only `forward` of a part's object changes, so names, weights and copies are as before. Attention
over a packed batch is left out: its work list is Python. What generates runs uncompiled: `Actor.trunk`, and every call
with a key/value cache.
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
"""of one function, where torch's own bound of 8 is reached by four models with and without gradients; beyond it torch
runs uncompiled"""

_state = threading.local()
_compiled: dict[tuple[Any, str], Callable[..., Any]] = {}


def compile_blocks(model: nn.Module, *, backend: str = 'inductor') -> int:
    """Let the parts of `model`'s transformer blocks run compiled in every forward that does not generate; returns their
    number. Numbers agree with the plain ones up to rounding. The first call of each kind compiles, for seconds to
    minutes. The model may be on the meta device, or prepared by a strategy. A second call changes nothing.

    Raises ValueError for a model without blocks, and without a C++ compiler, which inductor needs.
    """
    if backend == 'inductor' and not has_compiler():
        raise ValueError('compile_blocks needs a C++ compiler (g++ or clang++, or CXX) for torch.compile; leave it out')
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not blocks:
        raise ValueError(
            f'compile_blocks: {type(model).__name__} has no transformer blocks that transformers marks as such; leave '
            'it out'
        )
    _leave_attention_out()
    number = 0
    for block in blocks:
        if 'forward' not in vars(block):
            block.forward = MethodType(_plain_with_cache, block)
        for part in _parts(block):
            part.forward = MethodType(_forward_of(type(part).forward, backend), part)
            number += 1
    return number


def is_compiled(model: nn.Module) -> bool:
    """Whether `compile_blocks` was here."""
    return any(getattr(vars(m).get('forward'), '__func__', None) is _plain_with_cache for m in model.modules())


@contextmanager
def not_compiled() -> Iterator[None]:
    """Inside, on this thread, compiled parts run as ordinary code."""
    before = getattr(_state, 'plain', False)
    _state.plain = True
    try:
        yield
    finally:
        _state.plain = before


def _plain_with_cache(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A block's forward: the class's own, and uncompiled below where it is called with a cache."""
    forward = type(self).forward
    if not any(_is_cache(x) for x in (*args, *kwargs.values())):
        return forward(self, *args, **kwargs)
    with not_compiled():
        return forward(self, *args, **kwargs)


def _is_cache(value: Any) -> bool:
    return hasattr(value, 'get_seq_length') or hasattr(value, 'update') and not isinstance(value, dict)


def _forward_of(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A class's forward, compiled but inside `not_compiled`; one function for all objects of the class."""
    key = (forward, backend)
    if key not in _compiled:
        graph = torch.compile(forward, dynamic=True, backend=backend)

        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (forward if getattr(_state, 'plain', False) else graph)(self, *args, **kwargs)

        _compiled[key] = run
    return _compiled[key]


def _parts(block: nn.Module) -> list[nn.Module]:
    """The members of a block that are made of several kernels: not what torch or a linear layer does in one, nor
    what has been changed before."""
    return [
        part
        for child in block.children()
        for part in (child if isinstance(child, nn.ModuleList) else [child])  # T5 lists a block's parts
        if 'forward' not in vars(part)
        and not type(part).__module__.startswith('torch.')
        and not isinstance(part, nn.Linear)
        and any(True for _ in part.parameters())
    ]


def _leave_attention_out() -> None:
    """Register the packed attention so that graphs of parts end before it and begin again after it. What is compiled
    inside `not_compiled`, such as a decode step, goes through."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    AttentionInterface.register(ATTENTION, _attention)


_left_out = torch.compiler.disable(packed_attention)


def _attention(*args: Any, **kwargs: Any) -> Any:
    return (packed_attention if getattr(_state, 'plain', False) else _left_out)(*args, **kwargs)


def has_compiler() -> bool:
    """Whether there is a C++ compiler for inductor."""
    return any(shutil.which(name) for name in (os.environ.get('CXX', ''), 'c++', 'g++', 'clang++') if name)
