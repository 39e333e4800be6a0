"""Linear layers whose frozen weight lies in 4 bits: NF4 with doubly quantized scales, 4.13 bits a weight.

Source: Dettmers et al. 2023, "QLoRA", section 3: blocks of 64 weights share a scale, blocks of 256 scales another. The
kernels are bitsandbytes', on CUDA and on a CPU. Backward computes the dense weight anew, so a graph holds no dense
weights. Left out: training such a weight (adapters do, `chatgpt.nn.lora`), and embeddings and heads, which stay dense.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

BLOCK, SCALE_BLOCK = 64, 256


def check_bitsandbytes(what: str) -> None:
    """Raises ValueError where the package is missing that `what` needs."""
    try:
        found = find_spec('bitsandbytes') is not None
    except ValueError:  # put out of the way on purpose
        found = False
    if not found:
        raise ValueError(f"{what} needs bitsandbytes, which is not installed: pip install 'chatgpt-rlhf[nf4]'")


def _bnb() -> Any:
    logger = logging.getLogger(
        'bitsandbytes.backends.cpu.ops'
    )  # misses an optional kernel, which it says at each start
    try:
        level = logger.level
        logger.setLevel(logging.ERROR)
        import bitsandbytes

        logger.setLevel(level)
    except ImportError as error:
        raise ImportError("quantize='nf4' needs bitsandbytes: pip install 'chatgpt-rlhf[nf4]'") from error
    return bitsandbytes


class NF4Linear(nn.Module):
    """y = x W^T + b with W (out, in) in 4 bits. Input (..., in) of fp32, bf16 or fp16; output of the same dtype.

    Its tensors are no part of `state_dict`: they follow from the dense weight, and nothing trains them.

    Args:
        layer: whose weight is taken; a `Conv1D`'s is transposed.
        dtype: of the bias, and of the weight made dense again.
        device: where it goes; None: where the layer is, which stays as it is.
    """

    packed: Tensor
    """(out · in / 2, 1) uint8: two weights a byte"""
    scales: Tensor
    """(out · in / 64,) uint8, themselves quantized"""
    scale_scales: Tensor
    """fp32, one for 256 scales"""
    scale_mean: Tensor
    """() fp32"""
    bias: Tensor | None

    def __init__(
        self,
        layer: nn.Linear | Conv1D,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.is_transposed = isinstance(layer, Conv1D)
        weight = layer.weight.detach().to(device)
        weight = (weight.T if self.is_transposed else weight).contiguous()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        packed, state = _bnb().functional.quantize_4bit(
            weight.to(dtype), blocksize=BLOCK, compress_statistics=True, quant_type='nf4'
        )
        tensors = {
            'packed': packed,
            'scales': state.absmax,
            'scale_scales': state.state2.absmax,
            'scale_mean': state.offset,
            'code': state.code,
            'scale_code': state.state2.code,
            'bias': None if layer.bias is None else layer.bias.detach().to(device, dtype, copy=True),
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def _state(self) -> Any:
        state = _bnb().functional.QuantState
        nested = state(absmax=self.scale_scales, blocksize=SCALE_BLOCK, code=self.scale_code, dtype=torch.float32)
        return state(
            absmax=self.scales,
            shape=torch.Size((self.out_features, self.in_features)),
            dtype=self.dtype,
            blocksize=BLOCK,
            code=self.code,
            quant_type='nf4',
            offset=self.scale_mean,
            state2=nested,
        )

    def dense(self) -> Tensor:
        """The weight as it computes, in the layout of the layer it came from."""
        weight: Tensor = _bnb().functional.dequantize_4bit(self.packed, self._state())
        return weight.T.contiguous() if self.is_transposed else weight

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y: Tensor = _bnb().matmul_4bit(x, self.packed, quant_state=self._state(), bias=bias)
        return y

    def extra_repr(self) -> str:
        return f'in_features={self.in_features}, out_features={self.out_features}, nf4'


def quantize_blocks(
    module: nn.Module,
    name: str = '',
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
) -> None:
    """Replace the linear layers inside the transformer blocks (below an `nn.ModuleList`) of `module`, in place.

    name: that of `module` in its model, where it is itself inside a block. device: where weights are packed, one after
    another, so that one dense weight is there at a time; None: where they are.
    """
    inside = bool(name)
    for child_name, child in module.named_children():
        if inside and type(child) in (nn.Linear, Conv1D):
            weight: Tensor = child.weight  # type: ignore[assignment]
            if weight.numel() % BLOCK == 0:
                module._modules[child_name] = NF4Linear(child, dtype, device)  # type: ignore[arg-type]
        else:
            inner = name or (child_name if isinstance(module, nn.ModuleList) else '')
            quantize_blocks(child, inner, dtype, device)
