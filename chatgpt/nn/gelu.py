"""transformers' `NewGELUActivation` (GPT-2's) on a CPU in blocks that stay in the cache, with the same bits.

The plain module is eight passes over a tensor that is too large for the cache, and its backward ten more; that is a fifth of an update.
Element by element the same operations in the same order give the same result, forward and backward, so nothing changes but the time.
In 16 bits on a CPU it is torch's own tanh-GELU, which rounds once instead of eight times.

Left out: every other activation, and other devices, where the plain module runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

_BLOCK = 1 << 16  # elements: 256 KiB in fp32, so that the operands of a step stay in a core's own cache
_SCALE = math.sqrt(2.0 / math.pi)


class _NewGELU(torch.autograd.Function):
    """y = 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))) (Hendrycks & Gimpel 2016), in the plain module's order of operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        keep = ctx.needs_input_grad[0]
        tanh = torch.empty_like(x) if keep else x.new_empty(min(_BLOCK, x.numel()))
        half = x.new_empty(min(_BLOCK, x.numel()))
        for start in range(0, x.numel(), _BLOCK):
            xs, ys = x.view(-1)[start : start + _BLOCK], y.view(-1)[start : start + _BLOCK]
            ts = tanh.view(-1)[start : start + _BLOCK] if keep else tanh[: len(xs)]
            torch.pow(xs, 3.0, out=ts).mul_(0.044715)
            torch.add(xs, ts, out=ts).mul_(_SCALE).tanh_()
            torch.add(ts, 1.0, out=ys).mul_(torch.mul(xs, 0.5, out=half[: len(xs)]))
        if keep:
            ctx.save_for_backward(x, tanh)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, tanh = ctx.saved_tensors
        grad = grad.contiguous()
        out = torch.empty_like(x)
        first, second = x.new_empty(2, min(_BLOCK, x.numel()))
        for xs, ts, gs, os in zip(*(t.view(-1).split(_BLOCK) for t in (x, tanh, grad, out)), strict=True):
            a, b = first[: len(xs)], second[: len(xs)]
            torch.mul(xs, 0.5, out=a).mul_(gs)
            torch.ops.aten.tanh_backward.grad_input(a, ts, grad_input=os).mul_(_SCALE)  # so far that of x + 0.044715 x³
            torch.pow(xs, 2.0, out=a).mul_(3.0)
            os.add_(torch.mul(os, 0.044715, out=b).mul_(a))
            os.add_(torch.add(ts, 1.0, out=b).mul_(gs).mul_(0.5))
        return out


class BlockwiseNewGELU(NewGELUActivation):
    """Drop-in for the plain module."""

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != 'cpu' or torch.compiler.is_compiling():
            return super().forward(input)
        if input.dtype in (torch.bfloat16, torch.float16):
            return F.gelu(input, approximate='tanh')
        if input.numel() < _BLOCK:  # fits the cache as it is
            return super().forward(input)
        return _NewGELU.apply(input)


def use_blockwise_gelu(model: nn.Module) -> None:
    """Put `BlockwiseNewGELU` in place of every plain `NewGELUActivation` of the model."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, BlockwiseNewGELU())
