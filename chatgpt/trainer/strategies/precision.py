"""Compute dtypes: which one a device computes in, what is kept in it, dynamic loss scaling, copies of a module in it.

Left out: autocast itself (torch's) and where it is entered (the trainer, through `Strategy.autocast`).
"""

from __future__ import annotations

import copy
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Precision = Literal['auto', 'fp32', 'bf16', 'fp16']
DTYPES: dict[str, torch.dtype] = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}

PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in ('mm', 'addmm', 'bmm', 'baddbmm'))
BEFORE_BF16 = frozenset(('SSE41', 'AVX', 'AVX2', 'AVX2_VNNI', 'AVX2_VNNI_2', 'AVX512_CORE', 'AVX512_CORE_VNNI'))
"""values of ONEDNN_MAX_CPU_ISA with which oneDNN has no products of 16 bits"""
WITH_STATES = re.compile(
    r'(^|\.)(embed_positions\.weights|attn\.bias|slope_rate|query_decay|key_decay|diagonal_decay)$'
)
"""buffers that are added to states or multiplied with them: sinusoids (XGLM), a mask (GPT-1), decays (MiniMax);
transformers makes them in a model's dtype too"""


def check_precision(precision: str) -> None:
    """ValueError for an unknown one."""
    if precision not in get_args(Precision):
        raise ValueError(f'precision={precision!r} is not one of {", ".join(map(repr, get_args(Precision)))}')


def resolve_precision(
    precision: Precision, device: torch.device, *, only_16_bits: bool = False, planned: bool = False
) -> Precision:
    """'fp32', 'bf16' or 'fp16': what a strategy on this device computes in. The one place where that is decided.

    'auto' is bf16 on a CUDA device that computes it, and for what computes in 16 bits only; else fp32. A GPU without
    bf16 gets no fp16, which would scale losses and skip steps; and no CPU gets bf16, so that the default has the same
    numbers on all.

    planned: the device is not here; if it is a GPU, it is one that computes bf16.
    """
    check_precision(precision)
    if precision != 'auto':
        return precision
    if only_16_bits:
        return 'bf16'
    if device.type != 'cuda':
        return 'fp32'
    if planned:
        return 'bf16'
    with torch.cuda.device(device):
        return 'bf16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'fp32'


def check_agreed(chosen: Sequence[tuple[str, str]]) -> None:
    """ValueError where 'auto' is not the same on all ranks. chosen: of each, its precision and its device's name."""
    if len({precision for precision, _ in chosen}) > 1:
        found = ', '.join(f'{precision} on rank {rank} ({name})' for rank, (precision, name) in enumerate(chosen))
        raise ValueError(f"precision='auto' is {found}; give precision='fp32', or one that all of them compute in")


def emulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrix products in `dtype` are put together from other instructions there, several times slower than in
    fp32: on a CPU whose instructions (or those that ONEDNN_MAX_CPU_ISA leaves to oneDNN) have none of 16 bits."""
    if device.type != 'cpu' or dtype not in (torch.bfloat16, torch.float16):
        return False
    limit = (os.environ.get('ONEDNN_MAX_CPU_ISA') or os.environ.get('DNNL_MAX_CPU_ISA') or 'ALL').upper()
    kind = 'bf16' if dtype is torch.bfloat16 else 'fp16'
    asked = getattr(torch.ops.mkldnn, f'_is_mkldnn_{kind}_supported', None)  # whether torch would give it to oneDNN
    if asked is None or not asked() or limit in BEFORE_BF16 or (kind == 'fp16' and limit == 'AVX512_CORE_BF16'):
        return True
    found = torch.cpu.get_capabilities()
    return found.get('architecture') in ('x86_64', 'x86') and not any(
        found.get(f'{family}_{kind}') for family in ('amx', 'avx512')
    )


@contextmanager
def tf32() -> Iterator[None]:
    """Inside, fp32 matrix products on CUDA round their inputs to TF32, unless somebody has chosen how they are done.

    By `set_float32_matmul_precision`: after torch's newer `torch.backends.cuda.matmul.fp32_precision` alone, the older
    settings, which torch.compile and others read, raise an error.
    """
    try:
        chosen = torch.get_float32_matmul_precision() != 'highest'
    except RuntimeError:  # set by the newer names
        chosen = True
    if chosen:
        yield
        return
    torch.set_float32_matmul_precision('high')
    try:
        yield
    finally:
        torch.set_float32_matmul_precision('highest')


class WideProducts(TorchDispatchMode):
    """Inside, matrices of 16 bits are multiplied in fp32 and the result is rounded to their dtype, which is what
    instructions for them give up to the order of sums: those add up in fp32 too. For a CPU without such instructions,
    where torch's own imitation is several times slower. Backward passes included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = args[0].dtype if func in PRODUCTS else torch.float32
        if dtype not in (torch.bfloat16, torch.float16):
            return func(*args, **kwargs)
        return func(*(a.float() if isinstance(a, Tensor) else a for a in args), **kwargs).to(dtype)


def narrow_states(module: nn.Module, dtype: torch.dtype) -> None:
    """Put buffers that are added to states or multiplied with them in `dtype`, in place, where states are in it too.
    Those that files hold stay as they are."""
    for path, owner in module.named_modules():
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers[name]
            if buffer is not None and buffer.is_floating_point() and WITH_STATES.search(f'{path}.{name}'):
                owner._buffers[name] = buffer.to(dtype)


def kept_in_fp32(module: nn.Module) -> re.Pattern[str] | None:
    """Names of parameters that transformers keeps in fp32 in models of 16 bits, whose code counts on it (gates of some
    mixtures, small convolutions)."""
    parts = {name for m in module.modules() for name in getattr(m, '_keep_in_fp32_modules_strict', None) or ()}
    return re.compile('|'.join(sorted(parts))) if parts else None


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


def product_weights(module: nn.Module) -> list[nn.Parameter]:
    """Weights that only matrix products read: those of linear layers in transformer blocks, which autocast rounds to
    the compute dtype at each use. Kept in it, they give the same bits. Not so embeddings, norms and heads."""
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.pytorch_utils import Conv1D

    from chatgpt.nn.lora import LoRAConv1D, LoRALinear, is_shared

    linear = {
        id(m.weight): m.weight
        for block in module.modules()
        if isinstance(block, GradientCheckpointingLayer)
        for m in block.modules()
        if type(m) in (nn.Linear, Conv1D, LoRALinear, LoRAConv1D)
    }
    for m in module.modules():
        if type(m) not in (nn.Linear, Conv1D, LoRALinear, LoRAConv1D):
            for parameter in m._parameters.values():
                linear.pop(id(parameter), None)  # read by something else too
    return [p for p in linear.values() if isinstance(p, nn.Parameter) and not is_shared(p)]


@torch.no_grad()
def narrow(weights: Iterable[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    """Keep the fp32 ones of these weights in `dtype`, in place. Those that were changed."""
    changed = [weight for weight in weights if weight.dtype is torch.float32]
    for weight in changed:
        weight.data = weight.detach().to(dtype)
    return changed


@contextmanager
def lora_merged(module: nn.Module) -> Iterator[None]:
    """Adapters folded into the weights inside; the weights' exact bits restored after. Nothing happens without
    adapters, and with weights that other models share."""
    from chatgpt.nn import lora

    with lora.merged(module) if lora.can_fold(module) else nullcontext():
        yield


@torch.no_grad()
def merge_for_good(copied: nn.Module, *, in_place: bool = False) -> None:
    """Fold adapters into a copy that is thrown away after use, layer by layer: nothing is put aside.

    in_place: into the memory that its adapted layers have, which must be theirs alone.
    """
    from chatgpt.nn import lora

    for layer in lora.layers_to_fold(copied) if lora.can_fold(copied) else ():
        weight = layer.folded_weight().to(layer.weight.dtype)
        if in_place:
            layer.weight.copy_(weight)
            layer.lora_B.zero_()
        else:  # with one process a copy's tensors are the trained ones themselves
            layer.weight.data, layer.lora_B.data = weight, torch.zeros_like(layer.lora_B)
        layer.merged = True  # so that the local engine takes it for a plain layer


@torch.no_grad()
def cast_copy(module: nn.Module, dtype: torch.dtype, into: nn.Module | None = None) -> nn.Module:
    """A deep copy with floating parameters in `dtype` and LoRA folded in, made without a copy in fp32 on the way.

    into: an earlier copy of this module in this dtype (`KeptCopy`), which takes the numbers in the memory that it has.

    Weights are folded one at a time, in fp32, and rounded once; the copy's own adapters are zero, so it computes, saves
    and folds as it stands. What a shared trunk holds is not copied, and its adapters are cast beside it. Buffers keep
    their dtype: rotary frequencies and the like lose their meaning in 16 bits. Those that are added to states or
    multiplied with them take the new one, and weights that transformers keeps in fp32 stay in it.
    """
    from chatgpt.nn import lora
    from chatgpt.nn.quantized import NF4Linear

    memo: dict[int, Any] = {id(part): part for part in module.modules() if isinstance(part, NF4Linear)}
    fp32 = kept_in_fp32(module)
    adapted = {id(layer.weight): layer for layer in lora.layers_to_fold(module)} if lora.can_fold(module) else {}
    for name, parameter in module.named_parameters():
        if lora.is_shared(parameter):
            memo[id(parameter)] = parameter
            continue
        layer = adapted.get(id(parameter))
        data = parameter.detach() if layer is None else layer.folded_weight()
        if into is not None:
            into.get_parameter(name).copy_(data)
            continue
        stays = not data.is_floating_point() or (fp32 is not None and fp32.search(name) is not None)
        data = data.clone() if stays else data.to(dtype, copy=layer is None)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=False)
    for name, buffer in module.named_buffers() if into is None else ():
        if buffer.is_floating_point() and WITH_STATES.search(name):
            memo[id(buffer)] = buffer.to(dtype, copy=True)
    copied = copy.deepcopy(module, memo) if into is None else into
    for buffer, own in zip(copied.buffers(), module.buffers(), strict=True) if into is not None else ():
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
        from chatgpt.nn.settings import plain_settings

        self.of, self.dtype, self.copied = weakref.ref(module), dtype, copied
        self.settings, self.device = plain_settings(module), next(module.parameters()).device

    def fits(self, module: nn.Module, dtype: torch.dtype) -> bool:
        """Whether a new copy of `module` would differ in the numbers of its tensors only."""
        from chatgpt.nn.settings import plain_settings

        if self.of() is not module or self.dtype != dtype or self.device != next(module.parameters()).device:
            return False

        def form(of: nn.Module) -> list[Any]:
            return [(name, t.shape) for name, t in (*of.named_parameters(), *of.named_buffers())]

        return self.settings == plain_settings(module) and form(module) == form(self.copied)
