"""Compute dtypes, dynamic loss scaling, and copies of a module in the compute dtype.

Left out: autocast itself (torch's) and where it is entered (the trainer, through `Strategy.autocast`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from chatgpt.nn.settings import plain_settings

Precision = Literal['fp32', 'bf16', 'fp16']
DTYPES: dict[str, torch.dtype] = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


def check_precision(precision: str) -> torch.dtype:
    """The compute dtype of a precision; ValueError for an unknown one."""
    if precision not in DTYPES:
        raise ValueError(f'precision={precision!r} is not one of {", ".join(map(repr, get_args(Precision)))}')
    return DTYPES[precision]


class LossScaler:
    """Dynamic loss scaling for fp16 on any device (Micikevicius et al. 2018, section 3.2; constants as in torch.amp).

    The loss is multiplied by `scale`; gradients are divided by it before use. A non-finite norm halves the scale, 2000
    finite ones in a row double it.
    """

    def __init__(self, scale: float = 65536.0, *, growth_interval: int = 2000) -> None:
        self.scale, self.growth_interval, self.num_finite = scale, growth_interval, 0

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide gradients by the scale, in place. The scale is a power of two, so this is exact."""
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def update(self, finite: bool) -> None:
        if not finite:
            self.scale, self.num_finite = max(self.scale / 2, 1.0), 0
            return
        self.num_finite += 1
        if self.num_finite == self.growth_interval:
            self.scale, self.num_finite = self.scale * 2, 0

    def to_json(self) -> dict[str, float]:
        return {'scale': self.scale, 'num_finite': self.num_finite}

    def from_json(self, state: dict[str, Any]) -> None:
        self.scale, self.num_finite = float(state['scale']), int(state['num_finite'])


@contextmanager
def lora_merged(module: nn.Module) -> Iterator[None]:
    """Adapters folded into the weights inside; the weights' exact bits restored after. Nothing happens without
    adapters, and with weights that other models share."""
    from chatgpt.nn import lora

    with lora.merged(module) if lora.can_fold(module) else nullcontext():
        yield


def cast_copy(module: nn.Module, dtype: torch.dtype, into: nn.Module | None = None) -> nn.Module:
    """A deep copy with floating parameters in `dtype` and LoRA folded in, made without a copy in fp32 on the way.

    into: an earlier copy of this module in this dtype (`KeptCopy`), which takes the numbers in the memory that it has.

    Weights are folded in fp32 and rounded once; the copy's own adapters are zero, so it computes, saves and folds as it
    stands. What a shared trunk holds is not copied, and its adapters are cast beside it. Buffers keep their dtype:
    rotary frequencies and the like lose their meaning in 16 bits.
    """
    from chatgpt.nn import lora
    from chatgpt.nn.quantized import NF4Linear

    memo: dict[int, Any] = {}
    names = {} if into is None else {parameter: name for name, parameter in module.named_parameters()}
    with lora_merged(module):
        for part in module.modules():
            if isinstance(part, NF4Linear):
                memo[id(part)] = part
        for parameter in module.parameters():
            if lora.is_shared(parameter):
                memo[id(parameter)] = parameter
                continue
            data = parameter.detach()
            if into is not None:
                into.get_parameter(names[parameter]).data.copy_(data)
                continue
            data = data.to(dtype, copy=True) if data.is_floating_point() else data.clone()
            memo[id(parameter)] = nn.Parameter(data, requires_grad=False)
        copied = copy.deepcopy(module, memo) if into is None else into
        if into is not None:
            for buffer, own in zip(into.buffers(), module.buffers(), strict=True):
                if buffer is not own:
                    buffer.copy_(own)
    for layer in lora.lora_layers(copied).values():
        if layer.shares_base:
            continue
        layer.saved = None  # the base weights, which the copy would keep alive in fp32
        layer.merged = False
        layer.lora_B.zero_()
    return copied


class KeptCopy:
    """The copy of a module in the compute dtype that generation will want again, with its memory."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, copied: nn.Module) -> None:
        self.of, self.dtype, self.copied = weakref.ref(module), dtype, copied
        self.settings, self.device = plain_settings(module), next(module.parameters()).device

    def fits(self, module: nn.Module, dtype: torch.dtype) -> bool:
        """Whether a new copy of `module` would differ in the numbers of its tensors only."""
        if self.of() is not module or self.dtype != dtype or self.device != next(module.parameters()).device:
            return False

        def form(of: nn.Module) -> list[Any]:
            return [(name, t.shape) for name, t in (*of.named_parameters(), *of.named_buffers())]

        return self.settings == plain_settings(module) and form(module) == form(self.copied)
