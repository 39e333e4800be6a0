from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, TCPStore


@dataclass(kw_only=True)
class NCCLWeightTransferInitInfo:
    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int
    world_size: int
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2


def meet(address: str, port: int, rank: int, world_size: int) -> Any:
    patience = timedelta(seconds=60)
    store = TCPStore(address, port, world_size, rank == 0, patience, wait_for_workers=False)
    return ProcessGroupGloo(store, rank, world_size, patience)
