"""Rollout workers that generate with vLLM on several GPUs each, and are sent weights while the trainer learns.

    begin(actor) ─▶ a copy of the weights, version v ─▶ a thread for each worker sends it (NCCL; IPC on one GPU)
                    behind all that the worker was asked before, so it generates, receives, generates; begin returns
    the trainer learns: it changes its own weights, not the copy
    next begin   ─▶ waits until v is with every worker

The sending is vLLM's (`vllm.distributed.weight_transfer`, by name, in packed buffers, in the layout of a checkpoint);
each worker is a group of its own with the trainer, so that the death of one breaks no other's. Where it cannot be
(weights on a CPU, no vLLM here) weights go as buckets, as to every `RemoteEngine`'s workers; and so does a version that
a dead worker held, to the worker that takes its place.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import Abilities
from chatgpt.rollout.remote import RemoteEngine, RolloutWorkers, Ticket, Weights, WorkerDied
from chatgpt.rollout.vllm import check_sampling
from chatgpt.rollout.vllm_worker import OWN, VLLMSpec, name_of_device
from chatgpt.rollout.wire import Manifest, checkpoint_tensors, each_once
from chatgpt.types import Sample

WeightTransfer = Literal['auto', 'nccl', 'ipc', 'store']
SENT_FROM = ('cuda',)
"""devices of weights that NCCL and IPC take"""
STOPPING_S = 10.0
"""that a sender has to end after its worker has died"""


class VLLMRemoteEngine(RemoteEngine):
    """`RemoteEngine` whose workers run vLLM. Each sample has a seed of its own from (seed, sample index, position); its
    log-probs are recomputed by the trainer.

    Args:
        workers: see `RemoteEngine`. A worker's GPUs, `resources={'GPU': k}`, hold its model together (tensor
            parallelism).
        weight_transfer: how weights come to the workers. 'nccl': vLLM's NCCL transfer, from this process's GPU to
            others. 'ipc': its CUDA IPC transfer, to a worker on this process's own GPU. 'store': as buckets through
            `RolloutWorkers.put`. 'auto': for each worker the first of these that can be.
        chunk_size: see `RemoteEngine`; None cuts a request into equal parts, one for each worker.
        engine_options: keywords of `vllm.LLM`, and memory_share: of each GPU, 0.9.

    Raises:
        ValueError: options that a worker sets itself, ...

    >>> with VLLMRemoteEngine(RayWorkers(2, resources={'GPU': 2})) as engine:                     # doctest: +SKIP
    ...     trainer = PPOTrainer(..., engine=engine, max_staleness=1, tis_cap=2.0)
    """

    abilities = Abilities(exact_logprobs=False, copies_weights=True, answers_ahead=True, takes_environments=True)

    def __init__(self, workers: RolloutWorkers, *, weight_transfer: WeightTransfer = 'auto', **options: Any) -> None:
        if weight_transfer not in ('auto', 'nccl', 'ipc', 'store'):
            raise ValueError(f'weight_transfer={weight_transfer!r} is not one of auto, nccl, ipc, store')
        self.weight_transfer = weight_transfer
        super().__init__(workers, **options)
        self.tensor_parallel = _tensor_parallel(workers)
        self._has_head: bool | None = None
        """whether the workers' model has an output layer of its own; known after the first `begin`"""
        self.ways: list[str] = []
        """how weights come to each worker: 'nccl', 'ipc' or 'store'; known after the first `begin`"""
        self._links: list[_Link | None] = []
        self._sending: list[_Sending] = []
        self._moving: threading.Thread | None = None
        """`_to_host`, after them"""

    def _check_options(self) -> None:
        taken = sorted(set(self.engine_options) & set(OWN))
        if taken:
            raise ValueError(f'VLLMRemoteEngine sets {taken[0]!r} itself; leave it out')
        share = self.engine_options.get('memory_share', 0.9)
        if not 0 < share < 1:
            raise ValueError(f'VLLMRemoteEngine: memory_share={share} must lie between 0 and 1')

    def check(self, config: Any, call: Call) -> list[int]:
        check_sampling(call.sampling)
        return [] if self.around is not None else call.checked(config)

    def _chunk_size(self, num_prompts: int) -> int:
        return self.chunk_size or -(-num_prompts // self.workers.num_workers)

    def _spec_of(self, model: Any) -> VLLMSpec:
        self._check_way(next(model.parameters()).device)
        spec = super()._spec_of(model)
        return VLLMSpec(**vars(spec), tensor_parallel=self.tensor_parallel)

    def tensors_of(self, model: Any) -> Mapping[str, Tensor]:
        # Views of a received buffer are aligned when larger elements come first.
        return dict(sorted(checkpoint_tensors(model).items(), key=lambda item: -item[1].dtype.itemsize))

    # ------------------------------------------------------------------ weights

    def _wanted(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._has_head is None:
            self._has_head = self.workers.wait(self.workers.call(0, 'has_head'))
        return tensors if self._has_head else each_once(tensors)

    def _bring(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Weights:
        self._finish_sending()
        if not self.ways:
            self._device = next(iter(tensors.values())).device
            self._largest = max(t.numel() * t.dtype.itemsize for t in tensors.values())
            self._links, self.ways = [None] * self.workers.num_workers, ['store'] * self.workers.num_workers
            for worker in range(self.workers.num_workers):
                self._welcome(worker)
        weights = Weights(manifest)
        if 'store' in self.ways:
            weights.buckets = self._buckets(manifest, tensors)
        links = [link for link in self._links if link is not None]
        if links:
            # learning goes on with the tensors themselves, but for those that a strategy has put into host memory
            here = self._device if 'ipc' in self.ways else None  # whose worker reads the copy where it lies
            weights.kept = {
                name: t.detach().clone(memory_format=torch.contiguous_format)
                if t.device == self._device
                else t.detach().to(here)
                for name, t in tensors.items()
            }
            if self._device.type == 'cuda':
                torch.cuda.current_stream(self._device).synchronize()
            self._sending = [_Sending(link, manifest, weights.kept, self._device) for link in links]
            for sending in self._sending:
                sending.start()
            for sending in self._sending:  # what is asked of a worker from now on must come behind its weights
                sending.link.client.asked.wait()
            self._moving = threading.Thread(target=_to_host, args=(weights, list(self._sending)), daemon=True)
            self._moving.start()
        return weights

    def _finish_sending(self) -> None:
        """Wait until the weights of the last `begin` are with every worker."""
        sendings, self._sending = self._sending, []
        for sending in sendings:
            sending.join()
        if self._moving is not None:  # who dies from here on finds the copy on the host
            self._moving.join()
            self._moving = None
        for sending in sendings:
            self._raise_of(sending)
            error, link = sending.error, sending.link
            if isinstance(error, WorkerDied) and self._links[link.worker] is link:  # not replaced yet
                self._replace(link.worker, error)

    def _raise_of(self, sending: _Sending) -> None:
        error, link = sending.error, sending.link
        if error is not None and not isinstance(error, WorkerDied) and self._links[link.worker] is link:
            raise RuntimeError(
                f'sending weights {sending.version} to rollout worker {link.worker} by {link.way}: '
                f'{type(error).__name__}: {error}'
            ) from error

    def take(self, ticket: Ticket) -> list[Sample]:
        try:
            return super().take(ticket)
        except Exception:
            for sending in self._sending:
                if sending.link.client.answered.wait(STOPPING_S) and sending.link.client.failed is not None:
                    sending.join(STOPPING_S)
                self._raise_of(sending)  # then the worker only misses the weights
            raise

    def _welcome(self, worker: int) -> None:
        link, self._links[worker] = self._links[worker], None
        if link is not None:
            link.shutdown()  # its thread may wait for the dead one
        way = self._way(worker)
        if way != 'store':
            self._links[worker] = _Link(self.workers, worker, way, self.bucket_bytes, self._largest)
        self.ways[worker] = way

    def _check_way(self, device: torch.device) -> None:
        """Raises ValueError for what no worker could be sent weights by, before there are workers: which GPUs they have
        is known only then."""
        asked = self.weight_transfer
        if asked in ('nccl', 'ipc') and (device.type not in SENT_FROM or not self.tensor_parallel):
            raise ValueError(
                f'weight_transfer={asked!r} sends from a GPU to others, and these weights are on {device} and a worker '
                f"has {self.tensor_parallel} GPUs; use weight_transfer='store'"
            )
        if asked == 'ipc' and (self.tensor_parallel > 1 or _several_ranks()):
            raise ValueError(
                "weight_transfer='ipc' is from one process to a worker on its own GPU alone, and here are several "
                f"{'ranks' if _several_ranks() else 'GPUs to a worker'}; use weight_transfer='nccl', or auto"
            )

    def _way(self, worker: int) -> str:
        """How weights can come to a worker. Raises ValueError where they cannot as was asked."""
        asked = self.weight_transfer
        if asked == 'store' or (asked == 'auto' and not self._can_send()):
            return 'store'
        gpus = self.workers.wait(self.workers.call(worker, 'gpus'))
        own = name_of_device(self._device)
        if not own or own not in gpus:
            way, where = 'nccl', 'is on other GPUs than this process'
        elif gpus == [own] and not _several_ranks():
            way, where = 'ipc', "is on this process's GPU"
        else:
            way, where = 'store', "has this process's GPU among several, or this is one of several ranks"
        if asked not in ('auto', way):
            raise ValueError(
                f'weight_transfer={asked!r}: rollout worker {worker} {where}; use weight_transfer={way!r}, or auto'
            )
        return way

    def _can_send(self) -> bool:
        if self._device.type not in SENT_FROM or not self.tensor_parallel:
            return False
        try:
            import vllm.distributed.weight_transfer  # noqa: F401
        except ImportError:
            return False
        return True

    def close(self) -> None:
        for link in self._links:
            if link is not None:
                link.shutdown()
        self.workers.close()  # ends what senders wait for
        for sending in self._sending:
            sending.join(STOPPING_S)
        if self._moving is not None:
            self._moving.join(STOPPING_S)
        self._links, self._sending, self._moving = [], [], None
        super().close()


def _tensor_parallel(workers: RolloutWorkers) -> int:
    """GPUs that hold a worker's model together; 0: it computes on a CPU."""
    gpus = getattr(workers, 'resources', {}).get('GPU', 1)
    if gpus < 0 or gpus != int(gpus):
        raise ValueError(f'resources: GPU={gpus} of a vLLM worker must be a whole number; 0 computes on a CPU')
    return int(gpus)


def _several_ranks() -> bool:
    """Then vLLM's IPC would ask the others from a thread, while they learn."""
    return int(os.environ.get('WORLD_SIZE', '1')) > 1


def _to_host(weights: Weights, sendings: list[_Sending]) -> None:
    """When all is sent, the copy leaves the device: it is only wanted for a worker that dies."""
    for sending in sendings:
        sending.join()
    for name, tensor in list(weights.kept.items()):
        if tensor.is_cuda:
            weights.kept[name] = tensor.cpu()  # type: ignore[index]


# ---------------------------------------------------------------------- one worker


class _Client:
    """vLLM's `VLLMWeightSyncClient` of one worker. Start, update and finish are one call there, so that nothing comes
    between them."""

    def __init__(self, workers: RolloutWorkers, worker: int, way: str) -> None:
        self.workers, self.worker, self.way = workers, worker, way
        self.manifest: Manifest | None = None
        """of the weights that are sent"""
        self.asked = threading.Event()
        """the worker has been asked to receive them"""
        self.turn = threading.Event()
        """the worker is about to receive them: what it was asked before is done"""
        self.answered = threading.Event()
        self.failed: Exception | None = None
        """the worker, or what it was asked"""
        self.on_failure = lambda: None

    def begin(self, manifest: Manifest) -> None:
        self.manifest, self.failed = replace(manifest, tensors={}, buckets=()), None
        for event in (self.asked, self.turn, self.answered):
            event.clear()
        if self.way == 'ipc':
            self.turn.set()  # what is sent are handles

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait(self.workers.call(self.worker, 'join', self.way, init_info))

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        turn = self.workers.call(self.worker, 'turn')
        handle = self.workers.call(self.worker, 'update_weights', self.manifest, update_info)
        self.asked.set()
        try:
            self._wait(turn)
            self.turn.set()
            self._wait(handle)
        finally:
            self.turn.set()
            self.answered.set()

    def _wait(self, handle: Any) -> None:
        try:
            self.workers.wait(handle)
        except Exception as error:
            self.failed = error
            for event in (self.asked, self.turn, self.answered):  # also when it was still being met
                event.set()
            self.on_failure()  # the other half of the transfer waits for it
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


class _Link:
    """What sends weights to one worker: vLLM's sender, which meets the worker here."""

    def __init__(self, workers: RolloutWorkers, worker: int, way: str, bucket_bytes: int, largest: int) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        self.worker, self.way = worker, way
        self.client = _Client(workers, worker, way)
        self.source = _source(self.client)
        self.client.on_failure = self.shutdown
        self._workers, self._buffer_bytes = workers, max(bucket_bytes, largest)
        self._factory = WeightTransferTrainerFactory
        self.sender: Any = None

    def meet(self) -> None:
        """With the first weights, whose names and shapes the sender wants to know."""
        if self.sender is None:
            # what it was asked before may take longer than a meeting waits
            self._workers.wait(self._workers.call(self.worker, 'turn'))
            self.sender = self._factory.trainer_init(self._init_info(), client=self.client, source=self.source)

    def _init_info(self) -> Any:
        if self.way == 'ipc':
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=0, packed=False)  # the copy is there as long as it is read: no buffer
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        host = self._workers.host()
        return NCCLTrainerInitInfo(
            rank=0,
            master_address=host,
            master_port=_free_port(host),
            world_size=1 + _tensor_parallel(self._workers),
            packed=True,
            packed_buffer_size_bytes=self._buffer_bytes,
        )

    def shutdown(self) -> None:
        """Leave the group. May be called twice, by any thread, and while it sends."""
        if self.sender is not None:
            self.sender.shutdown()


class _Sending(threading.Thread):
    """One version on its way to one worker."""

    def __init__(self, link: _Link, manifest: Manifest, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__(name=f'chatgpt-weights-{link.worker}', daemon=True)
        self.link, self.version, self.device, self.tensors = link, manifest.version, device, tensors
        self.error: Exception | None = None
        link.client.begin(manifest)

    def run(self) -> None:
        client = self.link.client
        try:
            if self.device.type == 'cuda':
                torch.cuda.set_device(self.device)  # a thread has one of its own
            self.link.source.give(self.tensors, self.device)
            self.link.meet()
            self.link.sender.send_weights()
        except Exception as error:
            if client.asked.is_set():
                client.answered.wait(STOPPING_S)  # whether it was the worker
            self.error = client.failed or error
        finally:
            client.asked.set()
            self.link.source.give({})
            self.tensors = {}


def _free_port(host: str) -> int:
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]


def _source(client: _Client) -> Any:
    """vLLM's `WeightSource` of named tensors."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Tensors(WeightSource):
        def __init__(self) -> None:
            self._tensors: Mapping[str, Tensor] = {}

        def give(self, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> None:
            self._tensors, self._device = tensors, device
            if tensors:
                self.__dict__.pop('metadata', None)

        def _described(self) -> list[Any]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

        def _all(self) -> Iterator[tuple[str, Tensor]]:
            client.turn.wait()  # a broadcast would keep the GPU busy with waiting
            if client.failed is not None:
                raise client.failed
            for name, tensor in list(self._tensors.items()):  # from host memory one at a time
                yield name, tensor.to(self._device)

    if not hasattr(WeightSource, 'iter_full'):

        class Named(Tensors):  # vLLM 0.32
            def metadata(self) -> list[Any]:
                return self._described()

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return self._all()

    else:

        class Named(Tensors):  # type: ignore[no-redef]
            @cached_property
            def metadata(self) -> list[Any]:
                return self._described()

            def iter_full(self) -> Iterator[tuple[str, Tensor]]:
                return self._all()

    return Named()
