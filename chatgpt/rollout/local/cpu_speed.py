"""Faster decoding on a CPU, with weights packed for oneDNN.

A decode step multiplies a few rows by every weight matrix, and a plain call rearranges the matrix each time. The
weights do not change while responses are generated, so they are packed once. Only `nn.Linear` and `Conv1D` (also with a
merged LoRA adapter), no subclasses, in fp32 on CPU are replaced, inside the context and without autograd. Results
differ from the plain modules' by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from chatgpt.nn.lora import LoRAConv1D, LoRALinear

# a packed copy is as large as the weights, so larger models are not packed
MAX_PACKED_BYTES = 2 << 30

LEAST_PACKED = 1 << 17
"""smallest number of elements of a packed `nn.Linear`: a packed product has an overhead of ten microseconds, too much
for small matrices; `Conv1D` is always packed, because its plain product is slower"""


def _pack(module: Any) -> Tensor:
    """Returns the module's weight in oneDNN's layout. nn.Linear stores (out, in), Conv1D (in, out)."""
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
    """Returns True if the module computes x W + b with the stored weight."""
    return module.merged if isinstance(module, (LoRALinear, LoRAConv1D)) else True


def _stamp(module: Any) -> tuple[Any, ...]:
    """Returns a key that changes when a parameter is modified or replaced, or an adapter is merged or unmerged."""
    bias = (0, 0) if module.bias is None else (module.bias.data_ptr(), module.bias._version)
    return (_is_plain(module), module.weight.data_ptr(), module.weight._version, *bias)


class PackedModules:
    """The replaceable modules of a model, packed at the first use and again when their weights have changed."""

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
        if any(getattr(module, 'is_streamed', False) for module in model.modules()):  # weights are not kept in memory
            return
        for module in model.modules():
            if 'forward' in vars(module):  # already wrapped
                continue
            weight: Any = getattr(module, 'weight', None)
            if type(module) not in (nn.Linear, Conv1D, LoRALinear, LoRAConv1D):
                continue
            if isinstance(module, nn.Linear) and weight.numel() < LEAST_PACKED:
                continue
            # tensors created in inference mode have no version counter, so changes would go unnoticed
            if type(weight) is nn.Parameter and not weight.is_inference():
                self.modules.append(module)
                size += weight.numel() * 4
        if size > MAX_PACKED_BYTES or not self._works():
            self.modules = []

    def _works(self) -> bool:
        """Returns True if torch's internal oneDNN operators exist and compute the expected result."""
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
            # not in inference mode, because the copies are used after it ends
            with torch.inference_mode(False), torch.no_grad():
                self._forwards = [_packed_forward(_pack(m), m.bias) if _is_plain(m) else None for m in self.modules]
            self._stamps = stamps

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the modules use packed weights. Requires grad mode off, and no other thread may run the same
        model."""
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
