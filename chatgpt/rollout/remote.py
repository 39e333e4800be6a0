"""An engine that generates on workers in other processes or on other nodes.

    begin(actor) ─▶ buckets of weights, version v, stored where every worker can read them
    submit(...)  ─▶ chunks of prompts, each a request with its version of the weights ─▶ the least loaded worker
    take(ticket) ◀─ samples in the order of the prompts; the replacement of a dead worker repeats its open requests

Workers generate while the trainer learns. A request refers to a version of the weights, and draws depend on (seed,
sample index, position), so samples depend neither on the number of workers nor on replacements.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import Abilities, CheckedEngine
from chatgpt.rollout.local import LocalEngine, check_local
from chatgpt.rollout.wire import (
    BUCKET_BYTES,
    Around,
    Manifest,
    ModelSpec,
    Request,
    fill_buckets,
    plan_buckets,
    policy_tensors,
    unpack_samples,
)
from chatgpt.types import Sample

_IDLE_CHECK_AFTER = 4  # calls of `take` after which idle workers are reported


class WorkerDied(RuntimeError):
    """Raised when a worker ended before it answered, with the reason if it is known."""


class RolloutWorkers(Protocol):
    """`num_workers` `RolloutWorker`s, numbered from 0, that process their requests in order.

    A class may define `dumps` if it can pickle more than `pickle.dumps`, and `beside = True` if its workers compute
    while this process does something else.
    """

    num_workers: int

    def start(self, spec: ModelSpec, engine_options: Mapping[str, Any], around: Around | None = None) -> None:
        """Starts all workers. Called once, before any other method; `around` is passed only if there is one."""

    def put(self, bucket: Tensor) -> Any:
        """Stores a (bytes,) uint8 CPU tensor where every worker can read it, as long as the returned handle exists."""

    def submit(self, worker: int, request: Request) -> Any:
        """Queues a request and returns a handle at once."""

    def call(self, worker: int, method: str, *args: Any) -> Any:
        """Queues a call of a worker's method and returns a handle for `wait`; may be called from any thread. Like
        `host`, it is used only by engines that do not send weights by `put`."""

    def host(self) -> str:
        """Returns an address of this machine that workers can reach."""

    def ready(self, handle: Any) -> bool:
        """Returns True if `wait` would not block."""

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


@dataclass(eq=False)
class Weights:
    """A version of the weights, kept as long as a request refers to it."""

    manifest: Manifest
    buckets: list[Any] = field(default_factory=list)
    """handles of `RolloutWorkers.put`; empty if the version is sent to workers in another way"""
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """in that case the tensors, to make buckets for a replaced worker"""


@dataclass(eq=False)
class _Chunk:
    """The part of a call that is sent to one worker."""

    call: Call
    request: Request | None  # None once answered, like the weights, so that their memory is freed
    weights: Weights | None
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
        bucket_bytes: maximum number of bytes in a bucket of weights.
        max_restarts: number of consecutive deaths of a worker, without an answer in between, that are tolerated.
        engine_options: keyword arguments of the workers' `LocalEngine`.
        slice_tokens: with `max_staleness`, responses are generated in parts of at most so many tokens, each by a free
            worker with the newest weights, `chunk_size` responses at a time; see `chatgpt.trainer.sample_queue`.
    """

    abilities = Abilities(reproducible=True, copies_weights=True, answers_ahead=True, takes_environments=True)

    def __init__(
        self,
        workers: RolloutWorkers,
        *,
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
        self._weights: Weights | None = None
        self._queues: list[list[_Chunk]] = [[] for _ in range(workers.num_workers)]
        """unanswered chunks by worker, in the order in which they were sent"""
        self._deaths = [0] * workers.num_workers
        self._num_taken = self._most_busy = 0
        self._closed = False

    def _check_options(self) -> None:
        LocalEngine(**self.engine_options)  # raises for invalid options

    def put_around(self, around: Around) -> None:
        """Makes each worker wrap its engine as `around(engine)`, for example in an engine of episodes, with
        environments that then run in the workers. Requests then contain whole prompts with columns, which are not
        checked here.

        Raises:
            ValueError: the workers have a different `around` or started without one, or it cannot be pickled.
        """
        try:
            packed = getattr(self.workers, 'dumps', pickle.dumps)(around)
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
        self._receive_ready()
        tensors = self._select_tensors(tensors)
        self.version += 1
        assert self._handshake is not None
        manifest = plan_buckets(
            tensors, version=self.version, handshake=self._handshake, bucket_bytes=self.bucket_bytes
        )
        self._weights = self._publish_weights(manifest, tensors)

    def _spec_of(self, model: Any) -> ModelSpec:
        return ModelSpec.of(model)

    def tensors_of(self, model: Any) -> Mapping[str, Tensor]:
        """Returns tied tensors only once, because the workers' model has the same class and ties them too."""
        return policy_tensors(model)

    def _select_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the tensors that the workers' model takes. Called after the workers have started."""
        return tensors

    def _publish_weights(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Weights:
        """Makes a version of the weights available to the workers before requests refer to it."""
        return Weights(manifest, self._buckets(manifest, tensors))

    def _buckets(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> list[Any]:
        return [self.workers.put(bucket) for bucket in fill_buckets(manifest, tensors)]

    def check_weights(self) -> None:
        """Does nothing: workers check weights when they load them, and `_receive` rejects samples of unchecked ones."""

    def check(self, config: Any, call: Call) -> list[int]:
        return [] if self.around is not None else check_local(config, call)

    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        """Generates a call, and raises the workers' errors."""
        return self.take(self._submit(call))

    def end(self) -> None:
        """Releases the weights; those of open requests are kept until they are answered."""
        super().end()
        self._weights = None

    # ------------------------------------------------------------------ asking now, taking later

    def submit(self, call: Call, weights: Weights | None = None) -> Ticket:
        """See `RolloutEngine.submit`. `weights` from `latest` may be used after `end`, for a call whose prompts are not
        checked, since they are those of an earlier one, longer by a part of the response."""
        if weights is None:
            self.checked(call)
        return self._submit(call, weights)

    def latest(self) -> Weights | None:
        """Returns the weights of the latest `begin`, which are kept as long as a caller has them."""
        return self._weights

    def can_use(self, weights: Weights) -> bool:
        """Returns True if workers can get these weights: they have them, or there are buckets of them."""
        return bool(weights.buckets) or weights.manifest.version == self.version

    def _submit(self, call: Call, weights: Weights | None = None) -> Ticket:
        weights = weights or self._weights
        assert weights is not None
        ticket = Ticket(weights.manifest.version)
        size = max(self._chunk_size(len(call.prompts)), 1)
        for start in range(0, len(call.prompts), size):
            part = call.part(slice(start, start + size))
            request = Request.of(weights.manifest, weights.buckets, part, whole=self.around is not None)
            chunk = _Chunk(part, request, weights)
            worker = min(range(len(self._queues)), key=lambda w: sum(len(c.call.prompts) for c in self._queues[w]))
            self._send(chunk, worker)
            ticket.chunks.append(chunk)
        return ticket

    def _chunk_size(self, num_prompts: int) -> int:
        return self.chunk_size or num_prompts

    def take(self, ticket: Ticket) -> list[Sample]:
        """Waits for the samples of a ticket and returns them. Raises the worker's error, or RuntimeError if a worker
        died more than `max_restarts` times."""
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

    def _send(self, chunk: _Chunk, worker: int) -> None:
        assert chunk.request is not None
        chunk.worker = worker
        self._queues[worker].append(chunk)
        chunk.handle = self.workers.submit(worker, chunk.request)

    def _receive(self, chunk: _Chunk) -> None:
        """Waits for one chunk. A dead worker is replaced, and its unanswered chunks are sent again."""
        assert chunk.request is not None
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
        if packed.version != chunk.request.manifest.version or len(packed.lengths) != len(call.prompts):
            raise RuntimeError(
                f'rollout worker {chunk.worker} answered with {len(packed.lengths)} samples of weights '
                f'{packed.version}; asked for {len(call.prompts)} of weights {chunk.request.manifest.version}'
            )
        if packed.difference is None:
            raise RuntimeError(
                f'rollout worker {chunk.worker} answered without having held its log-probs against the '
                "actor's: take_weights calls manifest.handshake.check, and samples are packed with its difference"
            )
        self.difference = packed.difference
        chunk.samples = unpack_samples(packed, call.prompts, call.indices, call.groups, call.sampling.temperature)
        chunk.request = chunk.weights = chunk.handle = None
        self._queues[chunk.worker].remove(chunk)
        self._deaths[chunk.worker] = 0

    def _replace(self, worker: int, error: WorkerDied) -> None:
        lost, self._queues[worker] = self._queues[worker], []
        of = (
            f'on samples {lost[0].call.indices[0]} to {lost[-1].call.indices[-1]}'
            if lost
            else 'while it was given weights'
        )
        self._count_death(worker, of, error)
        num_prompts = sum(len(c.call.prompts) for c in lost)
        first = f', from sample {lost[0].call.indices[0]} on' if lost else ''
        what = f'generates its {num_prompts} prompts again{first}' if lost else 'goes on'
        warnings.warn(f'rollout worker {worker} died ({error}); a new one {what}', stacklevel=4)
        while True:
            self.num_replaced += 1
            self.workers.replace(worker)
            try:
                self._prepare_worker(worker)
                break
            except WorkerDied as died:
                self._count_death(worker, 'as it started', died)
        for weights in {id(w): w for w in (self._weights, *(c.weights for c in lost)) if w is not None}.values():
            if not weights.buckets and weights.kept:
                weights.buckets = self._buckets(weights.manifest, weights.kept)
        for chunk in lost:
            assert chunk.request is not None and chunk.weights is not None
            chunk.request = replace(chunk.request, buckets=chunk.weights.buckets)
            self._send(chunk, worker)

    def _count_death(self, worker: int, when: str, error: WorkerDied) -> None:
        """Counts a death of a worker. Raises RuntimeError if it is more than `max_restarts`."""
        self._deaths[worker] += 1
        if self._deaths[worker] > self.max_restarts:
            raise RuntimeError(
                f'rollout worker {worker} died {self._deaths[worker]} times in a row {when}: {error}'
            ) from error

    def _prepare_worker(self, worker: int) -> None:
        """Prepares a new worker for requests."""

    def _receive_ready(self) -> None:
        """Receives finished chunks, to free their weights and to notice dead workers before new requests are sent."""
        for queue in self._queues:
            while queue and self.workers.ready(queue[0].handle):
                before = self.num_replaced
                self._receive(queue[0])
                if self.num_replaced != before:
                    break

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
        self._weights = None
        for queue in self._queues:
            queue.clear()
        self.workers.close()
