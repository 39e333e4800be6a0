"""An engine with workers that run vLLM on several GPUs each, and receive weights while the trainer learns.

    begin(actor) ─▶ copies the weights, version v; a thread per worker sends the copy (NCCL, or IPC on one GPU),
                    queued behind the worker's earlier requests; begin returns without waiting for it
    the trainer learns: it changes its own weights, not the copy
    next begin   ─▶ waits until every worker has version v

The transfer is vLLM's (`vllm.distributed.weight_transfer`), with a process group per worker, so that the death of a
worker does not break the others' transfers. Weights on a CPU, a trainer without vLLM, and the replacement of a dead
worker use buckets, as in `RemoteEngine`.
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
from chatgpt.rollout.vllm import check_options, check_sampling
from chatgpt.rollout.vllm_worker import RESERVED, VLLMSpec, name_of_device
from chatgpt.rollout.wire import Manifest, checkpoint_tensors, unique_tensors
from chatgpt.types import Sample

WeightTransfer = Literal['auto', 'nccl', 'ipc', 'store']
SENT_FROM = ('cuda',)
"""device types that NCCL and IPC send from"""
STOPPING_S = 10.0
"""seconds that a sender has to end after its worker has died"""


class VLLMRemoteEngine(RemoteEngine):
    """A `RemoteEngine` with workers that run vLLM, with tensor parallelism over the GPUs of each worker.

    Args:
        weight_transfer: 'nccl' is vLLM's NCCL transfer, from this process's GPU to others; 'ipc' its CUDA IPC transfer,
            to a worker on this process's GPU; 'store' sends buckets by `RolloutWorkers.put`; 'auto' uses for each
            worker the first of these that is possible.
        options: see `RemoteEngine`. With chunk_size=None, a call is split evenly over all workers. engine_options are
            keyword arguments of `vllm.LLM`, and memory_share, the fraction of each GPU's memory for vLLM, by default
            0.9.
    """

    abilities = Abilities(exact_logprobs=False, copies_weights=True, answers_ahead=True, takes_environments=True)

    def __init__(self, workers: RolloutWorkers, *, weight_transfer: WeightTransfer = 'auto', **options: Any) -> None:
        if weight_transfer not in ('auto', 'nccl', 'ipc', 'store'):
            raise ValueError(f'weight_transfer={weight_transfer!r} is not one of auto, nccl, ipc, store')
        self.weight_transfer = weight_transfer
        super().__init__(workers, **options)
        self.tensor_parallel = _tensor_parallel(workers)
        self._has_head: bool | None = None
        """True if the workers' model has a separate output layer; None before the first `begin`"""
        self.ways: list[str] = []
        """transfer of weights to each worker: 'nccl', 'ipc' or 'store'; empty before the first `begin`"""
        self._links: list[_Link | None] = []
        self._sending: list[_Link] = []  # transfers of the latest version that may not be finished
        self._moving: threading.Thread | None = None  # runs `_to_host`

    def _check_options(self) -> None:
        check_options('VLLMRemoteEngine', self.engine_options, RESERVED)

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
        # with larger elements first, views of a received buffer are aligned
        return dict(sorted(checkpoint_tensors(model).items(), key=lambda item: -item[1].dtype.itemsize))

    # ------------------------------------------------------------------ weights

    def _select_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._has_head is None:
            self._has_head = self.workers.wait(self.workers.call(0, 'has_head'))
        return tensors if self._has_head else unique_tensors(tensors)

    def _publish_weights(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Weights:
        self._finish_sending()
        if not self.ways:
            self._device = next(iter(tensors.values())).device
            self._largest = max(t.numel() * t.dtype.itemsize for t in tensors.values())
            self._links, self.ways = [None] * self.workers.num_workers, ['store'] * self.workers.num_workers
            for worker in range(self.workers.num_workers):
                self._prepare_worker(worker)
        weights = Weights(manifest)
        if 'store' in self.ways:
            weights.buckets = self._buckets(manifest, tensors)
        if links := [link for link in self._links if link is not None]:
            # The trainer changes the tensors while they are sent, so they are copied. Those that a strategy keeps in
            # host memory are sent from there, except by IPC, with which the worker reads the copy on the GPU.
            here = self._device if 'ipc' in self.ways else None
            weights.kept = {
                name: t.detach().clone(memory_format=torch.contiguous_format)
                if t.device == self._device
                else t.detach().to(here)
                for name, t in tensors.items()
            }
            if self._device.type == 'cuda':
                torch.cuda.current_stream(self._device).synchronize()
            self._sending = links
            for link in links:
                link.send(manifest, weights.kept, self._device)
            for link in links:  # later requests must be queued behind the weights
                link.queued.wait()
            self._moving = threading.Thread(target=_to_host, args=(weights, links), daemon=True)
            self._moving.start()
        return weights

    def _finish_sending(self) -> None:
        """Waits until every worker has the weights of the last `begin`."""
        links, self._sending = self._sending, []
        for link in links:
            link.thread.join()
        if self._moving is not None:  # from here on, a replaced worker gets its weights from the host
            self._moving.join()
            self._moving = None
        for link in links:
            self._raise_of(link)
            if isinstance(link.error, WorkerDied) and self._links[link.worker] is link:  # not replaced yet
                self._replace(link.worker, link.error)

    def _raise_of(self, link: _Link) -> None:
        error = link.error
        if error is not None and not isinstance(error, WorkerDied) and self._links[link.worker] is link:
            assert link.manifest is not None
            raise RuntimeError(
                f'sending weights {link.manifest.version} to rollout worker {link.worker} by {link.way}: '
                f'{type(error).__name__}: {error}'
            ) from error

    def take(self, ticket: Ticket) -> list[Sample]:
        try:
            return super().take(ticket)
        except Exception:
            for link in self._sending:
                if link.answered.wait(STOPPING_S) and link.failed is not None:
                    link.thread.join(STOPPING_S)
                self._raise_of(link)  # the error of the transfer is the cause of the worker's
            raise

    def _prepare_worker(self, worker: int) -> None:
        link, self._links[worker] = self._links[worker], None
        if link is not None:
            link.shutdown()  # its thread may wait for the dead worker
        way = self._way(worker)
        if way != 'store':
            buffer_bytes = max(self.bucket_bytes, self._largest)
            self._links[worker] = _Link(self.workers, worker, way, self.tensor_parallel, buffer_bytes)
        self.ways[worker] = way

    def _check_way(self, device: torch.device) -> None:
        """Raises ValueError for a transfer that is impossible for any worker. Called before the workers start, when
        their GPUs are not known yet."""
        given = self.weight_transfer
        if given in ('nccl', 'ipc') and (device.type not in SENT_FROM or not self.tensor_parallel):
            raise ValueError(
                f'weight_transfer={given!r} sends from a GPU to others, and these weights are on {device} and a worker '
                f"has {self.tensor_parallel} GPUs; use weight_transfer='store'"
            )
        if given == 'ipc' and (self.tensor_parallel > 1 or _several_ranks()):
            raise ValueError(
                "weight_transfer='ipc' is from one process to a worker on its own GPU alone, and here are several "
                f"{'ranks' if _several_ranks() else 'GPUs to a worker'}; use weight_transfer='nccl', or auto"
            )

    def _way(self, worker: int) -> str:
        """Returns the transfer to use for a worker. Raises ValueError if the requested one is not possible."""
        given = self.weight_transfer
        if given == 'store' or (given == 'auto' and not self._can_send()):
            return 'store'
        gpus = self.workers.wait(self.workers.call(worker, 'gpus'))
        own = name_of_device(self._device)
        if not own or own not in gpus:
            way, where = 'nccl', 'is on other GPUs than this process'
        elif gpus == [own] and not _several_ranks():
            way, where = 'ipc', "is on this process's GPU"
        else:
            way, where = 'store', "has this process's GPU among several, or this is one of several ranks"
        if given not in ('auto', way):
            raise ValueError(
                f'weight_transfer={given!r}: rollout worker {worker} {where}; use weight_transfer={way!r}, or auto'
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
        for link in filter(None, self._links):
            link.shutdown()
        self.workers.close()  # senders may wait for a worker
        for link in self._sending:
            link.thread.join(STOPPING_S)
        if self._moving is not None:
            self._moving.join(STOPPING_S)
        self._links, self._sending, self._moving = [], [], None
        super().close()


def _tensor_parallel(workers: RolloutWorkers) -> int:
    """Returns the number of GPUs of a worker; 0 for a worker on a CPU."""
    gpus = getattr(workers, 'resources', {}).get('GPU', 1)
    if gpus < 0 or gpus != int(gpus):
        raise ValueError(f'resources: GPU={gpus} of a vLLM worker must be a whole number; 0 computes on a CPU')
    return int(gpus)


def _several_ranks() -> bool:
    """Returns True with several ranks. vLLM's IPC would then call a collective from a thread while the ranks learn."""
    return int(os.environ.get('WORLD_SIZE', '1')) > 1


def _to_host(weights: Weights, links: list[_Link]) -> None:
    """Waits for all transfers and moves the copy to host memory, where it is kept for replacements of dead workers."""
    for link in links:
        link.thread.join()
    for name, tensor in list(weights.kept.items()):
        if tensor.is_cuda:
            weights.kept[name] = tensor.cpu()  # type: ignore[index]


# ---------------------------------------------------------------------- one worker


class _Link:
    """Sends weights to one worker, each version in a thread. Implements vLLM's `VLLMWeightSyncClient` for this worker:
    start, update and finish are a single call of the worker, so that no request runs in between."""

    def __init__(self, workers: RolloutWorkers, worker: int, way: str, num_gpus: int, buffer_bytes: int) -> None:
        self.workers, self.worker, self.way = workers, worker, way
        self.num_gpus, self.buffer_bytes = num_gpus, buffer_bytes
        self.sender: Any = None
        self.source = _source(self)
        self.thread = threading.Thread()
        self.manifest: Manifest | None = None  # of the weights being sent
        self.queued = threading.Event()  # the call to receive them is queued
        self.ready = threading.Event()  # the worker's earlier requests are done
        self.answered = threading.Event()
        self.failed: Exception | None = None  # raised by the worker or by its call
        self.error: Exception | None = None  # why the transfer failed

    def send(self, manifest: Manifest, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Starts to send a version."""
        self.manifest, self.failed, self.error = replace(manifest, tensors={}, buckets=()), None, None
        for event in (self.queued, self.ready, self.answered):
            event.clear()
        if self.way == 'ipc':
            self.ready.set()  # IPC sends only handles, which need not wait for the worker
        name = f'chatgpt-weights-{self.worker}'
        self.thread = threading.Thread(target=self._send, args=(tensors, device), name=name, daemon=True)
        self.thread.start()

    def _send(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        try:
            if device.type == 'cuda':
                torch.cuda.set_device(device)  # the current device is set per thread
            self.source.give(tensors, device)
            if self.sender is None:
                self._connect()
            self.sender.send_weights()
        except Exception as error:
            if self.queued.is_set():
                self.answered.wait(STOPPING_S)  # the worker's own error, if any, is the cause
            self.error = self.failed or error
        finally:
            self.queued.set()
            self.source.give({})

    def _connect(self) -> None:
        """Connects to the worker. Called with the first weights, because the sender needs their names and shapes."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        # the worker's earlier requests may take longer than the timeout of the connection
        self.workers.wait(self.workers.call(self.worker, 'barrier'))
        info: Any
        if self.way == 'ipc':
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info = IPCTrainerInitInfo(rank=0, packed=False)  # no buffer: the copy exists as long as it is read
        else:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            host = self.workers.host()
            with socket.socket() as free:
                free.bind((host, 0))
                port = free.getsockname()[1]
            info = NCCLTrainerInitInfo(
                rank=0,
                master_address=host,
                master_port=port,
                world_size=1 + self.num_gpus,
                packed=True,
                packed_buffer_size_bytes=self.buffer_bytes,
            )
        self.sender = WeightTransferTrainerFactory.trainer_init(info, client=self, source=self.source)

    def shutdown(self) -> None:
        """Leaves the process group. May be called twice, from any thread, and during a transfer."""
        if self.sender is not None:
            self.sender.shutdown()

    # ------------------------------------------------------------------ vLLM's client

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait(self.workers.call(self.worker, 'join', self.way, init_info))

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        barrier = self.workers.call(self.worker, 'barrier')
        handle = self.workers.call(self.worker, 'update_weights', self.manifest, update_info)
        self.queued.set()
        try:
            self._wait(barrier)
            self.ready.set()
            self._wait(handle)
        finally:
            self.ready.set()
            self.answered.set()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass

    def _wait(self, handle: Any) -> None:
        try:
            self.workers.wait(handle)
        except Exception as error:
            self.failed = error
            for event in (self.queued, self.ready, self.answered):  # also if connecting failed
                event.set()
            self.shutdown()  # the sending thread waits for the worker
            raise


def _source(link: _Link) -> Any:
    """Makes a `WeightSource` of vLLM for the tensors of a link."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Tensors(WeightSource):
        tensors: Mapping[str, Tensor] = {}
        device: torch.device | None = None

        def give(self, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> None:
            self.tensors, self.device = tensors, device
            if tensors:
                self.__dict__.pop('metadata', None)

        def _described(self) -> list[Any]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

        def _each(self) -> Iterator[tuple[str, Tensor]]:
            link.ready.wait()  # a broadcast that waits for the worker would occupy the GPU
            if link.failed is not None:
                raise link.failed
            for name, tensor in list(self.tensors.items()):  # tensors in host memory are copied one at a time
                yield name, tensor.to(self.device)

        # vLLM 0.32 calls metadata and iterates; 0.33 reads metadata and calls iter_full
        metadata = cached_property(_described) if hasattr(WeightSource, 'iter_full') else _described
        iter_full = __iter__ = _each

    return Tensors()
