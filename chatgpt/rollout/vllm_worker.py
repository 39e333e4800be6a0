"""A rollout worker that generates with vLLM on its own GPUs. Independent of Ray."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.channel import Channel, name_of_device
from chatgpt.rollout.remote import WorkerDied
from chatgpt.rollout.vllm import RESERVED as ENGINE_RESERVED
from chatgpt.rollout.vllm import BaseVLLMEngine, has_head, llm_settings, start
from chatgpt.rollout.wire import Around, Manifest, ModelSpec, PackedSamples, Request, whole_tensors
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
        super().__init__(self._own, fetch, around)

    # ------------------------------------------------------------------ weights

    @_detect_death
    def gpus(self) -> list[str]:
        return self.llm.collective_rpc(_gpu)

    @_detect_death
    def has_head(self) -> bool:
        """See `chatgpt.rollout.vllm.has_head`."""
        return has_head(self.llm)

    @_detect_death
    def join(self, backend: str, address: tuple[str, int], rank: int, size: int) -> None:
        self.llm.collective_rpc(_join, args=(backend, address, rank, size))

    @_detect_death
    def receive(self, manifest: Manifest) -> None:
        self._load(manifest, lambda: self.llm.collective_rpc(_receive, args=(manifest,)))

    def take_weights(self, manifest: Manifest, buckets: Iterable[Tensor]) -> None:
        def load() -> None:
            for named in whole_tensors(manifest, buckets):
                if named:
                    self.llm.apply_model(partial(_load, list(named.items())))

        self._load(manifest, load)

    def _load(self, manifest: Manifest, load: Callable[[], None]) -> None:
        llm, self.version, self.difference = self.llm, None, None
        llm.start_weight_update()  # makes vLLM repeat what it derives from weights when it loads them
        try:
            load()
        except Exception:
            llm.collective_rpc(_abandon_update)
            raise
        llm.finish_weight_update()
        llm.reset_prefix_cache()  # its keys and values are those of the previous weights
        self.engine.end()
        self._own.use_weights(self.config, manifest)
        self.version = manifest.version

    @_detect_death
    def generate(self, request: Request) -> PackedSamples:
        packed = super().generate(request)
        self._own.check_weights()  # even if environments end before a turn is generated
        return replace(packed, difference=self._own.difference)


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


def _join(worker: Any, backend: str, address: tuple[str, int], rank: int, size: int) -> None:
    device = worker.device if backend == 'nccl' else torch.device('cpu')
    if (before := getattr(worker, 'chatgpt_channel', None)) is not None:
        before.close()
    worker.chatgpt_channel = Channel(backend, address, rank + worker.rank, size, device)
    worker.chatgpt_channel.join()


def _abandon_update(worker: Any) -> None:
    """Makes the worker accept another update after one that failed, as vLLM does where its own transfer fails."""
    worker._weight_update_active = False
    worker.weight_transfer_engine.reset_weight_update_target()


def _receive(worker: Any, manifest: Manifest) -> None:
    for named in whole_tensors(manifest, worker.chatgpt_channel.buckets(manifest.sizes)):
        _load(list(named.items()), worker.get_model())


def _load(named: list[tuple[str, Tensor]], model: Any) -> None:
    model.load_weights(iter(named))
