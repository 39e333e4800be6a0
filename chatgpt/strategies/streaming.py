"""Full weights of a sharded model outside of the device: in a memory-mapped file, one for all ranks of a machine.

Used to save a model, without a rank that holds it in its own memory, and to generate with a model that does not fit on
the device: `BlockStream` copies its blocks into two buffers, each while the block before it computes. Weights are
gathered once, and there are no collectives while generating, so ranks may take different numbers of steps.
"""

from __future__ import annotations

import copy
import math
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from chatgpt.strategies.base import Strategy

StreamBlocks = bool | Literal['auto']
FREE_SHARE = 0.6
"""'auto' streams if a full copy takes more than this share of the device's free memory; the cache needs the rest"""
_ALIGNMENT = 256


def check_stream_blocks(value: StreamBlocks) -> None:
    if value not in (True, False, 'auto'):
        raise ValueError(f"stream_blocks={value!r} must be True, False or 'auto'")


def streams(strategy: Strategy, option: StreamBlocks, module: nn.Module, dtype: torch.dtype) -> bool:
    """Returns True if a full copy is to be streamed; the same on every rank."""
    if option != 'auto' or strategy.device.type != 'cuda':
        return option is True
    size, device = sum(p.numel() for p in module.parameters()) * dtype.itemsize, strategy.device
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    tight = torch.tensor(float(size > FREE_SHARE * (free + strategy._kept_copy.nbytes)))
    found = bool(strategy.all_reduce(tight, 'max'))
    if found:
        strategy._kept_copy.free()
    return found


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the transformer blocks: gradient-checkpointing layers, or else the members of the largest module list."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: list[nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if blocks:
        return blocks
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=[]))


def with_parameters(module: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    """Returns a deep copy of a module with parameters replaced by id; tied ones stay tied."""
    replaced: dict[int, Any] = {}
    for parameter in module.parameters():
        replaced[id(parameter)] = nn.Parameter(tensors[id(parameter)].detach(), requires_grad=False)
    return copy.deepcopy(module, replaced)


def on_meta(module: nn.Module) -> nn.Module:
    """Returns a deep copy with parameters on the meta device."""
    return with_parameters(module, {id(p): p.to('meta') for p in module.parameters()})


def set_buffers(copied: nn.Module, module: nn.Module) -> None:
    """Clones the buffers of `module` into a copy of it."""
    for name, buffer in list(module.named_buffers()):
        owner_name, _, buffer_name = name.rpartition('.')
        copied.get_submodule(owner_name)._buffers[buffer_name] = buffer.clone()


class MappedTensors:
    """Named CPU tensors in one unnamed temporary file.

    Args:
        shapes: {name: (shape, dtype)}, in the order of the file.
        folder: folder of the file; default: the system's temporary folder (TMPDIR).
        strategy: shares the file with all ranks of a machine; the first of them is the `writer`. None: not shared.

    Raises:
        OSError: on every rank, if there is not enough disk space.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
        folder: str | os.PathLike[str] | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.ranges: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (shape, dtype) in shapes.items():
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + math.prod(shape) * dtype.itemsize
            self.ranges[name] = (start, end)
        memory = self._mapped(max(end, 1), folder, strategy)
        self.bytes = torch.from_numpy(memory)
        """the whole file, uint8, shape (size,)"""
        self.tensors = {  # sliced in numpy, so that each has its own storage: torch.save writes whole storages
            name: torch.from_numpy(memory[slice(*self.ranges[name])]).view(dtype).view(shape)
            for name, (shape, dtype) in shapes.items()
        }

    def _mapped(self, size: int, folder: str | os.PathLike[str] | None, strategy: Strategy | None) -> Any:
        gather = strategy.processes.all_gather_object if strategy is not None else lambda obj: [obj]
        rank, host = (strategy.processes.rank if strategy is not None else 0), socket.gethostname()
        hosts = gather(host)
        self.writer = hosts.index(host) == rank
        path, failure = '', ''
        if self.writer:
            try:
                path = self._create_file(size, folder)
            except OSError as error:
                failure = (
                    f'rank {rank}: {size} bytes for whole weights in {folder or tempfile.gettempdir()}: '
                    f'{error.strerror}'
                )
        answers = gather((path, failure))
        paths, failures = [p for p, _ in answers], [f for _, f in answers if f]
        mapped = None
        if not failures:
            try:
                mapped = np.memmap(paths[hosts.index(host)], np.uint8, 'r+', shape=(size,))
            except OSError as error:
                failure = f'rank {rank}: {error}'
            failures = [f for f in gather(failure) if f]
        if path:
            os.unlink(path)  # the mappings keep the file alive, and a killed run leaves nothing behind
        if failures or mapped is None:
            raise OSError(f'{failures[0]}; free some{", or point TMPDIR to another disk" if folder is None else ""}')
        return mapped

    @staticmethod
    def _create_file(size: int, folder: str | os.PathLike[str] | None) -> str:
        """Creates a file with allocated blocks: writing to a mapping of a full disk would kill the process."""
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix='.weights-', dir=folder)
        try:
            if hasattr(os, 'posix_fallocate'):
                os.posix_fallocate(handle, 0, size)
            else:
                os.truncate(handle, size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(handle)
        return path


def gathered_state(
    strategy: Strategy,
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    whole: Iterable[tuple[str, Tensor]],
    folder: str | os.PathLike[str] | None,
) -> dict[str, Tensor]:
    """Returns a full state dict in a mapped file in `folder`, floating tensors in fp32; empty except on rank 0.

    Args:
        tensors, aliases: as from `states.named_tensors`; only shapes and dtypes are read.
        whole: full tensors by name; collective, so it is exhausted on every rank.
    """
    full: dict[str, Tensor] = {}

    def create() -> None:
        kinds = {n: (tuple(t.shape), torch.float32 if t.is_floating_point() else t.dtype) for n, t in tensors.items()}
        full.update(MappedTensors(kinds, folder).tensors)

    strategy.run_on_rank0(create)
    for name, value in whole:
        if strategy.is_rank_0:
            full[name].copy_(value)
    return full | {alias: full[name] for alias, name in aliases.items() if strategy.is_rank_0}


@contextmanager
def whole_copy(
    strategy: Strategy,
    module: nn.Module,
    skeleton: nn.Module,
    whole: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    folder: str | os.PathLike[str] | None,
    *,
    computes: bool,
) -> Iterator[nn.Module]:
    """Yields a `mapped_copy` of `module` in host memory, or if it `computes`, on the device with a `BlockStream`.

    Args:
        skeleton: the module to copy, `module` itself or one with the same names and shapes.
    """
    full, mapped = mapped_copy(strategy, skeleton, whole, dtype, folder)
    set_buffers(full, module)
    with closing(BlockStream(full, mapped, strategy.device)) if computes else nullcontext():
        yield full if computes else full.to('cpu')


@torch.no_grad()
def mapped_copy(
    strategy: Strategy,
    module: nn.Module,
    whole: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    folder: str | os.PathLike[str] | None = None,
) -> tuple[nn.Module, MappedTensors]:
    """Returns a copy of `module` in eval mode with parameters in `MappedTensors`, adapters folded in and switched off.

    Args:
        module: only names, shapes and dtypes of its parameters are read, so they may be meta tensors.
        whole: full parameters by name, in any order, each valid until the next; collective: exhausted on every rank.
    """
    from chatgpt.nn import lora

    ours = dict(module.named_parameters())
    in_blocks = [p for block in transformer_blocks(module) for p in block.parameters()]
    first = {id(p): i for i, p in reversed(list(enumerate(in_blocks)))}
    order = sorted(ours, key=lambda name: first.get(id(ours[name]), len(in_blocks)))  # block by block, then the rest
    kinds = {n: (tuple(ours[n].shape), dtype if ours[n].is_floating_point() else ours[n].dtype) for n in order}
    mapped = MappedTensors(kinds, folder, strategy)
    adapted = lora.lora_layers(module)
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, value in whole:
        layer_name, _, part = name.rpartition('.')
        if layer_name in adapted and part in ('weight', 'lora_A', 'lora_B'):
            parts = waiting.setdefault(layer_name, {})
            parts[part] = value.clone()
            if len(parts) < 3:
                continue
            name, value = f'{layer_name}.weight', adapted[layer_name].fold(**waiting.pop(layer_name))
        if mapped.writer:
            mapped.tensors[name].copy_(value)
    strategy.barrier()
    memo: dict[int, Any] = {id(ours[n]): nn.Parameter(mapped.tensors[n], requires_grad=False) for n in order}
    copied = copy.deepcopy(module, memo).eval()
    for layer in lora.lora_layers(copied).values():
        layer.adapter_on = False
        for factor in (layer.lora_A, layer.lora_B):
            factor.data = torch.zeros_like(factor)
    return copied, mapped


class BlockStream:
    """Copies each block's weights into one of two buffers on the device before its forward.

    Parameters of block i are always views of buffer i mod 2, and valid while the block computes.
    """

    def __init__(self, model: nn.Module, mapped: MappedTensors, device: torch.device) -> None:
        self.mapped, self.device = mapped, device
        self.blocks = transformer_blocks(model)
        names = {id(p): n for n, p in model.named_parameters()}
        holders = Counter(id(p) for block in self.blocks for p in block.parameters())
        members = [
            [(p, *mapped.ranges[names[id(p)]]) for p in block.parameters() if holders[id(p)] == 1]
            for block in self.blocks
        ]
        self.spans = [(min((a for _, a, _ in m), default=0), max((b for *_, b in m), default=0)) for m in members]
        size = max((b - a for a, b in self.spans), default=0)
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(2, len(self.blocks)))]
        self.resident: list[int | None] = [None] * len(self.buffers)
        streamed_ids = set()
        for i, own in enumerate(members):
            for parameter, a, b in own:
                view = self.buffers[i % 2][a - self.spans[i][0] : b - self.spans[i][0]]
                streamed_ids.add(id(parameter))
                parameter.data = view.view(parameter.dtype).view(parameter.shape)
        for parameter in model.parameters():
            if id(parameter) not in streamed_ids:
                parameter.data = parameter.data.to(device, copy=True)
        for owner in model.modules():
            for key, buffer in list(owner._buffers.items()):
                if buffer is not None:
                    owner._buffers[key] = buffer.to(device)
        cuda = device.type == 'cuda'
        self.pinned = cuda and page_locked(mapped.bytes, device)
        self.side = torch.cuda.Stream(device) if cuda else None
        self.copied = [torch.cuda.Event() for _ in self.buffers] if cuda else []
        self.handles = []
        for i, block in enumerate(self.blocks):
            block.is_streamed = True  # type: ignore[assignment]
            self.handles.append(block.register_forward_pre_hook(lambda *_, i=i: self.before_block(i), prepend=True))
            self.handles.append(block.register_forward_hook(lambda *_, i=i: self.after_block(i), always_call=True))

    def _copy(self, i: int) -> None:
        start, stop = self.spans[i]
        slot = i % len(self.buffers)
        self.buffers[slot][: stop - start].copy_(self.mapped.bytes[start:stop], non_blocking=True)
        self.resident[slot] = i

    def before_block(self, i: int) -> None:
        """Runs before block i: waits for its copy on the side stream, or copies it."""
        slot = i % len(self.buffers)
        if self.side is not None:  # also for a copy of another block: a decoder runs without its encoder's blocks
            torch.cuda.current_stream(self.device).wait_event(self.copied[slot])
        if self.resident[slot] != i:
            self._copy(i)

    def after_block(self, i: int) -> None:
        """Runs after block i: starts to copy the next block of its buffer, or the first one, for the next token."""
        if self.side is None:
            return  # a CPU cannot copy while it computes
        slot, following = i % len(self.buffers), i + len(self.buffers)
        following = following if following < len(self.blocks) else slot
        if following != i:
            self.side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.side):
                self._copy(following)
            self.copied[slot].record(self.side)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.side is not None:
            torch.cuda.synchronize(self.device)
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.mapped.bytes.data_ptr())  # type: ignore[attr-defined]
        self.buffers = []


def page_locked(memory: Tensor, device: torch.device) -> bool:
    """Page-locks host memory, so that copies to a GPU overlap with computation. Returns False if CUDA refuses."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)  # type: ignore[attr-defined]
    if int(status) == 0:
        return True
    # The refusal stays CUDA's last error, which the next kernel launch reports; this launch clears it.
    with suppress(RuntimeError):
        torch.ones(1, device=device)
    return False
