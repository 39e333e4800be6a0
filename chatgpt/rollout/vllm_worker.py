"""A rollout worker that generates with vLLM, on the GPUs that it owns. Plain Python, without Ray.

Weights come to it by vLLM's own weight transfer (`update_weights`) or, as to every worker, in buckets that a request
names.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.remote import WorkerDied
from chatgpt.rollout.vllm import OWN as OWN_OF_AN_ENGINE
from chatgpt.rollout.vllm import AsksLLM, has_head, llm_settings, start
from chatgpt.rollout.wire import Around, Manifest, ModelSpec, PackedSamples, Request, whole_tensors
from chatgpt.rollout.worker import Fetch, RolloutWorker, Worker, as_it_is

OWN = (*OWN_OF_AN_ENGINE, 'tensor_parallel_size', 'distributed_executor_backend', 'weight_transfer_config')
"""keywords of `vllm.LLM` that a worker sets itself"""


@dataclass(frozen=True, kw_only=True)
class VLLMSpec(ModelSpec):
    """How a worker builds vLLM: the architecture of a model, on so many GPUs; 0: on the CPU, in the worker's own
    process."""

    tensor_parallel: int = 1


def _or_died(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that raises WorkerDied where vLLM's own processes are gone: a new worker can go on, and this one
    cannot."""

    @wraps(method)
    def asked(self: VLLMWorker, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            try:
                self.llm.collective_rpc('check_health', timeout=10.0)
            except Exception:
                raise WorkerDied(f'of what vLLM runs on its GPUs: {type(error).__name__}: {error}') from error
            raise

    return asked


class VLLMWorker(Worker):
    """Generates with vLLM.

    Args:
        spec: the model to build; its weights come later.
        engine_options: keywords of `vllm.LLM`, and memory_share: of each device that vLLM may take.
    """

    def __init__(
        self,
        spec: VLLMSpec,
        engine_options: Mapping[str, Any] | None = None,
        *,
        fetch: Fetch = as_it_is,
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
        # In a process of its own the engine would not know this one's placement group.
        self.llm: Any = start(llm_settings(self._folder.name, **settings))
        self._own = _Answering(self.llm)
        super().__init__(self._own, fetch, around)

    # ------------------------------------------------------------------ weights

    @_or_died
    def gpus(self) -> list[str]:
        """What tells each of its GPUs from all others; '' for what is none."""
        return self.llm.collective_rpc(_gpu)

    @_or_died
    def has_head(self) -> bool:
        """See `chatgpt.rollout.vllm.has_head`."""
        return has_head(self.llm)

    def turn(self) -> None:
        """Answered when all is done that was asked before."""

    @_or_died
    def join(self, backend: str, init_info: Mapping[str, Any]) -> None:
        """Meet the sender; see `vllm.LLM.init_weight_transfer_engine`. Returns when it is there too."""
        if backend != 'nccl':
            self.llm.collective_rpc(_use, args=(backend,))
        self.llm.init_weight_transfer_engine({'init_info': dict(init_info)})

    @_or_died
    def update_weights(self, manifest: Manifest, update_info: Mapping[str, Any]) -> None:
        """Receive a version of the weights from the sender. After a failure there are none."""
        self._load(manifest, lambda: self.llm.update_weights({'update_info': dict(update_info)}))

    def take_weights(self, manifest: Manifest, buckets: Sequence[Any]) -> None:
        """Raises RuntimeError for weights that it was not told where to fetch."""
        if not buckets:
            raise RuntimeError(
                f'a rollout worker with weights {self.version} was asked for samples of weights {manifest.version}'
            )

        def load() -> None:
            for named in whole_tensors(manifest, map(self.fetch, buckets)):
                if named:
                    self.llm.apply_model(partial(_load, list(named.items())))

        self._load(manifest, load)

    def _load(self, manifest: Manifest, load: Callable[[], None]) -> None:
        llm, self.version, self.difference = self.llm, None, None
        llm.start_weight_update()  # what vLLM makes of weights when it loads them is made again
        load()
        llm.finish_weight_update()
        llm.reset_prefix_cache()  # what an earlier policy made of a prompt must not be found again
        self.engine.end()
        self._own.take_up(self.config, manifest)
        self.version = manifest.version

    @_or_died
    def generate(self, request: Request) -> PackedSamples:
        if self.version != request.manifest.version:
            self.take_weights(request.manifest, request.buckets)
        self._own.check_weights()  # also where an environment asks for no turn
        self.difference = self._own.difference
        return super().generate(request)


def make_worker(
    spec: ModelSpec, engine_options: Mapping[str, Any], *, device: str | torch.device | None = None, **keywords: Any
) -> Worker:
    """The kind of worker that a spec is of, with `RolloutWorker`'s keywords."""
    if isinstance(spec, VLLMSpec):
        return VLLMWorker(spec, engine_options, **keywords)  # whose own processes have the devices
    return RolloutWorker(spec, engine_options, device=device, **keywords)


class _Answering(AsksLLM):
    """The engine of a worker, which gives it weights."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.dtype = llm, llm.model_config.dtype

    def take_up(self, config: Any, manifest: Manifest) -> None:
        """The weights of a policy of this config are there."""
        self._config = config
        self.expect(manifest.handshake)


# What runs in vLLM's own processes. They import this module: vLLM sends functions by name.


def _gpu(worker: Any) -> str:
    return name_of_device(worker.device)


def name_of_device(device: torch.device) -> str:
    """What tells a GPU from all others; '' for what is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == 'cuda' else ''


def _use(worker: Any, backend: str) -> None:
    """Receive weights another way than the engine was started with, which was before anyone knew on which GPUs."""
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
