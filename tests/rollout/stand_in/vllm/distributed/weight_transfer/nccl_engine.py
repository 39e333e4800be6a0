from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, meet


@dataclass
class NCCLTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = 'nccl'

    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2


@dataclass
class NCCLWeightTransferUpdateInfo:
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


def packs(named: list[tuple[str, torch.dtype, tuple[int, ...]]], size: int) -> Iterator[list[Any]]:
    """What goes together: until a buffer is more than full."""
    pack, used = [], 0
    for one in named:
        pack.append(one)
        used += prod(one[2]) * one[1].itemsize
        if used > size:
            yield pack
            pack, used = [], 0
    if pack:
        yield pack


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


class NCCLWeightTransferEngine:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.group: Any = None
        self.last: Any = None

    def init_transfer_engine(self, init_info: Any) -> None:
        info = self.info = NCCLWeightTransferInitInfo(**init_info)
        self.group = meet(info.master_address, info.master_port, info.rank_offset + self.model.rank, info.world_size)
        self.last = None

    def receive_weights(self, update_info: Any) -> None:
        info = NCCLWeightTransferUpdateInfo(**update_info)
        info = self.last = info if info.names else self.last
        dtypes = [getattr(torch, name) for name in info.dtype_names]
        named = list(zip(info.names, dtypes, info.shapes, strict=True))
        for pack in packs(named, self.info.packed_buffer_size_bytes):
            sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in pack]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            broadcast(self.group, buffer)
            die = os.environ.get('STAND_IN_DIES', '')
            if os.path.exists(die) and self.model.rank == 1:
                os.remove(die)
                os._exit(1)
            parts = zip(pack, buffer.split(sizes), strict=True)
            self.model.load_weights([(name, part.view(dtype).view(shape)) for (name, dtype, shape), part in parts])


class NCCLTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    def __init__(self, client: Any, source: Any, info: NCCLTrainerInitInfo) -> None:
        self.client, self.source, self.info = client, source, info
        self.group: Any = None
        self.sent: Any = None

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        assert source.implements_iter_full() and source.metadata
        engine = cls(client, source, init_info)
        payload = asdict(
            NCCLWeightTransferInitInfo(
                master_address=init_info.master_address,
                master_port=init_info.master_port,
                rank_offset=1,
                world_size=init_info.world_size,
                packed=init_info.packed,
                packed_buffer_size_bytes=init_info.packed_buffer_size_bytes,
            )
        )
        with ThreadPoolExecutor(1) as thread:
            there = thread.submit(client.init_weight_transfer_engine, payload)
            engine.group = meet(init_info.master_address, init_info.master_port, 0, init_info.world_size)
            there.result()
        return engine

    def send_weights(self) -> None:
        meta, info = self.source.metadata, NCCLWeightTransferUpdateInfo()
        if meta != self.sent:
            dtypes = [str(m.dtype).split('.')[-1] for m in meta]
            info = NCCLWeightTransferUpdateInfo([m.name for m in meta], dtypes, [list(m.shape) for m in meta])
        self.client.start_weight_update()
        thread = ThreadPoolExecutor(1)
        try:
            there = thread.submit(self.client.update_weights, asdict(info))
            tensors = dict(self.source.iter_full())
            assert [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()] == [
                (m.name, m.dtype, m.shape) for m in meta
            ]
            for pack in packs([(m.name, m.dtype, m.shape) for m in meta], self.info.packed_buffer_size_bytes):
                broadcast(self.group, torch.cat([tensors[name].view(-1).view(torch.uint8) for name, *_ in pack]))
            there.result()
        finally:
            thread.shutdown(wait=False)
        self.client.finish_weight_update()
        self.sent = meta

    def shutdown(self) -> None:
        self.group = None
