"""Linear layers whose frozen weight lies in 4 bits: NF4 with doubly quantized scales, 4.13 bits a weight.

Source: Dettmers et al. 2023, "QLoRA", section 3: blocks of 64 weights share a scale, blocks of 256 scales another. The
kernels are bitsandbytes', on CUDA and on a CPU. Backward computes the dense weight anew, so a graph holds no dense
weights. Embeddings and heads stay dense. Files in which transformers wrote such weights are read as dense ones.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, NamedTuple

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
    logger = logging.getLogger('bitsandbytes.backends.cpu.ops')  # says at each start that an optional kernel is missing
    try:
        level = logger.level
        logger.setLevel(logging.ERROR)
        import bitsandbytes

        logger.setLevel(level)
    except ImportError as error:
        raise ImportError("quantize='nf4' needs bitsandbytes: pip install 'chatgpt-rlhf[nf4]'") from error
    return bitsandbytes


class NF4Linear(nn.Module):
    """y = x W^T + b with W (out, in) in 4 bits. Input (..., in) of fp32, bf16 or fp16; output of the same dtype. Its
    tensors are no part of `state_dict`: they follow from the dense weight, and nothing trains them.

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
    inside: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
) -> None:
    """Replace the linear layers inside the transformer blocks (below an `nn.ModuleList`) of `module`, in place.

    inside: `module` is itself in a block. device: where weights are packed, one after another; None: where they are.
    """
    for name, child in module.named_children():
        if inside and isinstance(child, (nn.Linear, Conv1D)) and type(child) in (nn.Linear, Conv1D):
            if child.weight.numel() % BLOCK == 0:
                module._modules[name] = NF4Linear(child, dtype, device)
        else:
            quantize_blocks(child, inside or isinstance(module, nn.ModuleList), dtype, device)


_OF_QUANTIZED = re.compile(r'\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)$')
"""end of the names of what stands beside a packed weight"""


class Part(NamedTuple):
    """Shape and dtype of a tensor in a file, as safetensors tells them of its own."""

    shape: list[int]
    dtype: str

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


class FourBitFile:
    """An open safetensors file with weights that bitsandbytes put into 4 bits, read as a file of dense ones. Raises
    ValueError where something beside a packed weight is missing."""

    def __init__(self, handle: Any, file: Any) -> None:
        self.handle, self.file = handle, file
        self.beside: dict[str, list[str]] = {}
        for name in handle.keys():
            if found := _OF_QUANTIZED.search(name):
                self.beside.setdefault(name[: found.start()], []).append(name)

    def keys(self) -> list[str]:
        return [name for name in self.handle.keys() if not _OF_QUANTIZED.search(name)]

    def get_tensor(self, name: str) -> Tensor:
        if name not in self.beside:
            tensor: Tensor = self.handle.get_tensor(name)
            return tensor
        check_bitsandbytes('reading weights of 4 bits')
        functional = _bnb().functional
        parts = {n.removeprefix(f'{name}.'): self.handle.get_tensor(n) for n in self.beside[name]}
        try:
            state = functional.QuantState.from_dict(parts, device=torch.device('cpu'))
        except (KeyError, ValueError):
            raise self._incomplete(name) from None
        dense: Tensor = functional.dequantize_4bit(self.handle.get_tensor(name), state)
        return dense

    def _incomplete(self, name: str) -> ValueError:
        return ValueError(f'{self.file}: what makes {name} of 4 bits dense is incomplete; copy or download it again')

    def get_slice(self, name: str) -> Any:
        if name not in self.beside:
            return self.handle.get_slice(name)
        stored = next((n for n in self.beside[name] if 'quant_state' in n), None)
        if stored is None:
            raise self._incomplete(name)
        facts = json.loads(bytes(self.handle.get_tensor(stored).tolist()))
        return Part(list(facts['shape']), {'bfloat16': 'BF16', 'float16': 'F16'}.get(facts['dtype'], 'F32'))


def in_four_bits(names: Iterable[str]) -> bool:
    """Whether tensors of these names are a file of that kind."""
    return any('.quant_state.bitsandbytes__' in name for name in names)
