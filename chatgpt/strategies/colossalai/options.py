"""Options of `ColossalAIStrategy`, their checks, and the import of colossalai."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from chatgpt.strategies.precision import Precision
from chatgpt.strategies.streaming import StreamBlocks, check_stream_blocks

Placement = Literal['cuda', 'cpu', 'auto']

INSTALL = 'pip install --no-deps -r requirements-colossalai.txt'
_GEMINI_ONLY = ('shard_init', 'search_range_mb', 'hidden_dim', 'min_chunk_size_mb', 'gpu_margin_mem_ratio')
_FP16_ONLY: tuple[str, ...] = ('initial_scale', 'growth_factor', 'backoff_factor', 'growth_interval', 'hysteresis')
_FP16_ONLY += ('min_scale', 'max_scale')


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of upstream's plugins that the strategy takes."""

    stage: int = 3
    precision: Precision = 'auto'
    shard_init: bool = False
    placement_policy: Placement = 'cuda'
    stream_blocks: StreamBlocks = 'auto'
    pin_memory: bool = True
    """pin the host memory of chunks (stage 3, CUDA)"""
    force_outputs_fp32: bool = False
    """cast floating outputs of a forward to fp32"""
    search_range_mb: float = 32
    """range of Gemini's search for a chunk size, in 2^20 elements"""
    hidden_dim: int | None = None
    """interval of that search: chunk sizes are multiples of it"""
    min_chunk_size_mb: float = 32
    """lower bound of that search, in 2^20 elements; a smaller model is whole on every rank"""
    gpu_margin_mem_ratio: float = 0.0
    """stage 3 with 'auto': share of the free device memory for masters and states"""
    reduce_bucket_size: int = 12 * 1024**2
    """stages 1, 2: elements per reduction"""
    overlap_communication: bool = True
    """reduce gradients during the backward"""
    initial_scale: float = 2**16
    """this and the next six: dynamic loss scaling in fp16"""
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    min_scale: float = 1
    max_scale: float = 2**32
    max_norm: float = 0.0
    """norm to clip to in steps without a max_norm; 0: no clipping"""
    norm_type: float = 2.0
    """must be 2"""

    def check(self) -> None:
        """Raises ValueError for an invalid value, and for an option that would be ignored."""
        gemini = self.stage == 3
        allowed = {
            'stage': (1, 2, 3),
            'placement_policy': ('cuda', 'cpu', 'auto'),
            'precision': ('auto', 'bf16', 'fp16') if gemini else ('auto', 'fp32', 'bf16', 'fp16'),
            'norm_type': (2, 2.0),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                where = f' under stage={self.stage}' if name == 'precision' else ''
                choices = ', '.join(map(repr, dict.fromkeys(values)))
                raise ValueError(f'{name}={getattr(self, name)!r}{where} is not one of {choices}')
        check_stream_blocks(self.stream_blocks)
        if gemini:
            self._refuse(('reduce_bucket_size',), 'is an option of stages 1 and 2; Gemini reduces chunk by chunk')
            if self.placement_policy != 'auto':
                self._refuse(('gpu_margin_mem_ratio',), f"needs placement_policy='auto', not {self.placement_policy!r}")
        else:
            if self.stream_blocks is True:
                raise ValueError(
                    f'stream_blocks=True: stage={self.stage} keeps whole weights on the device; only stage=3 can '
                    'stream them'
                )
            self._refuse(_GEMINI_ONLY, f'is an option of Gemini (stage=3) and stage={self.stage} cannot honour it')
        if self.precision != 'fp16':
            self._refuse(_FP16_ONLY, f"scales the loss under precision='fp16', not {self.precision!r}")
        if not 0 <= self.gpu_margin_mem_ratio <= 1:
            raise ValueError(f'gpu_margin_mem_ratio={self.gpu_margin_mem_ratio} must lie between 0 and 1')
        if self.max_norm < 0:
            raise ValueError(f'max_norm={self.max_norm} must not be negative; 0 turns clipping off')

    def _refuse(self, names: Iterable[str], reason: str) -> None:
        defaults = {f.name: f.default for f in fields(self)}
        for name in names:
            if (value := getattr(self, name)) != defaults[name]:
                raise ValueError(f'{name}={value!r} {reason}; leave it at {defaults[name]!r}')

    def loss_scaling(self) -> dict[str, Any]:
        """Returns the options of loss scaling as arguments of upstream's plugins."""
        return {name: getattr(self, name) for name in _FP16_ONLY}


def import_colossalai() -> None:
    """Imports colossalai, without its warnings about packages that are not used here. Takes seconds the first time."""
    if importlib.util.find_spec('colossalai') is None:
        raise ImportError(f'ColossalAIStrategy needs colossalai, which is not installed; run: {INSTALL}')
    name = 'CUDA_DEVICE_MAX_CONNECTIONS'
    before = os.environ.get(name)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            importlib.import_module('colossalai.booster.plugin')
            importlib.import_module('rich.style')  # its import, later, would draw from Python's seeded generator
        except ImportError as error:
            raise ImportError(f'ColossalAIStrategy cannot import colossalai ({error}); run: {INSTALL}') from error
    if not torch.cuda.is_available() and before is None:
        os.environ.pop(name, None)  # upstream sets it on import, also without CUDA


def check_kernels(stage: int) -> None:
    """Raises ImportError for stage 3 on CUDA without the CUDA toolkit: upstream compiles the kernels of Gemini's
    optimizers at their first use, and needs the toolkit even if they are compiled."""
    if stage < 3 or not torch.cuda.is_available():
        return
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None or not os.access(os.path.join(CUDA_HOME, 'bin', 'nvcc'), os.X_OK):
        raise ImportError(
            f'ColossalAIStrategy(stage=3): HybridAdam is compiled by nvcc, and there is none (CUDA_HOME: {CUDA_HOME}); '
            f'install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME, or use stage=2 or FSDPStrategy'
        )
