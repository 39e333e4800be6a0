"""A process group of the trainer and the processes of all rollout workers, over which buckets are broadcast.

It is no part of torch's default group: a worker may run vLLM, which has groups of its own, and after a death the others
join a new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import BroadcastOptions, TCPStore

JOIN_S = 300.0
"""seconds in which all processes must join, after their earlier requests are done"""
POLL_S = 0.0005
CHECK_S = 1.0
CLOSED = 'closed'


def name_of_device(device: torch.device) -> str:
    """Returns a GPU's unique id, or '' for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == 'cuda' else ''


class Channel:
    """One process's end.

    Args:
        backend: 'nccl' or 'gloo'.
        address: host and port of the sender, which is rank 0; the sender gives port 0 and reads `address`.
        device: of the buffers.
    """

    def __init__(self, backend: str, address: tuple[str, int], rank: int, size: int, device: torch.device) -> None:
        self.backend, self.rank, self.size, self.device = backend, rank, size, device
        limit = timedelta(seconds=JOIN_S)
        self._store = TCPStore(*address, size, rank == 0, limit, wait_for_workers=False)
        self.address = address[0], self._store.port
        self._group: Any = None

    def join(self) -> None:
        """Waits for all processes."""
        limit = timedelta(seconds=JOIN_S)
        if self.backend == 'nccl':
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(self._store, self.rank, self.size, options)
        else:
            self._group = dist.ProcessGroupGloo(self._store, self.rank, self.size, limit)

    def broadcast(self, buffer: Tensor, watch: Callable[[], None] = lambda: None) -> None:
        """Sends the sender's bytes to all, and waits until they are there.

        Args:
            watch: called while waiting; raises an error that ends it.

        Raises:
            RuntimeError: a process is gone, or the sender has closed its end.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        if self.device.type == 'cuda':
            torch.cuda.set_device(self.device)
        try:
            work, asked = self._group.broadcast([buffer], options), time.monotonic()
            while not work.is_completed():
                if time.monotonic() - asked > CHECK_S:
                    watch()
                    if self._store.check([CLOSED]):
                        raise RuntimeError('the sender of weights has ended the transfer')
                    asked = time.monotonic()
                time.sleep(POLL_S)
            work.wait()
        except Exception:
            self.close()  # others may wait for this process to pass bytes on
            raise

    def buckets(self, sizes: list[int]) -> Iterator[Tensor]:
        """Receives buckets of these numbers of bytes. They share one buffer, so each must be copied to be kept."""
        buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self.device)
        for size in sizes:
            self.broadcast(buffer[:size])
            yield buffer[:size]

    def close(self) -> None:
        """Leaves the group, also in the middle of a broadcast."""
        group, self._group = self._group, None
        if self.rank == 0:
            self._store.set(CLOSED, '1')
        if group is not None:
            group.abort()
