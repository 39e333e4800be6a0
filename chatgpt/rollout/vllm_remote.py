"""An engine with workers that run vLLM on several GPUs each.

Weights are sent from GPU to GPU by vLLM's transfer (`vllm.distributed.weight_transfer`: NCCL, or IPC on one GPU), with
a process group per worker, so that the death of a worker does not break the others' transfers. Weights on a CPU and a
trainer without vLLM use the ways of `RemoteEngine`.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import Abilities
from chatgpt.rollout.remote import RemoteEngine, RolloutWorkers, WorkerDied
from chatgpt.rollout.vllm import check_options, check_sampling
from chatgpt.rollout.vllm_worker import RESERVED, VLLMSpec, name_of_device
from chatgpt.rollout.wire import Manifest, checkpoint_tensors, unique_tensors

SENT_FROM = ('cuda',)
"""device types that NCCL and IPC send from"""
STOPPING_S = 10.0
"""seconds that a sender has to end after its worker has failed"""


class VLLMRemoteEngine(RemoteEngine):
    """A `RemoteEngine` with workers that run vLLM, with tensor parallelism over the GPUs of each worker.

    Args:
        weight_transfer: 'nccl' is vLLM's NCCL transfer, from this process's GPU to others; 'ipc' its CUDA IPC transfer,
            to a worker on this process's GPU; 'tcp' and 'store' are those of `RemoteEngine`; 'auto' uses for each
            worker the first of these that is possible.
        options: see `RemoteEngine`. With chunk_size=None, a call is split evenly over all workers. engine_options are
            keyword arguments of `vllm.LLM`, and memory_share, the fraction of each GPU's memory for vLLM, by default
            0.9.
    """

    abilities = Abilities(exact_logprobs=False, copies_weights=True, answers_ahead=True, takes_environments=True)
    transfers = ('auto', 'nccl', 'ipc', 'tcp', 'store')

    def __init__(self, workers: RolloutWorkers, **options: Any) -> None:
        super().__init__(workers, **options)
        self.tensor_parallel = _tensor_parallel(workers)
        self._has_head: bool | None = None
        """True if the workers' model has a separate output layer; None before the first `begin`"""
        self.links: dict[int, _Link] = {}
        """vLLM's transfers, by worker; other workers are sent weights as by `RemoteEngine`"""

    @property
    def ways(self) -> list[str]:
        return [self.links[w].way if w in self.links else way for w, way in enumerate(super().ways)]

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

    def _send_weights(
        self, workers: Sequence[int], manifest: Manifest, tensors: Mapping[str, Tensor]
    ) -> dict[int, WorkerDied]:
        device, died = next(iter(tensors.values())).device, {}
        largest = max(t.numel() * t.dtype.itemsize for t in tensors.values())
        links: list[_Link] = []
        for worker in workers:
            try:
                way = self._way(worker, device)
            except WorkerDied as error:
                died[worker] = error
                continue
            link = self.links.get(worker)
            if way is None:
                continue
            if link is None or link.way != way:
                buffer_bytes = max(self.bucket_bytes, largest)
                self.links[worker] = link = _Link(self.workers, worker, way, self.tensor_parallel, buffer_bytes)
            links.append(link)
        if any(link.way == 'ipc' for link in links):  # the worker reads them on the GPU, all at once
            tensors = {name: t.detach().to(device) for name, t in tensors.items()}
        if links and device.type == 'cuda':
            torch.cuda.current_stream(device).synchronize()
        for link in links:
            link.send(manifest, tensors, device)
        for link, failure in [(link, link.wait()) for link in links]:
            if failure is None:
                self._held[link.worker] = manifest.version
            elif isinstance(failure, WorkerDied):
                died[link.worker] = failure
            else:
                self.links.pop(link.worker).shutdown()
                raise RuntimeError(
                    f'sending weights {manifest.version} to rollout worker {link.worker} by {link.way}: '
                    f'{type(failure).__name__}: {failure}'
                ) from failure
        others = [w for w in workers if w not in died and w not in self.links]
        return died | (super()._send_weights(others, manifest, tensors) if others else {})

    def _replace(self, worker: int, error: WorkerDied) -> None:
        if (link := self.links.pop(worker, None)) is not None:
            link.shutdown()
        super()._replace(worker, error)

    def _check_way(self, device: torch.device) -> None:
        """Raises ValueError for a transfer that is impossible for any worker. Called before the workers start, when
        their GPUs are not known yet."""
        given = self.weight_transfer
        if given in ('nccl', 'ipc') and (device.type not in SENT_FROM or not self.tensor_parallel):
            raise ValueError(
                f'weight_transfer={given!r} sends from a GPU to others, and these weights are on {device} and a worker '
                f"has {self.tensor_parallel} GPUs; use weight_transfer='tcp'"
            )
        if given == 'ipc' and (self.tensor_parallel > 1 or _several_ranks()):
            raise ValueError(
                "weight_transfer='ipc' is from one process to a worker on its own GPU alone, and here are several "
                f"{'ranks' if _several_ranks() else 'GPUs to a worker'}; use weight_transfer='nccl', or auto"
            )

    def _way(self, worker: int, device: torch.device) -> str | None:
        """Returns vLLM's transfer to use for a worker, None for those of `RemoteEngine`. Raises ValueError if the
        requested one is not possible."""
        given = self.weight_transfer
        if given in ('tcp', 'store') or (given == 'auto' and not self._can_send(device)):
            return None
        if worker in self.links:
            return self.links[worker].way
        gpus = self.workers.wait(self.workers.call(worker, 'gpus'))
        own = name_of_device(device)
        way: str | None
        if not own or own not in gpus:
            way, where = 'nccl', 'is on other GPUs than this process'
        elif gpus == [own] and not _several_ranks():
            way, where = 'ipc', "is on this process's GPU"
        else:
            way, where = None, "has this process's GPU among several, or this is one of several ranks"
        if given not in ('auto', way):
            raise ValueError(
                f'weight_transfer={given!r}: rollout worker {worker} {where}; use weight_transfer={way or "tcp"!r}, or '
                'auto'
            )
        return way

    def _can_send(self, device: torch.device) -> bool:
        if device.type not in SENT_FROM or not self.tensor_parallel:
            return False
        try:
            import vllm.distributed.weight_transfer  # noqa: F401
        except ImportError:
            return False
        return True

    def close(self) -> None:
        for link in self.links.values():
            link.shutdown()
        self.links = {}
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


# ---------------------------------------------------------------------- one worker


class _Link:
    """Sends weights to one worker, each version in a thread. Implements vLLM's `VLLMWeightSyncClient` for this worker:
    start, update and finish are a single call of the worker."""

    def __init__(self, workers: RolloutWorkers, worker: int, way: str, num_gpus: int, buffer_bytes: int) -> None:
        self.workers, self.worker, self.way = workers, worker, way
        self.num_gpus, self.buffer_bytes = num_gpus, buffer_bytes
        self.sender: Any = None
        self.source = _source()
        self.thread = threading.Thread()
        self.manifest: Manifest | None = None  # of the weights being sent
        self.over = threading.Event()  # the thread has ended, or the worker has failed
        self.answered = threading.Event()  # no call of the worker is under way
        self.answered.set()
        self.failed: Exception | None = None  # raised by the worker or by its call
        self.error: Exception | None = None  # raised in the thread

    def send(self, manifest: Manifest, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Starts to send a version."""
        self.manifest, self.failed, self.error = replace(manifest, tensors={}, buckets=()), None, None
        self.over.clear()
        name = f'chatgpt-weights-{self.worker}'
        self.thread = threading.Thread(target=self._send, args=(tensors, device), name=name, daemon=True)
        self.thread.start()

    def wait(self) -> Exception | None:
        """Waits for the end of the transfer, and returns why it failed."""
        self.over.wait()
        self.thread.join(None if self.failed is None else STOPPING_S)
        error = self.failed or self.error
        if error is not None:  # its traceback would keep what is in flight alive, and the group's end waits for that
            traceback.clear_frames(error.__traceback__)
        return error

    def _send(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        try:
            if device.type == 'cuda':
                torch.cuda.set_device(device)  # the current device is set per thread
            self.source.give(tensors, device)
            if self.sender is None:
                self._connect()
            self.sender.send_weights()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            self.error = error
            self.answered.wait(STOPPING_S)  # the worker's own error, if any, is the cause
        finally:
            self.source.give({})
            self.over.set()

    def _connect(self) -> None:
        """Connects to the worker. Called with the first weights, because the sender needs their names and shapes."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

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
        self._wait(self.workers.call(self.worker, 'update_weights', self.manifest, update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass

    def _wait(self, handle: Any) -> None:
        self.answered.clear()
        try:
            self.workers.wait(handle)
        except Exception as error:
            self.failed = error
            self.over.set()
            self.shutdown()  # the sending thread waits for the worker
            raise
        finally:
            self.answered.set()


def _source() -> Any:
    """Makes a `WeightSource` of vLLM for the tensors that it is given."""
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
            for name, tensor in list(self.tensors.items()):  # tensors in host memory are copied one at a time
                yield name, tensor.detach().contiguous().to(self.device)

        # vLLM 0.32 calls metadata and iterates; 0.33 reads metadata and calls iter_full
        metadata = cached_property(_described) if hasattr(WeightSource, 'iter_full') else _described
        iter_full = __iter__ = _each

    return Tensors()
