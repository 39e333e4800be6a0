"""An engine with workers that run vLLM on several GPUs each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import Abilities
from chatgpt.rollout.remote import RemoteEngine, RolloutWorkers
from chatgpt.rollout.vllm import check_options, check_sampling
from chatgpt.rollout.vllm_worker import RESERVED, VLLMSpec
from chatgpt.rollout.wire import checkpoint_tensors, unique_tensors


class VLLMRemoteEngine(RemoteEngine):
    """A `RemoteEngine` with workers that run vLLM, with tensor parallelism over the GPUs of each worker.

    Args:
        options: see `RemoteEngine`. With chunk_size=None, a call is split evenly over all workers. engine_options are
            keyword arguments of `vllm.LLM`, and memory_share, the fraction of each GPU's memory for vLLM, by default
            0.9.
    """

    abilities = Abilities(exact_logprobs=False, copies_weights=True, answers_ahead=True, takes_environments=True)

    def __init__(self, workers: RolloutWorkers, **options: Any) -> None:
        super().__init__(workers, **options)
        self.tensor_parallel = _tensor_parallel(workers)
        self._processes_per_worker = max(1, self.tensor_parallel)
        self._has_head: bool | None = None
        """True if the workers' model has a separate output layer; None before the first `begin`"""

    def _check_options(self) -> None:
        check_options('VLLMRemoteEngine', self.engine_options, RESERVED)

    def check(self, config: Any, call: Call) -> list[int]:
        check_sampling(call.sampling)
        return [] if self.around is not None else call.checked(config)

    def _chunk_size(self, num_prompts: int) -> int:
        return self.chunk_size or -(-num_prompts // self.workers.num_workers)

    def _spec_of(self, model: Any) -> VLLMSpec:
        return VLLMSpec(**vars(super()._spec_of(model)), tensor_parallel=self.tensor_parallel)

    def tensors_of(self, model: Any) -> Mapping[str, Tensor]:
        return checkpoint_tensors(model)

    def _select_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._has_head is None:
            self._has_head = self.workers.wait(self.workers.call(0, 'has_head'))
        return tensors if self._has_head else unique_tensors(tensors)


def _tensor_parallel(workers: RolloutWorkers) -> int:
    """Returns the number of GPUs of a worker; 0 for a worker on a CPU."""
    gpus = getattr(workers, 'resources', {}).get('GPU', 1)
    if gpus < 0 or gpus != int(gpus):
        raise ValueError(f'resources: GPU={gpus} of a vLLM worker must be a whole number; 0 computes on a CPU')
    return int(gpus)
