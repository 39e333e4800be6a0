"""ColossalAI 0.5.0 on a machine without an accelerator.

Upstream assumes CUDA in a few places. `bridge()` patches these, so that Booster, LowLevelZero and Gemini run on a CPU
with gloo. It does nothing with CUDA, and refuses other versions of ColossalAI. Each patch below gives its reason.
"""

from __future__ import annotations

import contextlib
import math
import types
from typing import Any

import torch
from torch import Tensor

KNOWN_VERSION = '0.5.0'

_bridged = False


class _NoStream:
    """A stream, an event or the context of a stream that does nothing: a CPU runs operations in order."""

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        pass

    wait_stream = record = wait = synchronize


def bridge() -> bool:
    """Patches ColossalAI to run on a CPU, once. Returns False, without changes, if CUDA is available.

    Raises:
        RuntimeError: for any other version of ColossalAI, in which the patches could be silently wrong.
    """
    global _bridged
    if torch.cuda.is_available():
        return False
    if _bridged:
        return True
    import colossalai

    version = colossalai.__version__
    if version != KNOWN_VERSION:
        raise RuntimeError(
            f'ColossalAIStrategy on CPU is written for colossalai {KNOWN_VERSION} and found {version}; '
            f'install it with "pip install --no-deps colossalai=={KNOWN_VERSION}", or run on a CUDA device'
        )
    _set_accelerator()
    _register_cpu_adam()
    _patch_low_level_zero()
    # LowLevelZero calls `Tensor.record_stream` for gradient buckets, which raises on a CPU.
    original = Tensor.record_stream

    def record_stream(self: Tensor, stream: Any) -> None:
        if self.device.type != 'cpu':
            original(self, stream)

    Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]
    _patch_gemini_chunks()
    _patch_gemini_memory()
    _bridged = True
    return True


def _set_accelerator() -> None:
    """Registers an accelerator; upstream's CpuAccelerator raises for streams, seeds and memory.

    The accelerator's device is `cpu:0` and the host's is `cpu`: Gemini moves chunks between the two, and here they
    differ by the index alone.
    """
    from colossalai.accelerator import CpuAccelerator, set_accelerator

    class CpuAsAccelerator(CpuAccelerator):
        def current_device(self) -> int:
            return 0

        def get_current_device(self) -> torch.device:
            return torch.device('cpu', 0)

        def device_count(self) -> int:
            return 1

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def nothing(self, *_: Any, **__: Any) -> None:
            pass

        set_device = synchronize = empty_cache = reset_peak_memory_stats = set_stream = nothing

        def zero(self, device: Any = None) -> int:
            return 0

        memory_allocated = max_memory_allocated = zero

        def no_stream(self, *_: Any, **__: Any) -> _NoStream:
            return _NoStream()

        Stream = Event = current_stream = default_stream = no_stream

        def stream(self, stream_: Any) -> Any:
            return contextlib.nullcontext()

    set_accelerator(CpuAsAccelerator())


class _TorchCPUAdam:
    """Adam with the interface of upstream's kernel (Kingma & Ba 2015, alg. 1; Loshchilov & Hutter 2019, alg. 2)."""

    def __init__(
        self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, adamw_mode: bool
    ) -> None:
        self.adamw_mode = adamw_mode

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        div_scale: float,
    ) -> None:
        """Updates `param`, `exp_avg` and `exp_avg_sq` in place. A positive `div_scale` divides the gradient."""
        correction1 = 1 - beta1**step if bias_correction else 1.0
        correction2 = 1 - beta2**step if bias_correction else 1.0
        grad = grad.to(exp_avg.dtype)
        if div_scale > 0:
            grad = grad / div_scale
        weights = param if param.dtype == exp_avg.dtype else param.to(exp_avg.dtype)
        if weight_decay and self.adamw_mode:
            weights.mul_(1 - lr * weight_decay)
        elif weight_decay:
            grad = grad + weight_decay * weights
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (exp_avg_sq.sqrt() / math.sqrt(correction2)).add_(eps)
        weights.addcdiv_(exp_avg, denominator, value=-lr / correction1)
        if weights is not param:
            param.copy_(weights)


def _register_cpu_adam() -> None:
    """Registers Adam through `CPUAdamLoader.register_extension`: upstream builds its C++ kernel only with nvcc."""
    from colossalai.kernel.kernel_loader import CPUAdamLoader

    class TorchCPUAdamExtension:
        name = 'cpu_adam_torch'
        priority = 0

        def is_available(self) -> bool:
            return True

        def assert_compatible(self) -> None:
            pass

        def load(self) -> Any:
            return types.SimpleNamespace(CPUAdamOptimizer=_TorchCPUAdam)

    CPUAdamLoader.register_extension(TorchCPUAdamExtension)


def _patch_low_level_zero() -> None:
    """Reduces `LowLevelZeroOptimizer._sanity_checks`, which asserts cuda or npu, to its check of the dtype."""
    from colossalai.zero.low_level import LowLevelZeroOptimizer

    def sanity_checks(self: LowLevelZeroOptimizer) -> None:
        for group in self.optim.param_groups:
            for param in group['params']:
                if not getattr(param, 'skip_zero_check', False) and param.dtype != self._dtype:
                    raise ValueError(f'ZeRO wants parameters of one dtype, {self._dtype}, and found {param.dtype}')

    LowLevelZeroOptimizer._sanity_checks = sanity_checks


def _slot(device: torch.device) -> str:
    """Returns 'cuda' for the accelerator (cpu with an index) and 'cpu' for the host, which upstream compares."""
    return 'cpu' if device.type == 'cpu' and device.index is None else 'cuda'


def _patch_gemini_chunks() -> None:
    """Replaces the comparisons of `device.type` in `Chunk` and `ChunkManager` by `_slot`: here the type is 'cpu' for
    both the accelerator and the host."""
    from colossalai.zero.gemini.chunk import Chunk, ChunkManager

    close_chunk = Chunk.close_chunk

    def close_in_slot(self: Chunk) -> None:
        self.shard_device = types.SimpleNamespace(type=_slot(self.shard_device))
        close_chunk(self)

    def device_type(self: Chunk) -> str:
        if self.chunk_temp is not None:
            return _slot(self.chunk_temp.device)
        return 'cuda' if self.is_gathered or self.cuda_shard is not None else 'cpu'

    def shard_move(self: Chunk, device: torch.device, force_copy: bool = False, non_blocking: bool = False) -> None:
        if self.is_gathered:
            raise RuntimeError('a gathered chunk cannot be moved')
        to_accelerator = _slot(device) == 'cuda'
        if not self.optim_sync_flag:
            # The shard's memory holds a gradient; the weights are copied from the fp32 chunk.
            if not to_accelerator:
                raise RuntimeError('a chunk that waits for its weights must first go to the accelerator')
            self.cuda_shard = self.paired_chunk.cpu_shard.to(self.dtype, copy=True)
            self.cpu_shard = None
            self.optim_sync_flag = True
        elif to_accelerator and self.cuda_shard is None:
            self.cuda_shard, self.cpu_shard = self.cpu_shard, None
        elif not to_accelerator and self.cuda_shard is not None:
            self.cpu_shard, self.cuda_shard = self.cuda_shard, None
            self.cpu_vis_flag = True

    def move_chunk(
        self: ChunkManager, chunk: Chunk, device: torch.device, force_copy: bool = False, async_move: bool = False
    ) -> None:
        if not chunk.can_move or chunk.device_type == _slot(device):
            return
        self._ChunkManager__sub_memory_usage(chunk.memory_usage)
        chunk.shard_move(device, force_copy, non_blocking=async_move)
        self._ChunkManager__add_memory_usage(chunk.memory_usage)

    Chunk.device_type = property(device_type)
    Chunk.close_chunk = close_in_slot
    Chunk.shard_move = shard_move
    ChunkManager.move_chunk = move_chunk


def _patch_gemini_memory() -> None:
    """Replaces the measurements of placement 'auto', which use `torch.cuda` and find a negative capacity of a CPU.

    The monitor reports 0 bytes and the capacity is the machine's memory, so that 'auto' never evicts.
    """
    import psutil
    from colossalai.legacy.utils import memory
    from colossalai.zero.gemini.memory_tracer.memory_monitor import SyncCudaMemoryMonitor

    def start(self: SyncCudaMemoryMonitor) -> None:
        pass

    def finish(self: SyncCudaMemoryMonitor) -> int:
        self.time_stamps.append(0.0)
        self.mem_stats.append(0)
        return 0

    def capacity(device: torch.device) -> int:
        return int(psutil.virtual_memory().total)

    SyncCudaMemoryMonitor.start = start
    SyncCudaMemoryMonitor.finish = finish
    memory.colo_device_memory_capacity = capacity
