"""Faster decoding on CPU: the same modules, with their weights packed for oneDNN.

A decode step multiplies a few rows by every weight matrix, and a plain call rearranges the matrix each time. The
weights stand still while responses are generated, so they are packed once. Only exact `nn.Linear` and `Conv1D` (also
with a merged LoRA adapter) modules in fp32 on CPU are replaced, only inside the context and only without autograd; the
results differ from the plain modules' by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from chatgpt.nn.lora import LoRAConv1D, LoRALinear

# a packed copy is as large as the weights, so a large model keeps to the plain ones
MAX_PACKED_BYTES = 2 << 30

LEAST_PACKED = 1 << 17
"""numbers of an `nn.Linear`'s weight from which on it is packed: a packed product costs ten microseconds more to begin,
which narrow ones do not win back; `Conv1D`, whose plain product is slower, does"""


def _pack(module: Any) -> Tensor:
    """The module's weight in the layout oneDNN wants. nn.Linear keeps (out, in), Conv1D (in, out)."""
    weight = module.weight.detach()
    weight = weight if isinstance(module, nn.Linear) else weight.t().contiguous()
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def _packed_forward(packed: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    linear = torch.ops.mkldnn._linear_pointwise.default
    bias = bias.detach() if bias is not None else None

    def forward(x: Tensor) -> Tensor:
        return linear(x, packed, bias, 'none', [], '')

    return forward


def _is_plain(module: Any) -> bool:
    """Whether the module computes x W + b with the weight as it is."""
    return module.merged if isinstance(module, (LoRALinear, LoRAConv1D)) else True


def _stamp(module: Any) -> tuple[Any, ...]:
    """Changes when a parameter is written or replaced, or an adapter merged or not."""
    bias = (0, 0) if module.bias is None else (module.bias.data_ptr(), module.bias._version)
    return (_is_plain(module), module.weight.data_ptr(), module.weight._version, *bias)


class PackedModules:
    """The replaceable modules of one model, packed when first used and again when their weights have changed."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[Any] = []
        self._stamps: list[Any] = []
        self._forwards: list[Callable[[Tensor], Tensor] | None] = []
        parameters = list(model.parameters())
        if (
            any(p.device.type != 'cpu' or p.dtype != torch.float32 for p in parameters)
            or not torch.backends.mkldnn.is_available()
        ):
            return
        size = 0
        if any(getattr(module, 'is_streamed', False) for module in model.modules()):  # its weights come and go
            return
        for module in model.modules():
            if 'forward' in vars(module):  # already wrapped by somebody else
                continue
            weight: Any = getattr(module, 'weight', None)
            if type(module) not in (nn.Linear, Conv1D, LoRALinear, LoRAConv1D):
                continue
            if isinstance(module, nn.Linear) and weight.numel() < LEAST_PACKED:
                continue
            # tensors made in inference mode have no version counter, so a change of theirs would go unnoticed
            if type(weight) is nn.Parameter and not weight.is_inference():
                self.modules.append(module)
                size += weight.numel() * 4
        if size > MAX_PACKED_BYTES or not self._works():
            self.modules = []

    def _works(self) -> bool:
        """The oneDNN operators are torch's own internals: absent or different ones mean plain modules."""
        try:
            linear = nn.Linear(3, 5)
            x = torch.arange(6.0).view(2, 3)
            with torch.no_grad():
                return torch.allclose(_packed_forward(_pack(linear), linear.bias)(x), linear(x), atol=1e-4)
        except (RuntimeError, AttributeError, TypeError, NotImplementedError):
            return False

    def _refresh(self) -> None:
        stamps = [_stamp(m) for m in self.modules]
        if stamps != self._stamps:
            # packed outside of inference mode: the copies outlive it
            with torch.inference_mode(False), torch.no_grad():
                self._forwards = [_packed_forward(_pack(m), m.bias) if _is_plain(m) else None for m in self.modules]
            self._stamps = stamps

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the modules run packed. Needs grad mode off; not for use while another thread runs the same model."""
        self._refresh()
        replaced: list[Any] = []
        try:
            for module, forward in zip(self.modules, self._forwards, strict=True):
                if forward is not None:
                    module.forward = forward
                    replaced.append(module)
            yield
        finally:
            for module in replaced:
                del module.forward
