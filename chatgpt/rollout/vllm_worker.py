"""A rollout worker that generates with vLLM on its own GPUs. Independent of Ray.

It receives weights by vLLM's weight transfer (`update_weights`) or, as every worker, in buckets.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.remote import WorkerDied
from chatgpt.rollout.vllm import RESERVED as ENGINE_RESERVED
from chatgpt.rollout.vllm import BaseVLLMEngine, has_head, llm_settings, start
from chatgpt.rollout.wire import Around, Manifest, ModelSpec, PackedSamples, Request, WholeTensors
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
        """Returns a unique id of each of its GPUs, '' for another device."""
        return self.llm.collective_rpc(_gpu)

    @_detect_death
    def has_head(self) -> bool:
        """See `chatgpt.rollout.vllm.has_head`."""
        return has_head(self.llm)

    def barrier(self) -> None:
        """Does nothing; its answer shows that all earlier calls are done."""

    @_detect_death
    def join(self, backend: str, init_info: Mapping[str, Any]) -> None:
        """Connects to the sender of weights, and waits for it; see `vllm.LLM.init_weight_transfer_engine`."""
        if backend != 'nccl':
            self.llm.collective_rpc(_set_backend, args=(backend,))
        self.llm.init_weight_transfer_engine({'init_info': dict(init_info)})

    def update_weights(self, manifest: Manifest, update_info: Mapping[str, Any]) -> None:
        """Receives a version of the weights from vLLM's sender."""
        self.start_loading(manifest)
        self._update(update_info)
        self.finish_loading()

    @_detect_death
    def _update(self, update_info: Mapping[str, Any]) -> None:
        self.llm.update_weights({'update_info': dict(update_info)})

    @_detect_death
    def start(self, manifest: Manifest) -> None:
        self.llm.start_weight_update()  # makes vLLM repeat what it derives from weights when it loads them
        self._whole = WholeTensors(manifest)

    @_detect_death
    def load(self, manifest: Manifest, number: int, bucket: Tensor) -> None:
        if named := self._whole.add(number, bucket):
            self.llm.apply_model(partial(_load, named))

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


def _set_backend(worker: Any, backend: str) -> None:
    """Changes the transfer backend after the start; which one is possible depends on the GPUs that vLLM got."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        config=WeightTransferConfig(backend=backend),
        vllm_config=worker.vllm_config,
        device=worker.device,
        model=worker.get_model(),
    )


def _load(named: list[tuple[str, Tensor]], model: Any) -> None:
    model.load_weights(iter(named))
