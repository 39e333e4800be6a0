"""Sends buckets of weights from a rank's GPU to those of vLLM workers: by NCCL, or by CUDA IPC on the same GPU.

    worker: address with its GPUs ─▶ a rank: connect ─▶ Link.open ─▶ broadcast(buckets) ─▶ worker: receive_from

The connection carries the address of NCCL's group or the handles of IPC. Both ends keep it open while weights are sent,
so a death, for which NCCL would wait, ends it. A link sends in a thread, which is left behind if NCCL does not return.
"""

from __future__ import annotations

import socket
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.connection import Address

POLL_S = 0.1
"""seconds between looks at a connection while NCCL waits"""
STOPPING_S = 10.0
"""seconds in which a worker that made a sender fail ends its connection"""


def messages(connection: socket.socket) -> Connection:
    """Returns the connection for sending objects. It is closed apart from the socket; `interrupt` ends both."""
    connection.setblocking(True)
    return Connection(connection.dup().detach())


def join_group(host: str, port: int, rank: int, world_size: int, device: torch.device) -> Any:
    """Returns vLLM's NCCL communicator of a group whose rank 0 listens at this address. Waits for all ranks."""
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    group = stateless_init_process_group(host, port, rank, world_size, device)
    if group.disabled:
        raise RuntimeError('vLLM finds no NCCL here, or VLLM_DISABLE_PYNCCL is set')
    return group


def handle_of(bucket: Tensor) -> Any:
    """Returns what `bucket_of` needs in another process on the same GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(bucket)[1]


def bucket_of(handle: Any, device: torch.device) -> Tensor:
    """Returns a bucket of another process, which must keep it as long as it is read."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(handle)
    arguments[6] = device.index  # the GPU may have another number in the process that made it
    return rebuild_cuda_tensor(*arguments)


class Link:
    """Sends buckets to one worker.

    Args:
        way: 'nccl' or 'ipc'.
        address: the worker's, of the first version that it is sent.
    """

    def __init__(self, worker: int, way: str, address: Address) -> None:
        self.worker, self.way, self.name, self.num_gpus = worker, way, address.token, len(address.gpus)
        self.group: Any = None  # of NCCL: this process is rank 0
        self.error: Exception | None = None  # raised in the thread
        self.cause: Exception | None = None  # the same, if it is why sending failed

    def open(self, connection: socket.socket, device: torch.device) -> None:
        """Begins a version of the weights, with buckets on `device`."""
        self.connection, self.host = messages(connection), connection.getsockname()[0]
        self.given: SimpleQueue[Tensor | None] = SimpleQueue()
        self.sent: SimpleQueue[bool] = SimpleQueue()
        name = f'chatgpt-weights-{self.worker}'
        self.thread = threading.Thread(target=self._run, args=(device,), name=name, daemon=True)
        self.thread.start()

    def _run(self, device: torch.device) -> None:
        stream = None
        try:
            if device.type == 'cuda':
                torch.cuda.set_device(device)  # the current device is set per thread
                stream = torch.cuda.Stream(device)  # a worker that has died does not block other links
            if self.way == 'nccl':
                self._join(device)
            for bucket in iter(self.given.get, None):
                if self.way == 'ipc':
                    self.connection.send(handle_of(bucket))
                    self.connection.recv()
                else:
                    self.group.broadcast(bucket, 0, stream)
                    if stream is not None:
                        stream.synchronize()
                self.sent.put(True)
        except Exception as error:  # its traceback would keep the bucket and the group
            traceback.clear_frames(error.__traceback__)
            self.error = error
            self.sent.put(False)

    def _join(self, device: torch.device) -> None:
        """Joins the worker in a group, or tells it that the group is that of the last version."""
        if self.group is not None:
            self.connection.send(None)
            return
        with socket.socket() as free:
            free.bind((self.host, 0))
            port = free.getsockname()[1]
        self.connection.send((self.host, port))
        self.group = join_group(self.host, port, 0, 1 + self.num_gpus, device)

    def wait(self) -> bool:
        """Waits until the given bucket is sent. Returns False if that failed; the group is left then."""
        sent: bool | None = None
        while sent is None:
            try:
                sent = self.sent.get(timeout=POLL_S)
            except Empty:  # by NCCL a worker sends nothing: what there is to read is the end. By IPC the thread reads
                if self.way == 'nccl' and self.connection.poll():
                    with suppress(Empty):  # a worker that has received all ends it too
                        sent = self.sent.get(timeout=POLL_S)
                    sent = bool(sent)
        if not sent:
            # a worker that has failed is the cause, and its call says why
            self.cause = None if self.connection.poll(STOPPING_S) else self.error
            self.leave()
        return sent

    def close(self) -> None:
        """Ends a version. A thread that waits in NCCL for a worker that has failed is left behind."""
        self.given.put(None)
        self.connection.close()
        self.thread.join(STOPPING_S)

    def leave(self) -> None:
        """Leaves the group; may be called twice."""
        if self.group is not None:
            self.group.destroy()
            self.group = None


def broadcast(
    links: Sequence[Link], connections: Mapping[int, socket.socket], buckets: Iterable[Tensor], device: torch.device
) -> None:
    """Sends each bucket, on `device`, over all links before the next one is filled, until the workers have loaded all.
    A link that fails is left out: what its worker answers says why. Raises the error of one that failed by itself."""
    for link in links:
        link.open(connections[link.worker], device)
    alive, done = list(links), False
    try:
        for bucket in buckets if links else ():
            for link in alive:
                link.given.put(bucket)
            alive = [link for link in alive if link.wait()]
            if not alive:
                break
        for link in alive:
            link.connection.poll(None)  # until the worker ends it
        done = True
    finally:
        for link in links:
            if not done:
                link.leave()  # ends a broadcast that waits
            link.close()
            if not done:
                link.leave()  # of a group that the thread has joined since
    for link in links:
        if link.cause is not None:
            raise RuntimeError(
                f'sending weights to rollout worker {link.worker} by {link.way}: {type(link.cause).__name__}: '
                f'{link.cause}'
            ) from link.cause
