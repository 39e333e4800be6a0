"""A rollout worker that generates with vLLM, on the GPUs that it owns. Plain Python, without Ray.

Weights come to it by vLLM's own weight transfer (`update_weights`) or, as to every worker, in buckets that a request
names.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import Abilities, CheckedEngine
from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.remote import WorkerDied
from chatgpt.rollout.vllm import VLLMEngine, answers, check_sampling, has_head, start
from chatgpt.rollout.wire import Around, Manifest, ModelSpec, PackedSamples, Request, pack_samples, whole_tensors
from chatgpt.types import Sample

OWN = (*VLLMEngine.OWN, 'tensor_parallel_size', 'distributed_executor_backend', 'weight_transfer_config')
"""keywords of `vllm.LLM` that a worker sets itself"""


@dataclass(frozen=True, kw_only=True)
class VLLMSpec(ModelSpec):
    """How a worker builds vLLM: the architecture of a model, on so many GPUs; 0: on the CPU, in the worker's own
    process."""

    tensor_parallel: int = 1

    def write_config(self, folder: str) -> None:
        """config.json, of which vLLM builds the model."""
        config = copy.deepcopy(self.config)
        config.architectures = [self.model_class.__name__]
        config.save_pretrained(folder)


class VLLMWorker:
    """Answers requests one after another.

    Args:
        spec: the model to build; its weights come later.
        engine_options: keywords of `vllm.LLM`, and memory_share: of each device that vLLM may take.
        fetch, around: see `RolloutWorker`.
    """

    def __init__(
        self,
        spec: VLLMSpec,
        engine_options: Mapping[str, Any] | None = None,
        *,
        fetch: Callable[[Any], Tensor] = lambda bucket: bucket,
        around: Around | None = None,
    ) -> None:
        self.spec, self.fetch = spec, fetch
        options = dict(engine_options or {})
        share = options.pop('memory_share', 0.9)
        self._folder = tempfile.TemporaryDirectory(prefix='chatgpt_vllm_')
        spec.write_config(self._folder.name)
        settings = {
            'model': self._folder.name,
            'load_format': 'dummy',
            'skip_tokenizer_init': True,
            'logprobs_mode': 'processed_logprobs',
            'gpu_memory_utilization': share,
            'seed': 0,
            'max_model_len': -1,  # as long as fits the memory
            'tensor_parallel_size': max(1, spec.tensor_parallel),
            'distributed_executor_backend': 'ray' if spec.tensor_parallel else 'uni',
            'weight_transfer_config': {'backend': 'nccl'},
            **options,
        }
        # In a process of its own the engine would not know this one's placement group.
        self.llm: Any = start(settings)
        self._own = _Answering(self.llm)
        self.engine: Any = self._own if around is None else around(self._own)
        self.version: int | None = None
        """of the weights in the model; None where they are not whole"""

    # ------------------------------------------------------------------ weights

    def gpus(self) -> list[str]:
        """What tells each of its GPUs from all others; '' for what is none."""
        return self._asked(self.llm.collective_rpc, _gpu)

    def has_head(self) -> bool:
        """See `chatgpt.rollout.vllm.has_head`."""
        return self._asked(has_head, self.llm)

    def turn(self) -> None:
        """Answered when all is done that was asked before."""

    def join(self, backend: str, init_info: Mapping[str, Any]) -> None:
        """Meet the sender; see `vllm.LLM.init_weight_transfer_engine`. Returns when it is there too."""
        llm = self.llm
        if backend != 'nccl':
            self._asked(llm.collective_rpc, _use, args=(backend,))
        self._asked(llm.init_weight_transfer_engine, {'init_info': dict(init_info)})

    def update_weights(self, manifest: Manifest, update_info: Mapping[str, Any]) -> None:
        """Receive a version of the weights from the sender. After a failure there are none."""
        llm = self.llm
        self.version = None
        self._asked(llm.start_weight_update)
        self._asked(llm.update_weights, {'update_info': dict(update_info)})
        self._asked(llm.finish_weight_update)
        self._hold(manifest)

    def take_weights(self, manifest: Manifest, buckets: Sequence[Any]) -> None:
        """Fetch a version of the weights as buckets and load them. After a failure there are none."""
        llm = self.llm
        self.version = None
        self._asked(llm.start_weight_update)  # what vLLM makes of weights when it loads them is made again
        for named in whole_tensors(manifest, map(self.fetch, buckets)):
            if named:
                self._asked(llm.apply_model, partial(_load, list(named.items())))
        self._asked(llm.finish_weight_update)
        self._hold(manifest)

    def _hold(self, manifest: Manifest) -> None:
        llm = self.llm
        llm.reset_prefix_cache()  # what an earlier policy made of a prompt must not be found again
        self.engine.end()
        self._own.take_up(self.spec.config, manifest.handshake)
        self.version = manifest.version

    def _asked(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Raises WorkerDied where vLLM's own processes are gone: then a new worker can go on, and this one cannot."""
        llm = self.llm
        try:
            return function(*args, **keywords)
        except Exception as error:
            try:
                llm.collective_rpc('check_health', timeout=10.0)
            except Exception:
                raise WorkerDied(f'of what vLLM runs on its GPUs: {type(error).__name__}: {error}') from error
            raise

    # ------------------------------------------------------------------ answers

    def generate(self, request: Request) -> PackedSamples:
        """The samples of a request, drawn with the weights it names.

        Raises RuntimeError for weights that it neither has nor was told where to fetch.
        """
        if self.version != request.manifest.version:
            if not request.buckets:
                raise RuntimeError(
                    f'a rollout worker with weights {self.version} was asked for samples of weights '
                    f'{request.manifest.version}'
                )
            self.take_weights(request.manifest, request.buckets)
        self._asked(self._own.check_weights)  # also where an environment asks for no turn
        samples = self._asked(self.engine.generate, request.opened())
        return pack_samples(samples, request.manifest.version, self._own.difference)


class _Answering(CheckedEngine):
    """The engine of a worker, which gives it weights."""

    abilities = Abilities(exact_logprobs=False)

    def __init__(self, llm: Any) -> None:
        self.llm, self.dtype = llm, llm.model_config.dtype

    def take_up(self, config: Any, handshake: Handshake) -> None:
        """The weights of a policy of this config are there."""
        self._config = config
        self.expect(handshake)

    def check(self, config: Any, call: Call) -> list[int]:
        check_sampling(call.sampling)
        return super().check(config, call)

    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        return answers(self.llm, call, limits)


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
