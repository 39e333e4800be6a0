"""TCP connections over which ranks send buckets of weights to rollout workers, made anew for each version.

    worker: Listener ─▶ address ─▶ every rank: connect
    rank r of R: send(buckets r, r + R, ...) to all workers at once ─▶ worker: Listener.buckets, in their order

A connection carries the bytes of buckets alone: both ends have the manifest. A bucket has one buffer on each side.
Where buckets go from GPU to GPU (`vllm_links`), the connection arranges that, and its end tells of a death.
"""

from __future__ import annotations

import secrets
import selectors
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from chatgpt.rollout.wire import Manifest, bucket_buffer

CONNECT_S = 20.0
"""seconds in which ranks and workers must find each other"""
ENDED = 'the connection to a rank ended before all of its weights were here'
_RANK_BYTES = 4


class Address(NamedTuple):
    """Where a worker waits for one version of the weights."""

    host: str
    port: int
    token: bytes
    """what a connection begins with, so that a stranger's is not taken for a rank's"""
    gpus: tuple[str, ...] = ()
    """unique ids of the worker's GPUs that can be sent buckets without the host"""
    group: bytes = b''
    """token of the address over which its GPUs have joined a rank in a group of NCCL"""


class Listener:
    """Waits for the ranks at a free port.

    Args:
        host: an address of this machine that the ranks can reach.
    """

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), backlog=1024)
        self.address = Address(host, self._server.getsockname()[1], secrets.token_bytes(16))

    def close(self) -> None:
        self._server.close()

    def buckets(self, manifest: Manifest, num_ranks: int) -> Iterator[Tensor]:
        """Yields the buckets in their order, (bytes,) uint8 on the CPU, in one buffer.

        Raises ConnectionError if a rank does not connect, or ends before it has sent its share.
        """
        ranks = self.accept(num_ranks)
        try:
            buffer = bucket_buffer(manifest.largest_bucket)
            for number in range(len(manifest.buckets)):
                bucket = buffer[: manifest.bucket_bytes(number)]
                _read(ranks[number % num_ranks], bucket.numpy().data)
                yield bucket
        finally:
            for connection in ranks.values():
                connection.close()

    def accept(self, num_ranks: int) -> dict[int, socket.socket]:
        """Returns the connections of this many ranks. Raises ConnectionError if one does not connect."""
        ranks: dict[int, socket.socket] = {}
        with self._server as server:
            server.settimeout(CONNECT_S)
            while len(ranks) < num_ranks:
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    raise ConnectionError(
                        f'{num_ranks} ranks should send weights, and only ranks {sorted(ranks)} have connected'
                    ) from None
                greeting = bytearray(len(self.address.token) + _RANK_BYTES)
                try:
                    connection.settimeout(CONNECT_S)
                    _read(connection, memoryview(greeting))
                except OSError:
                    greeting.clear()
                if secrets.compare_digest(bytes(greeting[:-_RANK_BYTES]), self.address.token):
                    connection.settimeout(None)
                    ranks[int.from_bytes(greeting[-_RANK_BYTES:])] = connection
                else:
                    connection.close()
        return ranks


def _read(connection: socket.socket, into: memoryview) -> None:
    while into:
        size = connection.recv_into(into)
        if not size:
            raise ConnectionError(ENDED)
        into = into[size:]


def connect(addresses: Mapping[int, Address], rank: int) -> dict[int, socket.socket]:
    """Connects to workers, by their numbers. Raises OSError if one cannot be reached."""
    found: dict[int, socket.socket] = {}
    try:
        for worker, address in addresses.items():
            found[worker] = socket.create_connection(address[:2], CONNECT_S)
            found[worker].sendall(address.token + rank.to_bytes(_RANK_BYTES))
            found[worker].setblocking(False)
    except OSError:
        close(found)
        raise
    return found


def send(connections: dict[int, socket.socket], buckets: Iterable[Tensor]) -> None:
    """Sends each bucket to all workers before the next one is filled, and closes the connections. One that fails is
    left out: what its worker answers says why."""
    alive = dict(connections)
    try:
        for bucket in buckets:
            left = {worker: bucket.numpy().data for worker in alive}
            with selectors.DefaultSelector() as selector:
                for worker, connection in alive.items():
                    selector.register(connection, selectors.EVENT_WRITE, worker)
                while left:
                    for key, _ in selector.select():
                        worker, connection = key.data, alive[key.data]
                        try:
                            left[worker] = left[worker][connection.send(left[worker]) :]
                        except BlockingIOError:
                            continue
                        except OSError:
                            del left[worker], alive[worker]
                        if not left.get(worker):
                            left.pop(worker, None)
                            selector.unregister(connection)
    finally:
        close(connections)


def interrupt(connection: socket.socket) -> None:
    """Ends a connection that another thread sends on."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended


def close(connections: Mapping[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
