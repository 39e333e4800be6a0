"""A rollout worker that generates with vLLM on its own GPUs. Independent of Ray.

It receives buckets of weights on its GPUs from a rank's (`receive_from`) or, as every worker, on the host.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.connection import ENDED, Address
from chatgpt.rollout.remote import WorkerDied
from chatgpt.rollout.vllm import RESERVED as ENGINE_RESERVED
from chatgpt.rollout.vllm import BaseVLLMEngine, has_head, llm_settings, start
from chatgpt.rollout.vllm_links import POLL_S, bucket_of, join_group, messages
from chatgpt.rollout.wire import Around, Manifest, ModelSpec, PackedSamples, Request, WholeTensors, bucket_buffer
from chatgpt.rollout.worker import Fetch, RolloutWorker, Worker, identity

RESERVED = (*ENGINE_RESERVED, 'tensor_parallel_size', 'distributed_executor_backend', 'weight_transfer_config')
"""keyword arguments of `vllm.LLM` that are set by the worker"""


@dataclass(frozen=True, kw_only=True)
class VLLMSpec(ModelSpec):
    """The architecture of a model and the number of GPUs that vLLM splits it over."""

    tensor_parallel: int = 1
    """0 runs on the CPU, in the worker's process"""


def _detect_death(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method to raise WorkerDied if vLLM's processes have ended, since only a new worker can continue."""

    @wraps(method)
    def wrapped(self: VLLMWorker, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            try:
                self.llm.collective_rpc('check_health', timeout=10.0)
            except Exception:
                raise WorkerDied(f'of what vLLM runs on its GPUs: {type(error).__name__}: {error}') from error
            raise

    return wrapped


class VLLMWorker(Worker):
    """Generates with vLLM.

    Args:
        spec: architecture of the model; the weights come later.
        engine_options: keyword arguments of `vllm.LLM`, and memory_share, the fraction of each GPU's memory for vLLM.
    """

    def __init__(
        self,
        spec: VLLMSpec,
        engine_options: Mapping[str, Any] | None = None,
        *,
        fetch: Fetch = identity,
        around: Around | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix='chatgpt_vllm_')
        self.config = copy.deepcopy(spec.config)
        self.config.architectures = [spec.model_class.__name__]
        self.config.save_pretrained(self._folder.name)
        settings = {
            'tensor_parallel_size': max(1, spec.tensor_parallel),
            'distributed_executor_backend': 'ray' if spec.tensor_parallel else 'uni',
            'weight_transfer_config': {'backend': 'nccl'},
            'memory_share': 0.9,
            **(engine_options or {}),
        }
        # In a separate process, vLLM would not find the placement group of this one.
        self.llm: Any = start(llm_settings(self._folder.name, **settings))
        self._own = _WorkerEngine(self.llm)
        self._group = b''
        self._address = Address('', 0, b'')
        super().__init__(self._own, fetch, around)

    # ------------------------------------------------------------------ weights

    @_detect_death
    def gpus(self) -> list[str]:
        """Returns a unique id of each of its GPUs, '' for another device."""
        return self.llm.collective_rpc(_gpu)

    @_detect_death
    def has_head(self) -> bool:
        """See `chatgpt.rollout.vllm.has_head`."""
        return has_head(self.llm)

    def listen(self) -> Address:
        self._address = super().listen()._replace(gpus=tuple(self.gpus()), group=self._group)
        return self._address

    def receive_from(self, manifest: Manifest, way: str) -> None:
        """Receives a version of the weights from the GPU of the rank that connects to the address of the latest
        `listen`, by 'nccl' or 'ipc'."""
        with closing(self._listening()) as listener:
            self.start_loading(manifest)
            self._group = b''  # until all is here
            (connection,) = listener.accept(1).values()
        with connection, messages(connection) as rank:
            try:
                (self._broadcast if way == 'nccl' else self._share)(manifest, rank)
            except (EOFError, ConnectionResetError):
                raise ConnectionError(ENDED) from None
        self.finish_loading()

    @_detect_death
    def _broadcast(self, manifest: Manifest, rank: Connection) -> None:
        place = rank.recv()  # of a new group
        done: Future[None] = Future()

        def receive() -> None:
            try:
                self.llm.collective_rpc(_receive, args=(manifest, place, len(self._address.gpus)))
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        Thread(target=receive, daemon=True).start()  # it may wait in NCCL for ever
        while not wait([done], POLL_S).done and not rank.poll():
            pass
        if not wait([done], POLL_S).done:  # a rank that has sent all ends it too
            raise ConnectionError(ENDED)
        done.result()
        self._group = self._address.token if place else self._address.group

    @_detect_death
    def _share(self, manifest: Manifest, rank: Connection) -> None:
        self.llm.collective_rpc(_begin, args=(manifest,))
        for number in range(len(manifest.buckets)):
            self.llm.collective_rpc(_load_shared, args=(number, rank.recv()))
            rank.send(number)

    @_detect_death
    def start(self, manifest: Manifest) -> None:
        self.llm.collective_rpc(_end_update)
        self.llm.start_weight_update()  # makes vLLM repeat what it derives from weights when it loads them
        self._whole = WholeTensors(manifest)

    @_detect_death
    def load(self, manifest: Manifest, number: int, bucket: Tensor) -> None:
        if named := self._whole.add(number, bucket):
            self.llm.collective_rpc(_load, args=(named,))

    @_detect_death
    def finish(self, manifest: Manifest) -> None:
        self.llm.finish_weight_update()
        self.llm.reset_prefix_cache()  # its keys and values are those of the previous weights
        self._own.use_weights(self.config, manifest)

    @_detect_death
    def generate(self, request: Request) -> PackedSamples:
        if self.version == request.version:
            self._own.check_weights()  # even if environments end before a turn is generated
            self.difference = self._own.difference
        return super().generate(request)


def make_worker(
    spec: ModelSpec, engine_options: Mapping[str, Any], *, device: str | torch.device | None = None, **keywords: Any
) -> Worker:
    """Makes the worker for a spec, with the keyword arguments of `RolloutWorker`."""
    if isinstance(spec, VLLMSpec):
        return VLLMWorker(spec, engine_options, **keywords)  # its own processes choose devices
    return RolloutWorker(spec, engine_options, device=device, **keywords)


class _WorkerEngine(BaseVLLMEngine):
    """The engine of a `VLLMWorker`, which loads the weights itself."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.dtype = llm, llm.model_config.dtype

    def use_weights(self, config: Any, manifest: Manifest) -> None:
        """Starts using loaded weights of a policy with this config."""
        self._config = config
        self.expect(manifest.handshake)


# Functions that run in vLLM's processes, which import this module: vLLM sends functions by name.


def _gpu(worker: Any) -> str:
    return name_of_device(worker.device)


def name_of_device(device: torch.device) -> str:
    """Returns a GPU's unique id, or '' for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == 'cuda' else ''


def _end_update(worker: Any) -> None:
    """Ends an update of weights that has failed, as vLLM does for those that it receives itself."""
    worker = worker.worker  # vLLM passes a wrapper, on which an assignment would stay
    if worker._weight_update_active:
        worker._weight_update_active = False
        worker.weight_transfer_engine.reset_weight_update_target()


def _receive(worker: Any, manifest: Manifest, place: tuple[str, int] | None, num_gpus: int) -> None:
    """Loads the buckets that a rank broadcasts.

    place: host and port of the rank, to join it in a new group of its GPU and those of this worker.
    """
    if place is not None:
        if (old := vars(worker).pop('chatgpt_group', None)) is not None:
            old.destroy()
        worker.chatgpt_group = join_group(*place, 1 + worker.rank, 1 + num_gpus, worker.device)
    whole = WholeTensors(manifest, worker.device)
    buffer = bucket_buffer(manifest.largest_bucket, device=worker.device)
    for number in range(len(manifest.buckets)):
        bucket = buffer[: manifest.bucket_bytes(number)]
        worker.chatgpt_group.broadcast(bucket, 0, torch.cuda.current_stream() if bucket.is_cuda else None)
        _load(worker, whole.add(number, bucket))
    _synchronize(worker)


def _begin(worker: Any, manifest: Manifest) -> None:
    worker.chatgpt_whole = WholeTensors(manifest, worker.device)


def _load_shared(worker: Any, number: int, handle: Any) -> None:
    """Loads a bucket of another process on this GPU, which may change it afterwards."""
    _load(worker, worker.chatgpt_whole.add(number, bucket_of(handle, worker.device)))
    _synchronize(worker)


def _synchronize(worker: Any) -> None:
    if worker.device.type == 'cuda':
        torch.cuda.synchronize(worker.device)


def _load(worker: Any, named: list[tuple[str, Tensor]]) -> None:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        worker.get_model().load_weights(iter(named))
