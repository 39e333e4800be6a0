"""An engine with workers that run vLLM on several GPUs each.

Buckets of weights go from GPU to GPU (`chatgpt.rollout.vllm_links`), to each worker from one of the ranks, so that all
ranks send at once. Weights on a CPU and a trainer without vLLM use the ways of `RemoteEngine`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.call import Call
from chatgpt.rollout.connection import Address
from chatgpt.rollout.engine import Abilities
from chatgpt.rollout.remote import Order, RemoteEngine, RolloutWorkers, Served
from chatgpt.rollout.vllm import check_options, check_sampling
from chatgpt.rollout.vllm_links import Link, broadcast
from chatgpt.rollout.vllm_worker import RESERVED, VLLMSpec, name_of_device
from chatgpt.rollout.wire import checkpoint_tensors, fill_buckets, unique_tensors

SENT_FROM = ('cuda',)
"""device types that NCCL and IPC send from"""


class VLLMRemoteEngine(RemoteEngine):
    """A `RemoteEngine` with workers that run vLLM, with tensor parallelism over the GPUs of each worker.

    Args:
        weight_transfer: 'nccl' sends from a rank's GPU to those of a worker, by vLLM's NCCL; 'ipc' to a worker on the
            GPU of a rank, by CUDA IPC; 'tcp' and 'store' are those of `RemoteEngine`; 'auto' uses for each worker IPC
            if that is possible, or else the first of the others that is.
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
        self.links: dict[int, Link] = {}
        """of this rank, by worker"""
        self._device = torch.device('cpu')  # of their buckets

    def _check_options(self) -> None:
        check_options('VLLMRemoteEngine', self.engine_options, RESERVED)

    def check(self, config: Any, call: Call) -> list[int]:
        check_sampling(call.sampling)
        return [] if self.around is not None else call.checked(config)

    def _chunk_size(self, num_prompts: int) -> int:
        return self.chunk_size or -(-num_prompts // self.workers.num_workers)

    def _spec_of(self, model: Any) -> VLLMSpec:
        self._check_way(_device_of_buckets(next(model.parameters()).device))
        spec = super()._spec_of(model)
        return VLLMSpec(**vars(spec), tensor_parallel=self.tensor_parallel)

    def tensors_of(self, model: Any) -> Mapping[str, Tensor]:
        return checkpoint_tensors(model)

    # ------------------------------------------------------------------ weights

    def _select_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._has_head is None:
            self._has_head = self.workers.wait(self.workers.call(0, 'has_head'))
        return tensors if self._has_head else unique_tensors(tensors)

    def _serve(self, addresses: Mapping[int, Address], device: torch.device) -> dict[int, Served]:
        """Returns the workers that one rank sends all buckets to. Raises ValueError if the requested way is not
        possible for one."""
        given, self._device = self.weight_transfer, _device_of_buckets(device)
        cards = self._of_ranks(name_of_device(self._device))
        if given in ('tcp', 'store') or (given == 'auto' and not self._can_send(self._device)):
            return {}
        served: dict[int, Served] = {}
        for worker, address in addresses.items():
            gpus = address.gpus
            near = [rank for rank, card in enumerate(cards) if card and card in gpus]
            far = [rank for rank in range(len(cards)) if rank not in near]
            able = {'ipc': near[0]} if near and len(gpus) == 1 else {}
            able |= {'nccl': far[worker % len(far)]} if far else {}
            if given not in ('auto', *able):
                raise ValueError(
                    f'weight_transfer={given!r} cannot reach rollout worker {worker}: {len(near)} of {len(cards)} '
                    f'ranks compute on its {len(gpus)} GPUs; use weight_transfer={next(iter(able), "tcp")!r}, or auto'
                )
            if able:
                way = next(iter(able)) if given == 'auto' else given
                served[worker] = Served(way, able[way])
        return served

    def _send_share(self, order: Order, connections: dict[int, socket.socket], tensors: Mapping[str, Tensor]) -> None:
        others = {worker: c for worker, c in connections.items() if worker not in self._served}
        if others:
            super()._send_share(order, others, tensors)
        links = []
        for worker in connections.keys() - others.keys():
            way, address = self._served[worker].way, order.addresses[worker]
            link = self.links.get(worker)
            if link is None or (link.way, link.name) != (way, address.group):  # else the worker is in its group still
                if link is not None:
                    link.leave()
                self.links[worker] = link = Link(worker, way, address)
            links.append(link)
        broadcast(links, connections, fill_buckets(order.manifest, tensors, device=self._device), self._device)

    def _check_way(self, device: torch.device) -> None:
        """Raises ValueError for a transfer that is impossible for any worker. Called before the workers start, when
        their GPUs are not known yet."""
        given = self.weight_transfer
        if given in ('nccl', 'ipc') and (device.type not in SENT_FROM or not self.tensor_parallel):
            raise ValueError(
                f'weight_transfer={given!r} sends from a GPU to others, and these weights are on {device} and a worker '
                f"has {self.tensor_parallel} GPUs; use weight_transfer='tcp'"
            )
        if given == 'ipc' and self.tensor_parallel > 1:
            raise ValueError(
                "weight_transfer='ipc' is to a worker on the GPU of a rank alone, and here are several GPUs to a "
                "worker; use weight_transfer='nccl', or auto"
            )

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
            link.leave()
        self.links = {}
        super().close()


def _tensor_parallel(workers: RolloutWorkers) -> int:
    """Returns the number of GPUs of a worker; 0 for a worker on a CPU."""
    gpus = getattr(workers, 'resources', {}).get('GPU', 1)
    if gpus < 0 or gpus != int(gpus):
        raise ValueError(f'resources: GPU={gpus} of a vLLM worker must be a whole number; 0 computes on a CPU')
    return int(gpus)


def _device_of_buckets(device: torch.device) -> torch.device:
    """Returns this process's GPU also for weights in host memory, where those that are too large for it are."""
    on_gpu = device.type == 'cpu' and torch.cuda.is_initialized()
    return torch.device('cuda', torch.cuda.current_device()) if on_gpu else device
