"""Precision and determinism: `Numerics`, and the settings of torch that implement it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.utils import deterministic as torch_deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from chatgpt.names import hint
from chatgpt.strategies.machine import processor
from chatgpt.strategies.ranks import Ranks
from chatgpt.strategies.sums import ExactSums, Sums

Precision = Literal['auto', 'fp32', 'bf16', 'fp16']
Reproducible = Literal['exact'] | None
DTYPES: dict[str, torch.dtype] = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in ('mm', 'addmm', 'bmm', 'baddbmm'))


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The settings of a strategy that change its numbers; every strategy takes them as keyword arguments.

    Raises:
        ValueError: for an unknown value.
    """

    precision: Precision = 'auto'
    """compute dtype; trained weights stay fp32. 'auto': see `resolve_precision`"""
    deterministic: bool = False
    """use torch's deterministic algorithms, in the whole process"""
    reproducible: Reproducible = None
    """'exact': the same bits in every layout"""
    atoms: int = 8
    """number of micro-batches of a train batch with 'exact': a power of two, at least the number of processes"""
    emulated: bool = field(default=False, init=False)
    """True if matrix products in 16 bits are slower than in fp32 on this device; set by `on`"""

    def __post_init__(self) -> None:
        for name, choices in (('precision', get_args(Precision)), ('reproducible', ('exact', None))):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name}={getattr(self, name)!r} is not one of {", ".join(map(repr, choices))}')

    @classmethod
    def of(cls, strategy: type, options: Mapping[str, Any]) -> Numerics:
        """Returns the settings of these keywords. Raises ValueError for an unknown one, with similar options of the
        strategy."""
        own = {f.name for f in fields(cls) if f.init}
        for name in options.keys() - own:
            known = {*inspect.signature(strategy).parameters, *own} - {'numerics', 'options'}
            raise ValueError(f'{strategy.__name__} has no option {name!r}{hint(name, sorted(known))}')
        return cls(**options)

    def on(self, device: torch.device, *, only_16_bits: bool = False) -> Numerics:
        """Returns a copy in which 'auto' is resolved for this device."""
        found = replace(self, precision=resolve_precision(self.precision, device, only_16_bits=only_16_bits))
        object.__setattr__(found, 'emulated', emulates(device, found.dtype) and self.reproducible is None)
        return found

    def sums(self, ranks: Ranks, *, ranks_below: bool = False) -> Sums:
        """Returns the `Sums` of these settings. ValueError if 'exact' does not support the number of ranks."""
        return Sums(ranks) if self.reproducible is None else ExactSums(ranks, self.atoms, ranks_below=ranks_below)

    def facts(self) -> dict[str, Any]:
        """Returns the fields that run.json and checkpoints record."""
        return {'precision': self.precision, 'atoms': self.atoms if self.reproducible is not None else None}

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return DTYPES[self.precision]

    @property
    def full_dtype(self) -> torch.dtype:
        """Dtype of `Strategy.full_model`: fp32 where 16 bits are emulated, and with 'exact', since in 16 bits nearly
        every token would be too near an edge and be sampled again (`chatgpt.rollout.exact`); else `dtype`."""
        return torch.float32 if self.reproducible is not None or self.emulated else self.dtype

    @property
    def scales_loss(self) -> bool:
        """True in fp16: an infinite norm skips the step and lowers the loss scale, and is not a failure."""
        return self.precision == 'fp16'


def resolve_precision(
    precision: Precision, device: torch.device, *, only_16_bits: bool = False, planned: bool = False
) -> Precision:
    """Returns 'fp32', 'bf16' or 'fp16', the precision that a strategy uses on this device.

    'auto' is bf16 on a CUDA device with bf16, and for strategies without fp32; else fp32. It is never fp16, which
    scales losses and skips steps, and not bf16 on a CPU, so that the default gives the same numbers on all CPUs.

    Args:
        planned: the device is not in this machine; a GPU is assumed to have bf16.
    """
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


def emulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if matrix products in `dtype` are slower than in fp32: on a CPU without 16-bit instructions."""
    if device.type != 'cpu' or dtype not in (torch.bfloat16, torch.float16):
        return False
    return not (processor().bf16 if dtype is torch.bfloat16 else processor().fp16)


@contextmanager
def tf32() -> Iterator[None]:
    """A context in which fp32 matrix products on CUDA use TF32, unless the user has set their precision.

    Uses `set_float32_matmul_precision`: if only the newer `torch.backends.cuda.matmul.fp32_precision` is set, the older
    settings, which torch.compile reads, raise an error.
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
    """A mode that multiplies 16-bit matrices in fp32 and rounds the result to their dtype, also in backward passes. For
    CPUs without 16-bit instructions, where torch's emulation is several times slower. Results differ from those of such
    instructions by the order of sums only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = args[0].dtype if func in PRODUCTS else torch.float32
        if dtype not in (torch.bfloat16, torch.float16):
            return func(*args, **kwargs)
        return func(*(a.float() if isinstance(a, Tensor) else a for a in args), **kwargs).to(dtype)


class LossScaler:
    """Dynamic loss scaling for fp16 on any device (Micikevicius et al. 2018, section 3.2; constants as in torch.amp).

    The loss is multiplied by `scale`; gradients are divided by it before use. A non-finite norm halves the scale, 2000
    finite ones in a row double it.
    """

    def __init__(self, scale: float = 65536.0, *, growth_interval: int = 2000) -> None:
        self.scale, self.growth_interval, self.num_finite = scale, growth_interval, 0

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divides gradients by the scale, in place; exact, since the scale is a power of two."""
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


class Deterministic:
    """Enables torch's deterministic algorithms, and attention kernels with a deterministic backward, in the whole
    process until `restore`. torch warns of operators without a deterministic kernel.

    Create it before any computation on a GPU: cuBLAS reads its variable at its first use. The user's value is kept.
    """

    def __init__(self) -> None:
        self._algorithms = torch.are_deterministic_algorithms_enabled()
        self._warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
        self._attention = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
        self._memory = cast(Any, torch_deterministic)
        self._fill = self._memory.fill_uninitialized_memory
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True, warn_only=True)
        self._memory.fill_uninitialized_memory = False  # a debugging aid that writes all new memory
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.backends.cuda.enable_cudnn_sdp(False)  # FlashAttention and plain matrix products stay
        torch.backends.cuda.enable_mem_efficient_sdp(False)

    def restore(self) -> None:
        torch.use_deterministic_algorithms(self._algorithms, warn_only=self._warn_only)
        self._memory.fill_uninitialized_memory = self._fill
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = self._cudnn
        torch.backends.cuda.enable_cudnn_sdp(self._attention[0])
        torch.backends.cuda.enable_mem_efficient_sdp(self._attention[1])
