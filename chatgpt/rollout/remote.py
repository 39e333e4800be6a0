"""The engine whose workers live elsewhere.

    begin(actor) ─▶ buckets of weights, version v, put where every worker can read them
    submit(...)  ─▶ chunks of prompts, each a request that names its weights ─▶ the least loaded worker
    take(ticket) ◀─ samples in the order of the prompts; what a dead worker held is generated again by its replacement

What is submitted is worked on while the trainer learns. As a request names its weights, and draws follow (seed, sample
index, position), neither the number of workers nor a death can change a sample.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
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

_FEW = 4  # answers after which idle workers are reported


class WorkerDied(RuntimeError):
    """A worker ended before it answered; says why, where that is known."""


class RolloutWorkers(Protocol):
    """`num_workers` `RolloutWorker`s somewhere, numbered from 0. Each answers its requests one after another."""

    num_workers: int

    def start(self, spec: ModelSpec, engine_options: Mapping[str, Any], around: Around | None = None) -> None:
        """Start all workers. Called once, before anything else; `around` is given only where there is one. A class
        whose pickling can do more than `pickle.dumps` has it as a method `dumps`."""

    def put(self, bucket: Tensor) -> Any:
        """Copy a (bytes,) uint8 CPU tensor to where every worker can read it; kept as long as the returned handle
        is."""

    def submit(self, worker: int, request: Request) -> Any:
        """Queue a request; returns a handle at once."""

    def call(self, worker: int, method: str, *args: Any) -> Any:
        """Queue a call of a worker's method behind what was queued there before; a handle for `wait`. Any thread may.
        Only engines that bring weights to their workers another way than by `put` call it, and `host`."""

    def host(self) -> str:
        """An address of this process's machine that workers can reach."""

    def ready(self, handle: Any) -> bool:
        """Whether `wait` would return (or raise) at once."""

    def wait(self, handle: Any) -> Any:
        """The answer, `PackedSamples` of a request. Raises `WorkerDied`, or what the worker raised."""

    def cancel(self, handle: Any) -> None:
        """The answer is not wanted any more."""

    def replace(self, worker: int) -> None:
        """Put a new worker in the place of a dead one. What was queued there is lost."""

    def close(self) -> None:
        """End all workers. May be called twice."""


@dataclass(eq=False)
class Weights:
    """One version of the weights, held as long as a request names it."""

    manifest: Manifest
    buckets: list[Any] = field(default_factory=list)
    """what `RolloutWorkers.put` gave; empty where workers get this version another way"""
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """then: what to make buckets of for a worker that has lost it"""


@dataclass(eq=False)
class _Chunk:
    """Some prompts of a call, at one worker."""

    call: Call
    request: Request | None  # None once it is answered, and so the weights, which can be freed
    weights: Weights | None
    worker: int = 0
    handle: Any = None
    samples: list[Sample] | None = None
    error: Exception | None = None  # what its worker raised


@dataclass(eq=False)
class Ticket:
    """What `submit` gives for `take`."""

    version: int
    """of the weights that generate: the count of `begin`s"""
    chunks: list[_Chunk] = field(default_factory=list)
    taken: bool = False


class RemoteEngine(CheckedEngine):
    """Generates on workers that have their own copy of the model. Draws are reproducible.

    Args:
        workers: not started yet; this engine starts and closes them.
        chunk_size: most prompts of a chunk, which is for one worker. None sends a request whole, which on a CPU
            computes what a `LocalEngine` would, to the bit; then only several requests keep several workers busy.
        bucket_bytes: most bytes of one bucket of weights.
        max_restarts: deaths of one worker in a row, without an answer in between, before the engine gives up.
        engine_options: keywords of the workers' `LocalEngine`s.
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
    ) -> None:
        if (chunk_size is not None and chunk_size < 1) or bucket_bytes < 8 or max_restarts < 0:
            raise ValueError(
                f'RemoteEngine: chunk_size={chunk_size}, bucket_bytes={bucket_bytes}, max_restarts={max_restarts}; '
                'give at least 1 prompt, 8 bytes and 0 restarts'
            )
        self.engine_options = dict(engine_options or {})
        self._check_options()
        self.workers, self.chunk_size, self.bucket_bytes = workers, chunk_size, bucket_bytes
        self.max_restarts = max_restarts
        self.version = 0
        """of the weights that were sent last: the count of `begin`s"""
        self.num_replaced = 0
        """workers that died and were replaced"""
        self.spec: ModelSpec | None = None
        self.around: Around | None = None
        """what the workers put around their engines; see `put_around`"""
        self._packed_around = b''
        self._weights: Weights | None = None
        self._queues: list[list[_Chunk]] = [[] for _ in range(workers.num_workers)]
        """chunks without an answer, by worker, in the order in which they were sent"""
        self._deaths = [0] * workers.num_workers
        self._num_taken = self._most_busy = 0
        self._closed = False

    def _check_options(self) -> None:
        LocalEngine(**self.engine_options)  # for its errors

    def put_around(self, around: Around) -> None:
        """Let the workers answer with `around(their LocalEngine)`, such as an engine of episodes, which then runs its
        environments where the workers are. They get whole prompts, columns included, which are not checked here.

        Raises:
            ValueError: the workers have another, or have started without; or it cannot be sent to them.
        """
        try:
            packed = getattr(self.workers, 'dumps', pickle.dumps)(around)
        except Exception as error:  # what a pickle method raises is up to it
            raise ValueError(
                f'the environment cannot be sent to rollout workers ({type(error).__name__}: '
                f'{next(iter(str(error).splitlines()), "")}); give a class or function of a module, or its name'
            ) from error
        if packed != self._packed_around and (self.spec is not None or self.around is not None):
            raise ValueError('RemoteEngine: its workers have another environment, or none; make a new engine')
        self.around, self._packed_around = around, packed

    # ------------------------------------------------------------------ the protocol of an engine

    def transfer(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        """Send the weights as a new version. The first call starts the workers.

        Raises:
            ValueError: another model than before, or a closed engine.
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
        self._sweep()
        tensors = self._wanted(tensors)
        self.version += 1
        assert self._handshake is not None
        manifest = plan_buckets(
            tensors, version=self.version, handshake=self._handshake, bucket_bytes=self.bucket_bytes
        )
        self._weights = self._bring(manifest, tensors)

    def _spec_of(self, model: Any) -> ModelSpec:
        return ModelSpec.of(model)

    def tensors_of(self, model: Any) -> Mapping[str, Tensor]:
        """Each tensor once: a worker's model is of the same class and ties what this one ties."""
        return policy_tensors(model)

    def _wanted(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those that workers, which have been started, have a place for."""
        return tensors

    def _bring(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Weights:
        """Put weights where workers find them before they answer requests that name them."""
        return Weights(manifest, self._buckets(manifest, tensors))

    def _buckets(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> list[Any]:
        return [self.workers.put(bucket) for bucket in fill_buckets(manifest, tensors)]

    def check_weights(self) -> None:
        """Workers do when they have taken them, and `_receive` refuses samples of one that has not."""

    def check(self, config: Any, call: Call) -> list[int]:
        return [] if self.around is not None else check_local(config, call)

    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        """What a worker raises is raised here."""
        return self.take(self._submit(call))

    def end(self) -> None:
        """Let go of the weights; those of requests under way stay until they are answered."""
        super().end()
        self._weights = None

    # ------------------------------------------------------------------ asking now, taking later

    def submit(self, call: Call) -> Ticket:
        """See `RolloutEngine.submit`."""
        self.checked(call)
        return self._submit(call)

    def _submit(self, call: Call) -> Ticket:
        assert self._weights is not None
        weights, ticket = self._weights, Ticket(self._weights.manifest.version)
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
        """The samples of a ticket, once; waits for them. Raises what a worker raised, RuntimeError when workers die
        again and again."""
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

    def cancel(self, ticket: Ticket) -> None:
        """Forget a ticket; what is not generated yet never will be."""
        for chunk in ticket.chunks:
            if chunk in self._queues[chunk.worker]:
                self._queues[chunk.worker].remove(chunk)
                self.workers.cancel(chunk.handle)
        ticket.taken = True
        ticket.chunks.clear()

    # ------------------------------------------------------------------ workers

    def _send(self, chunk: _Chunk, worker: int) -> None:
        assert chunk.request is not None
        chunk.worker = worker
        self._queues[worker].append(chunk)
        chunk.handle = self.workers.submit(worker, chunk.request)

    def _receive(self, chunk: _Chunk) -> None:
        """Wait for one chunk. A dead worker is replaced, and gets everything again that it had not answered."""
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
                self._welcome(worker)
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
        """Raises RuntimeError when it was one too many."""
        self._deaths[worker] += 1
        if self._deaths[worker] > self.max_restarts:
            raise RuntimeError(
                f'rollout worker {worker} died {self._deaths[worker]} times in a row {when}: {error}'
            ) from error

    def _welcome(self, worker: int) -> None:
        """What a new worker needs before it is given requests."""

    def _sweep(self) -> None:
        """Take in what is there already: it frees weights, and a death is noticed before new work is given out."""
        for queue in self._queues:
            while queue and self.workers.ready(queue[0].handle):
                before = self.num_replaced
                self._receive(queue[0])
                if self.num_replaced != before:
                    break

    def _check_idle(self) -> None:
        """Say once, after a few answers, when there was never as much to do as there are workers."""
        self._most_busy = max(self._most_busy, sum(map(bool, self._queues)))
        self._num_taken += 1
        if self._num_taken == _FEW and self._most_busy < len(self._queues):
            warnings.warn(
                f'only {self._most_busy} of {len(self._queues)} rollout workers had something to do at a time: '
                'requests go out whole. Set chunk_size to cut them, or keep more of them in flight',
                stacklevel=4,
            )

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """End the workers. Requests under way are lost."""
        self._closed = True
        self._weights = None
        for queue in self._queues:
            queue.clear()
        self.workers.close()
