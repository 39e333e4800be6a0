"""FSDP with shards in host memory, on a group that takes no tensor of the CPU, as NCCL does: a dispatch mode in which
'cuda' is host memory that is marked, and a collective on what is not marked is the error that NCCL's group gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chatgpt.strategies import FSDPStrategy, states
from chatgpt.strategies.tensor_parallel import Parts
from chatgpt.testing.processes import run_distributed


class OnlyDeviceCollectives(TorchDispatchMode):
    """Two ranks of gloo as two ranks of NCCL. Marked storages are on the device, all others on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.marked: dict[int, Any] = {}
        self.largest = 0
        """elements of the largest tensor that went through a collective"""

    def mark(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.marked[storage._cdata] = storage  # held, so that no other gets its address

    def is_marked(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.marked

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func.namespace in ('c10d', '_c10d_functional') and tensors:
            if not all(self.is_marked(t) for t in tensors):
                raise RuntimeError('No backend type associated with device type cpu')
            self.largest = max(self.largest, *(t.numel() for t in tensors))
        device = kwargs.get('device')
        to_device = device is not None and torch.device(device).type == 'cuda'
        if to_device:
            kwargs['device'] = torch.device('cpu')
        result = func(*args, **kwargs)
        on_device = to_device or (device is None and bool(tensors) and self.is_marked(tensors[0]))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and on_device:
                if to_device and t.untyped_storage()._cdata in {a.untyped_storage()._cdata for a in tensors}:
                    continue
                self.mark(t)
        return result


class Odd(nn.Module):
    """Rows that two ranks do not share evenly, fewer rows than ranks, several dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Parameter(torch.randn(1, 3))
        self.odd = nn.Parameter(torch.randn(5, 3, 2))
        self.flat = nn.Parameter(torch.randn(7))
        self.register_buffer('scale', torch.randn(2))


def gathered(folder: str, chunk: int) -> tuple[dict[str, list[Any]], int]:
    torch.cuda._lazy_init = lambda: None  # type: ignore[assignment]
    states.CHUNK = chunk
    with FSDPStrategy(device='cpu', cpu_offload=True, stream_blocks=False) as strategy:
        model = strategy.prepare(Odd())
        strategy.ranks.device = torch.device('cuda', 0)
        out: dict[str, list[Any]] = {}
        try:
            with OnlyDeviceCollectives() as mode:
                out['file'] = [(n, t.tolist()) for n, t in strategy.full_state_dict(model).items()]
                full = strategy._gathered(model, torch.float32)
                out['copy'] = [(n, t.tolist()) for n, t in full.named_parameters()]
                out['device'] = [mode.is_marked(t.data) for t in full.parameters()]
                out['mapped'] = [(n, t.tolist()) for n, t in strategy._whole(model.named_parameters(), Parts())]
        finally:
            strategy.ranks.device = torch.device('cpu')
        (Path(folder) / f'{strategy.rank}').touch()
        return out, mode.largest


@pytest.mark.parametrize('chunk', [1 << 24, 4])
def test_shards_in_host_memory_are_gathered_through_the_device(tmp_path, chunk):
    whole = Odd()
    parameters = [(n, t.tolist()) for n, t in whole.named_parameters()]
    for rank, (out, largest) in enumerate(run_distributed(gathered, 2, str(tmp_path), chunk)):
        assert out['file'] == ([(n, t.tolist()) for n, t in whole.state_dict().items()] if rank == 0 else [])
        assert out['copy'] == out['mapped'] == parameters
        assert all(out['device'])
        most = max(math.prod(p.shape[1:]) * -(-p.shape[0] // 2) * 2 for p in whole.parameters())
        assert largest == min(chunk, most)


def refused() -> str:
    """The stand-in is a group that refuses, and not one that takes anything."""
    torch.cuda._lazy_init = lambda: None  # type: ignore[assignment]
    with FSDPStrategy(device='cpu', cpu_offload=True) as strategy:
        model = strategy.prepare(Odd())
        with OnlyDeviceCollectives(), pytest.raises(RuntimeError) as raised:
            model.odd.full_tensor()
    return str(raised.value)


def test_the_stand_in_refuses_host_memory():
    assert run_distributed(refused, 2) == ['No backend type associated with device type cpu'] * 2
