"""An engine that generates on workers in other processes or on other nodes.

    begin(actor) ─▶ waits for open requests, then sends version v of the weights to every worker, a bucket at a time
    submit(...)  ─▶ chunks of prompts, each a request for version v ─▶ the least loaded worker
    take(ticket) ◀─ samples in the order of the prompts; another worker with version v repeats those of a dead one

Workers generate while the trainer learns. No copy of the weights is kept beside the workers': a worker that replaces a
dead one gets the weights of the next `begin`. A request is for one version of the weights, and draws depend on (seed,
sample index, position), so samples depend neither on the number of workers nor on deaths.
"""

from __future__ import annotations

import pickle
import socket
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from chatgpt.rollout.call import Call
from chatgpt.rollout.connection import Address, close, connect, interrupt, send
from chatgpt.rollout.engine import Abilities, CheckedEngine, WeightsLost
from chatgpt.rollout.local import LocalEngine, check_local
from chatgpt.rollout.wire import (
    BUCKET_BYTES,
    Around,
    Manifest,
    ModelSpec,
    Request,
    fill_buckets,
    merged,
    plan_buckets,
    policy_tensors,
    unpack_samples,
)
from chatgpt.types import Sample

_IDLE_CHECK_AFTER = 4  # calls of `take` after which idle workers are reported


class WorkerDied(RuntimeError):
    """Raised when a worker ended before it answered, with the reason if it is known."""


class WorkersLost(RuntimeError):
    """Raised when a worker and those in its place died more than `max_restarts` times in a row."""


class RolloutWorkers(Protocol):
    """`num_workers` `RolloutWorker`s, numbered from 0, that process their requests in order.

    A class may define `dumps` if it can pickle more than `pickle.dumps`, and `beside = True` if its workers compute
    while this process does something else; without it weights go through `put`.
    """

    num_workers: int

    def start(self, spec: ModelSpec, engine_options: Mapping[str, Any], around: Around | None = None) -> None:
        """Starts all workers. Called once, before any other method; `around` is passed only if there is one."""

    def put(self, bucket: Tensor) -> Any:
        """Stores a (bytes,) uint8 CPU tensor where every worker can read it, as long as the returned handle exists.
        Used only where ranks and workers cannot connect."""

    def submit(self, worker: int, request: Request) -> Any:
        """Queues a request and returns a handle at once."""

    def call(self, worker: int, method: str, *args: Any) -> Any:
        """Queues a call of a worker's method and returns a handle for `wait`; may be called from any thread."""

    def first(self, handles: Sequence[Any], timeout_s: float | None = None) -> int | None:
        """Returns the position of the handle to wait for first; None if none is ready after `timeout_s`. Used only by
        engines with `slice_tokens`."""

    def add(self) -> None:
        """Starts one more worker. Used only by `RemoteEngine.add_worker`."""

    def wait(self, handle: Any) -> Any:
        """Returns the answer, `PackedSamples` for a request. Raises `WorkerDied`, or the worker's own error."""

    def cancel(self, handle: Any) -> None:
        """Cancels a request."""

    def replace(self, worker: int) -> None:
        """Replaces a dead worker by a new one, with an empty queue."""

    def close(self) -> None:
        """Stops all workers. May be called twice."""


class SendingRanks(Protocol):
    """The ranks that send weights together; see `SharedEngine`."""

    rank: int
    world_size: int

    def all_gather_object(self, obj: Any) -> list[Any]: ...

    def broadcast_object(self, obj: Any, src: int = 0) -> Any: ...


class Served(NamedTuple):
    """How a worker is sent all buckets by one rank."""

    way: str
    rank: int


class Order(NamedTuple):
    """What rank 0 tells the others: to send their share of a version of the weights."""

    manifest: Manifest
    addresses: dict[int, Address]
    """by worker"""


@dataclass(eq=False)
class _Chunk:
    """The part of a call that is sent to one worker."""

    call: Call
    request: Request
    worker: int = 0
    handle: Any = None
    samples: list[Sample] | None = None
    error: Exception | None = None  # raised by the worker


@dataclass(eq=False)
class Ticket:
    """A submitted call, to be passed to `take`."""

    version: int
    """version of the weights that generate: the number of calls of `begin`"""
    chunks: list[_Chunk] = field(default_factory=list)
    taken: bool = False


class RemoteEngine(CheckedEngine):
    """Generates on workers with their own copies of the model. Draws are reproducible.

    Args:
        workers: not started yet; this engine starts and closes them.
        chunk_size: maximum number of prompts that are sent to one worker together. None sends each call to a single
            worker, with the same bits as a `LocalEngine` on a CPU; several workers are then busy only if several calls
            are in progress.
        bucket_bytes: maximum number of bytes in a bucket of weights. One bucket exists at a time beside the trainer's
            model (two with the store) and one beside a worker's.
        max_restarts: number of consecutive deaths of a worker, without an answer in between, that are tolerated.
        engine_options: keyword arguments of the workers' `LocalEngine`.
        weight_transfer: 'tcp' sends weights over connections from every rank to every worker; 'store' by
            `RolloutWorkers.put`, the last resort; 'auto' uses the store only if ranks cannot connect to workers.
        slice_tokens: with `max_staleness`, responses are generated in parts of at most so many tokens, each by a free
            worker with the newest weights, `chunk_size` responses at a time; see `chatgpt.trainer.sample_queue`.
    """

    abilities = Abilities(reproducible=True, copies_weights=True, answers_ahead=True, takes_environments=True)
    transfers: tuple[str, ...] = ('auto', 'tcp', 'store')
    """values of `weight_transfer`"""

    def __init__(
        self,
        workers: RolloutWorkers,
        *,
        weight_transfer: str = 'auto',
        chunk_size: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        max_restarts: int = 3,
        engine_options: Mapping[str, Any] | None = None,
        slice_tokens: int | None = None,
    ) -> None:
        if slice_tokens is not None and (slice_tokens < 1 or chunk_size is None):
            raise ValueError(
                f'RemoteEngine: slice_tokens={slice_tokens} with chunk_size={chunk_size}; give at least 1 token, and '
                'as chunk_size how many responses a worker generates at a time'
            )
        if (chunk_size is not None and chunk_size < 1) or bucket_bytes < 8 or max_restarts < 0:
            raise ValueError(
                f'RemoteEngine: chunk_size={chunk_size}, bucket_bytes={bucket_bytes}, max_restarts={max_restarts}; '
                'give at least 1 prompt, 8 bytes and 0 restarts'
            )
        if weight_transfer not in self.transfers:
            raise ValueError(f'weight_transfer={weight_transfer!r} is not one of {", ".join(self.transfers)}')
        self.weight_transfer = weight_transfer
        self.engine_options = dict(engine_options or {})
        self._check_options()
        self.workers, self.chunk_size, self.bucket_bytes = workers, chunk_size, bucket_bytes
        self.max_restarts, self.slice_tokens = max_restarts, slice_tokens
        self.version = 0
        """version of the latest weights: the number of calls of `begin`"""
        self.num_replaced = 0
        """number of workers that died and were replaced"""
        self.spec: ModelSpec | None = None
        self.around: Around | None = None
        """see `put_around`"""
        self._packed_around = b''
        self.sending_ranks: SendingRanks | None = None
        """ranks that each send a share of the weights; None if this process sends all"""
        self._served: dict[int, Served] = {}
        """by worker; every rank sends a share of the buckets to the others"""
        self.by_store = weight_transfer == 'store' or (
            weight_transfer == 'auto' and not getattr(workers, 'beside', False)
        )
        """True if weights go through `RolloutWorkers.put`"""
        self._held: list[int | None] = [None] * workers.num_workers
        """version of each worker's weights"""
        self._queues: list[list[_Chunk]] = [[] for _ in range(workers.num_workers)]
        """unanswered chunks by worker, in the order in which they were sent"""
        self._deaths = [0] * workers.num_workers
        self._num_taken = self._most_busy = 0
        self._closed = False

    def _check_options(self) -> None:
        LocalEngine(**self.engine_options)  # raises for invalid options

    def put_around(self, around: Around, identity: Any = None) -> None:
        """Makes each worker wrap its engine as `around(engine)`, for example in an engine of episodes, with
        environments that then run in the workers. Requests then contain whole prompts with columns, which are not
        checked here. `identity` is pickled to the same bytes for the same environment; None: `around`.

        Raises:
            ValueError: the workers have a different `around` or started without one, or it cannot be pickled.
        """
        try:
            dumps = getattr(self.workers, 'dumps', pickle.dumps)
            dumps(around)  # raises for what cannot be sent
            packed = dumps(around if identity is None else identity)
        except Exception as error:  # pickle methods may raise anything
            raise ValueError(
                f'the environment cannot be sent to rollout workers ({type(error).__name__}: '
                f'{next(iter(str(error).splitlines()), "")}); give a class or function of a module, or its name'
            ) from error
        if packed != self._packed_around and (self.spec is not None or self.around is not None):
            raise ValueError('RemoteEngine: its workers have another environment, or none; make a new engine')
        self.around, self._packed_around = around, packed

    # ------------------------------------------------------------------ the protocol of an engine

    def transfer(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        """Sends the weights as a new version. The first call starts the workers.

        Raises:
            ValueError: the model differs from the one before, or the engine is closed.
        """
        if self._closed:
            raise ValueError('RemoteEngine.begin: the engine is closed; make a new one')
        spec = self._spec_of(model)
        if self.spec is None:
            self.workers.start(spec, self.engine_options, *([] if self.around is None else [self.around]))
            self.spec = spec
        elif not self.spec.same_as(spec):
            raise ValueError(
                f'RemoteEngine: its workers hold a {self.spec.model_class.__name__} of another configuration; make an '
                'engine for this model'
            )
        self._receive_open()
        tensors = self._select_tensors(tensors)
        self.version += 1
        assert self._handshake is not None
        manifest = plan_buckets(
            tensors, version=self.version, handshake=self._handshake, bucket_bytes=self.bucket_bytes
        )
        self._held = [None] * self.workers.num_workers
        while waiting := [w for w, version in enumerate(self._held) if version is None]:
            for worker, error in self._send_weights(waiting, manifest, tensors).items():
                self._replace(worker, error)

    def _spec_of(self, model: Any) -> ModelSpec:
        return ModelSpec.of(model)

    def tensors_of(self, model: Any) -> Mapping[str, Tensor]:
        """Returns tied tensors only once, because the workers' model has the same class and ties them too."""
        return policy_tensors(model)

    def _select_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the tensors that the workers' model takes. Called after the workers have started."""
        return tensors

    def _send_weights(
        self, workers: Sequence[int], manifest: Manifest, tensors: Mapping[str, Tensor]
    ) -> dict[int, WorkerDied]:
        """Sends a version of the weights, and sets `_held` of the workers that have it. Returns those that died."""
        if not self.by_store and (died := self._send_by_connections(workers, manifest, tensors)) is not None:
            return died
        return self._send_by_store(workers, manifest, tensors)

    def _send_by_connections(
        self, workers: Sequence[int], manifest: Manifest, tensors: Mapping[str, Tensor]
    ) -> dict[int, WorkerDied] | None:
        """Sends over connections to the workers, together with other ranks. Returns None if there can be none."""
        addresses, died = self._each(workers, 'listen')
        if died:
            return died
        order = Order(manifest, addresses)
        if self.sending_ranks is not None:
            self.sending_ranks.broadcast_object(order)
        connections, error = self._connect(order, next(iter(tensors.values())).device)
        if error:
            if died := self._each(workers, 'listen')[1]:
                return died
            if self.weight_transfer != 'auto':
                raise RuntimeError(f'weight_transfer={self.weight_transfer!r}: {error}')
            warnings.warn(f'{error}; weights go through the store of the workers', stacklevel=6)
            self.by_store, self._served = True, {}
            return None
        with ThreadPoolExecutor(1, 'chatgpt-weights') as pool:
            sending = pool.submit(self._send_own, order, connections, tensors)
            handles: dict[int, Any] = {}
            for worker in workers:
                if (served := self._served.get(worker)) is not None:
                    handles[worker] = self.workers.call(worker, 'receive_from', manifest, served.way)
                else:
                    handles[worker] = self.workers.call(worker, 'receive', manifest, self._place[1])
            try:
                for worker, handle in handles.items():
                    if worker in (found := self._wait_for({worker: handle})[1]):
                        if worker in connections:
                            interrupt(connections[worker])  # a worker that hangs has not ended its own
                        died |= found
                    else:
                        self._held[worker] = manifest.version
            finally:
                for connection in connections.values():
                    interrupt(connection)
                if (cause := sending.exception()) is not None:
                    raise cause  # not what it made a worker raise
        return died

    def _send_own(self, order: Order, connections: dict[int, socket.socket], tensors: Mapping[str, Tensor]) -> None:
        """Sends the share of rank 0. Workers that wait for more after an error see that there will be none."""
        try:
            self._send_share(order, connections, tensors)
        finally:
            for connection in connections.values():
                interrupt(connection)

    @property
    def _place(self) -> tuple[int, int]:
        """Rank and number of ranks among those that send weights."""
        return (0, 1) if self.sending_ranks is None else (self.sending_ranks.rank, self.sending_ranks.world_size)

    def _of_ranks(self, value: Any) -> list[Any]:
        return [value] if self.sending_ranks is None else self.sending_ranks.all_gather_object(value)

    def _serve(self, addresses: Mapping[int, Address], device: torch.device) -> dict[int, Served]:
        """Returns which workers are sent all buckets by one rank, from GPU to GPU. A collective."""
        return {}

    def _connect(self, order: Order, device: torch.device) -> tuple[dict[int, socket.socket], str]:
        """Connects this rank, with weights on `device`, to its workers. Returns the connections, or why a rank has
        none. A collective."""
        (rank, _), connections, error = self._place, {}, ''
        served = self._serve(order.addresses, device)
        self._served = {w: s for w, s in self._served.items() if w not in order.addresses} | served
        mine = {w: a for w, a in order.addresses.items() if w not in served or served[w].rank == rank}
        try:
            connections = connect(mine, rank)
        except OSError as raised:
            error = f'rank {rank} cannot connect to rollout workers ({raised})'
        errors = list(filter(None, self._of_ranks(error)))
        if errors:
            close(connections)
        return connections, errors[0] if errors else ''

    def send_share(self, model: Any, order: Order) -> None:
        """Sends the share of a rank other than 0, which is called there when rank 0 sends its own. A worker that dies
        is noticed by rank 0."""
        connections, error = self._connect(order, next(model.parameters()).device)
        if error:
            return
        try:
            with merged(model):
                self._send_share(order, connections, self.tensors_of(model))
        finally:
            close(connections)

    def _send_share(self, order: Order, connections: dict[int, socket.socket], tensors: Mapping[str, Tensor]) -> None:
        """Sends this rank's buckets to the workers that it is connected to."""
        (rank, num_ranks), manifest = self._place, order.manifest
        send(connections, fill_buckets(manifest, tensors, range(rank, len(manifest.buckets), num_ranks)))

    def _send_by_store(
        self, workers: Sequence[int], manifest: Manifest, tensors: Mapping[str, Tensor]
    ) -> dict[int, WorkerDied]:
        """Puts one bucket at a time into the store, while the next is filled."""
        _, died = self._each(workers, 'start_loading', manifest)
        handles: dict[int, Any] = {}
        stored: Any = None
        for number, bucket in enumerate(fill_buckets(manifest, tensors)):
            died |= self._wait_for(handles)[1]
            stored = None  # frees the bucket before
            stored = self.workers.put(bucket)
            alive = [worker for worker in workers if worker not in died]
            handles = {worker: self.workers.call(worker, 'fetch_bucket', number, stored) for worker in alive}
        died |= self._wait_for(handles)[1]
        done, more = self._each([worker for worker in workers if worker not in died], 'finish_loading')
        for worker in done:
            self._held[worker] = manifest.version
        return died | more

    def _each(self, workers: Sequence[int], method: str, *args: Any) -> tuple[dict[int, Any], dict[int, WorkerDied]]:
        """Calls a method of workers. Returns the answers, and the errors of those that died."""
        return self._wait_for({worker: self.workers.call(worker, method, *args) for worker in workers})

    def _wait_for(self, handles: Mapping[int, Any]) -> tuple[dict[int, Any], dict[int, WorkerDied]]:
        answers, died = {}, {}
        for worker, handle in handles.items():
            try:
                answers[worker] = self.workers.wait(handle)
            except WorkerDied as error:
                died[worker] = error
        return answers, died

    def check_weights(self) -> None:
        """Does nothing: workers check weights when they load them, and `_receive` rejects samples of unchecked ones."""

    def check(self, config: Any, call: Call) -> list[int]:
        return [] if self.around is not None else check_local(config, call)

    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        """Generates a call, and raises the workers' errors."""
        return self.take(self._submit(call))

    # ------------------------------------------------------------------ asking now, taking later

    def submit(self, call: Call, version: int | None = None) -> Ticket:
        """See `RolloutEngine.submit`. The latest `version` may be given after `end`, for a call whose prompts are not
        checked, since they are those of an earlier one, longer by a part of the response."""
        if version is None:
            self.checked(call)
        assert version in (None, self.version), 'requests are for the latest weights'
        return self._submit(call)

    @property
    def ways(self) -> list[str]:
        """Transfer of weights to each worker."""
        other = 'store' if self.by_store else 'tcp'
        return [self._served[w].way if w in self._served else other for w in range(self.workers.num_workers)]

    @property
    def num_able(self) -> int:
        """Number of workers that have the latest weights."""
        return self._held.count(self.version)

    def _submit(self, call: Call) -> Ticket:
        ticket = Ticket(self.version)
        size = max(self._chunk_size(len(call.prompts)), 1)
        for start in range(0, len(call.prompts), size):
            part = call.part(slice(start, start + size))
            chunk = _Chunk(part, Request.of(self.version, part, whole=self.around is not None))
            self._send(chunk)
            ticket.chunks.append(chunk)
        return ticket

    def _chunk_size(self, num_prompts: int) -> int:
        return self.chunk_size or num_prompts

    def take(self, ticket: Ticket) -> list[Sample]:
        """Waits for the samples of a ticket and returns them. Raises the worker's error, WeightsLost if every worker
        with its weights has died, or RuntimeError if a worker died more than `max_restarts` times."""
        if ticket.taken:
            raise ValueError('RemoteEngine.take: this ticket was taken already; its samples count once')
        self._check_idle()
        for chunk in ticket.chunks:
            while chunk.samples is None and chunk.error is None:
                self._receive(chunk)
            if chunk.error is not None:
                self.cancel(ticket)
                raise chunk.error
        ticket.taken = True
        samples = [sample for chunk in ticket.chunks for sample in chunk.samples or ()]
        ticket.chunks.clear()
        return samples

    def first(self, tickets: Sequence[Ticket], timeout_s: float | None = None) -> Ticket | None:
        """See `RolloutEngine.first`; with `slice_tokens` the ticket that is answered first."""
        if self.slice_tokens is None:
            return tickets[0]
        handles = [next((c.handle for c in t.chunks if c.handle is not None), None) for t in tickets]
        if None in handles:
            return tickets[handles.index(None)]
        at = self.workers.first(handles, timeout_s)
        return None if at is None else tickets[at]

    def cancel(self, ticket: Ticket) -> None:
        """Cancels a ticket and its open requests."""
        for chunk in ticket.chunks:
            if chunk in self._queues[chunk.worker]:
                self._queues[chunk.worker].remove(chunk)
                self.workers.cancel(chunk.handle)
        ticket.taken = True
        ticket.chunks.clear()

    # ------------------------------------------------------------------ workers

    def add_worker(self) -> None:
        """Adds a worker while the others run; call it between phases, as from a callback."""
        if self.spec is None or type(self) is not RemoteEngine:  # others hold a link to each worker
            raise ValueError(
                f'{type(self).__name__}.add_worker: only a RemoteEngine whose workers have started takes more of them; '
                'give num_workers at the start'
            )
        self.workers.add()
        self._queues.append([])
        self._deaths.append(0)
        self._held.append(None)

    def _send(self, chunk: _Chunk) -> None:
        """Sends a chunk to the least loaded worker that has its weights. Without one the chunk fails."""
        able = [worker for worker, version in enumerate(self._held) if version == chunk.request.version]
        if not able:
            indices = chunk.call.indices
            chunk.error = WeightsLost(
                f'all rollout workers with weights {chunk.request.version} died before they had generated samples '
                f'{indices[0]} to {indices[-1]}; begin again, and ask for them again'
            )
            return
        chunk.worker = min(able, key=lambda w: sum(len(c.call.prompts) for c in self._queues[w]))
        self._queues[chunk.worker].append(chunk)
        chunk.handle = self.workers.submit(chunk.worker, chunk.request)

    def _receive(self, chunk: _Chunk) -> None:
        """Waits for one chunk. A dead worker is replaced, and its unanswered chunks are sent to others."""
        try:
            packed = self.workers.wait(chunk.handle)
        except WorkerDied as error:
            self._replace(chunk.worker, error)
            return
        except Exception as error:
            self._queues[chunk.worker].remove(chunk)
            chunk.error = error
            return
        call = chunk.call
        if packed.version != chunk.request.version or len(packed.lengths) != len(call.prompts):
            raise RuntimeError(
                f'rollout worker {chunk.worker} answered with {len(packed.lengths)} samples of weights '
                f'{packed.version}; asked for {len(call.prompts)} of weights {chunk.request.version}'
            )
        if packed.difference is None:
            raise RuntimeError(
                f'rollout worker {chunk.worker} answered without having held its log-probs against the '
                "actor's: finish calls manifest.handshake.check, and samples are packed with its difference"
            )
        self.difference = packed.difference
        chunk.samples = unpack_samples(packed, call.prompts, call.indices, call.groups, call.sampling.temperature)
        chunk.handle = None
        self._queues[chunk.worker].remove(chunk)
        self._deaths[chunk.worker] = 0

    def _replace(self, worker: int, error: WorkerDied) -> None:
        """Replaces a dead worker by one without weights, and sends its unanswered chunks to others."""
        lost, self._queues[worker], self._held[worker] = self._queues[worker], [], None
        of = (
            f'on samples {lost[0].call.indices[0]} to {lost[-1].call.indices[-1]}'
            if lost
            else 'while it was given weights'
        )
        self._deaths[worker] += 1
        if self._deaths[worker] > self.max_restarts:
            raise WorkersLost(
                f'rollout worker {worker} died {self._deaths[worker]} times in a row {of}: {error}'
            ) from error
        num_prompts = sum(len(c.call.prompts) for c in lost)
        first = f', from sample {lost[0].call.indices[0]} on' if lost else ''
        what = f'another generates its {num_prompts} prompts again{first}' if lost else 'a new one takes its place'
        warnings.warn(f'rollout worker {worker} died ({error}); {what}', stacklevel=4)
        self.num_replaced += 1
        self.workers.replace(worker)
        for chunk in lost:
            self._send(chunk)

    def _receive_open(self) -> None:
        """Waits for all requests: those of older weights must be answered before a worker gives them up."""
        while queue := next(filter(None, self._queues), None):
            self._receive(queue[0])

    def _check_idle(self) -> None:
        """Warns once, after a few calls, if not all workers have been busy at a time."""
        self._most_busy = max(self._most_busy, sum(map(bool, self._queues)))
        self._num_taken += 1
        if self._num_taken == _IDLE_CHECK_AFTER and self._most_busy < len(self._queues):
            warnings.warn(
                f'only {self._most_busy} of {len(self._queues)} rollout workers had something to do at a time: '
                'requests go out whole. Set chunk_size to cut them, or keep more of them in flight',
                stacklevel=4,
            )

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Stops the workers and discards open requests."""
        self._closed = True
        for queue in self._queues:
            queue.clear()
        self.workers.close()
