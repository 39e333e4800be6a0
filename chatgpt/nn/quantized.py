"""Linear layers with a frozen weight in 4 bits: NF4 with doubly quantized scales, 4.13 bits per weight.

Source: Dettmers et al. 2023, "QLoRA", section 3: blocks of 64 weights share a scale, blocks of 256 scales another. The
kernels are bitsandbytes', on CUDA and on a CPU. Backward recomputes the dense weight, so a graph holds no dense
weights. Embeddings and heads stay dense. 4-bit files written by transformers are read as dense ones.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

BLOCK, SCALE_BLOCK = 64, 256
SAME_AS_LINEAR = ('FalconLinear',)
"""subclasses of nn.Linear with their own forward that computes the same"""


def is_linear(layer: nn.Module) -> bool:
    """Returns True for nn.Linear, and for a subclass that computes the same."""
    kind = type(layer)
    return isinstance(layer, nn.Linear) and (kind.forward is nn.Linear.forward or kind.__name__ in SAME_AS_LINEAR)


@lru_cache
def reads_weight(kind: type, child: str) -> bool:
    """Returns True if modules of that class multiply by the weight of their layer `child` without calling it, as
    Mamba's kernels and some routers do. An adapter on such a layer has no effect, and they cannot read 4 bits."""
    read = re.compile(rf'(?<!isinstance\()\bself\.{re.escape(child)}\.weight\b(?!\.(dtype|device|shape)|\[)')
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        code = inspect.unwrap(function).__code__
        if name.startswith('__') or child not in code.co_names or 'weight' not in code.co_names:
            continue
        try:
            found = read.search(inspect.getsource(code))
        except OSError:  # no source to read
            continue
        if found:
            return True
    return False


def check_bitsandbytes(what: str) -> None:
    """Raises ValueError if bitsandbytes, which `what` needs, is missing."""
    try:
        found = find_spec('bitsandbytes') is not None
    except ValueError:  # disabled on purpose
        found = False
    if not found:
        raise ValueError(f"{what} needs bitsandbytes, which is not installed: pip install 'chatgpt-rlhf[nf4]'")


def _bnb() -> Any:
    logger = logging.getLogger('bitsandbytes.backends.cpu.ops')  # warns at each start about a missing optional kernel
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
    tensors are not in `state_dict`: they are frozen and computed from the dense weight.

    Args:
        layer: the layer to quantize, which is not modified; a `Conv1D`'s weight is transposed.
        dtype: of the bias and of the dequantized weight.
        device: None for that of `layer`.
    """

    packed: Tensor
    """(out · in / 2, 1) uint8: two weights per byte"""
    scales: Tensor
    """(out · in / 64,) uint8, themselves quantized"""
    scale_scales: Tensor
    """fp32, one for 256 scales"""
    scale_mean: Tensor
    """() fp32"""
    bias: Tensor | None
    gather: Callable[[Tensor], Tensor] | None = None
    """returns the whole of `packed` where this process holds a part of it (`DDPStrategy(shard_trunk=True)`)"""

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the tensors, which keep their dtypes: bitsandbytes reads them by these."""

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return new if new.dtype == tensor.dtype else tensor.to(new.device)

        return super()._apply(moved, recurse)

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
        """Returns the dequantized weight, in the layout of the original layer."""
        return self._rows().T.contiguous() if self.is_transposed else self._rows()

    def _rows(self) -> Tensor:
        packed = self.packed if self.gather is None else self.gather(self.packed)
        weight: Tensor = _bnb().functional.dequantize_4bit(packed, self._state())
        return weight

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.gather is not None:
            product: Tensor = _GatheredProduct.apply(x, self)
            return product if bias is None else product + bias
        y: Tensor = _bnb().matmul_4bit(x, self.packed, quant_state=self._state(), bias=bias)
        return y

    def extra_repr(self) -> str:
        return f'in_features={self.in_features}, out_features={self.out_features}, nf4'


class _GatheredProduct(torch.autograd.Function):
    """x W^T, with W gathered and dequantized in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer._rows().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer._rows().to(gradient.dtype), None


def quantize_blocks(
    module: nn.Module,
    inside: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
) -> None:
    """Replaces the linear layers inside the transformer blocks (below an `nn.ModuleList`) of `module`, in place.

    inside: `module` is itself in a block. device: where weights are quantized, one after another; None for their own.
    """
    for name, child in module.named_children():
        if inside and (is_linear(child) or type(child) is Conv1D):
            linear, owner = cast(nn.Linear, child), cast(Any, type(module))
            if linear.weight.numel() % BLOCK == 0 and not reads_weight(owner, name):
                module._modules[name] = NF4Linear(linear, dtype, device)
        else:
            quantize_blocks(child, inside or isinstance(module, nn.ModuleList), dtype, device)


_QUANTIZATION_STATE = re.compile(r'\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)$')
"""suffixes of the tensors stored with a packed weight"""


class Part(NamedTuple):
    """Shape and dtype of a tensor in a file, with the interface of safetensors' slices."""

    shape: list[int]
    dtype: str

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


class FourBitFile:
    """Reads an open safetensors file with bitsandbytes' 4-bit weights as one of dense weights. Raises ValueError if the
    quantization state of a weight is incomplete."""

    def __init__(self, handle: Any, file: Any) -> None:
        self.handle, self.file = handle, file
        self.beside: dict[str, list[str]] = {}
        for name in handle.keys():
            if found := _QUANTIZATION_STATE.search(name):
                self.beside.setdefault(name[: found.start()], []).append(name)

    def keys(self) -> list[str]:
        return [name for name in self.handle.keys() if not _QUANTIZATION_STATE.search(name)]

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
    """Returns True if tensors of these names are from a file of 4-bit weights."""
    return any('.quant_state.bitsandbytes__' in name for name in names)
