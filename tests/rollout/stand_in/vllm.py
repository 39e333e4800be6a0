"""A fake of the parts of vLLM 0.33 that this package uses, with the same signatures, for a CPU; a single file for all
modules. It generates with the weights loaded into it, fails while asleep, and splits weights over ranks, each a thread.
Weights are sent by gloo instead of NCCL. See tests/real_vllm for tests with vLLM itself on a CPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from transformers import AutoConfig, AutoModelForCausalLM

__version__ = '0.33.0'
_TRANSFER = 'distributed.weight_transfer'
for _name in ('config', 'platforms', 'distributed', _TRANSFER, f'{_TRANSFER}.nccl_common'):
    sys.modules[f'vllm.{_name}'] = sys.modules[__name__]
current_platform = SimpleNamespace(is_sleep_mode_available=lambda: True)


@dataclass
class EngineArgs:
    model: str
    load_format: str = 'auto'
    enable_sleep_mode: bool = False
    skip_tokenizer_init: bool = False
    logprobs_mode: str = 'raw_logprobs'
    gpu_memory_utilization: float = 0.92
    seed: int = 0
    dtype: str = 'auto'
    enforce_eager: bool = False
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    weight_transfer_config: Any = None


@dataclass
class SamplingParams:
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True


class LLM:
    made: list[LLM] = []

    def __init__(self, model: str, *, tensor_parallel_size: int = 1, **kwargs: Any) -> None:
        args = EngineArgs(model=model, tensor_parallel_size=tensor_parallel_size, **kwargs)
        assert args.load_format == 'dummy' and args.logprobs_mode == 'processed_logprobs' and args.skip_tokenizer_init
        assert os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] == '0'
        self.args, self.events = args, []
        self.model_config = SimpleNamespace(dtype=torch.float32)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model)).eval()
        self.workers = [Worker(args, rank, self) for rank in range(tensor_parallel_size)]
        self.threads = ThreadPoolExecutor(tensor_parallel_size)
        self.awake, self.asleep = {'weights', 'kv_cache'}, set()
        LLM.made.append(self)

    def sleep(self, level: int = 1, mode: str = 'abort') -> None:
        if self.asleep:  # also if a part is awake, like older executors
            return
        assert self.args.enable_sleep_mode and level == 2
        self.events.append(f'sleep {level}')
        self.awake, self.asleep = set(), {'weights', 'kv_cache'}
        for worker in self.workers:
            worker.shards.clear()

    def wake_up(self, tags: list[str] | None = None) -> bool:
        assert tags and set(tags) <= self.asleep
        self.events.append(f'wake {tags[0]}')
        self.awake |= set(tags)
        self.asleep -= set(tags)
        return not self.asleep

    def collective_rpc(
        self, method: str | Callable[..., Any], timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        def call(worker: Worker) -> Any:
            if callable(method):
                return method(worker.wrapper, *args, **(kwargs or {}))
            return getattr(worker, method)(*args, **(kwargs or {}))

        return list(self.threads.map(call, self.workers))

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        return self.collective_rpc('apply_model', args=(func,))

    def start_weight_update(self) -> None:
        self.collective_rpc('start_weight_update')

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.collective_rpc('finish_weight_update')

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.events.append('forget')
        return True

    def merged_model(self) -> Any:
        """Returns the model with the loaded weights of all ranks."""
        own = self.model.state_dict()
        with torch.no_grad():
            for name in self.workers[0].shards:
                own[name].copy_(torch.cat([w.shards[name] for w in self.workers]).view(own[name].shape))
        names = {n for n, _ in self.model.named_parameters(remove_duplicate=False)}  # including a tied head
        missing = names - set(self.workers[0].shards)
        assert not missing, f'no weights for {sorted(missing)[:3]}'
        return self.model

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Any], sampling_params: Any = None, *, use_tqdm: Any = True, lora_request: Any = None
    ) -> list[Any]:
        assert lora_request is None, 'adapters are tested with vLLM itself'
        assert self.awake == {'weights', 'kv_cache'} and not any(w._weight_update_active for w in self.workers)
        gate = os.environ.get('STAND_IN_GATE')
        while gate and not os.path.exists(gate):
            time.sleep(0.01)
        model, answers = self.merged_model(), []
        for prompt, p in zip(prompts, sampling_params, strict=True):
            ids, steps = list(prompt['prompt_token_ids']), []
            generator = torch.Generator().manual_seed(p.seed)
            start = len(ids)
            while len(ids) - start < p.max_tokens:
                logits = model(torch.tensor([ids])).logits[0, -1].float()
                logp = torch.log_softmax(logits / (p.temperature or 1.0), -1)
                choice = logp.argmax() if p.temperature == 0 else torch.multinomial(logp.exp(), 1, generator=generator)
                token = int(choice)
                ids.append(token)
                steps.append({token: SimpleNamespace(logprob=float(logp[token]))})
                if token in p.stop_token_ids:
                    break
            output = SimpleNamespace(token_ids=ids[start:], logprobs=steps)
            answers.append(SimpleNamespace(outputs=[output]))
        return answers


class ParallelLMHead:
    pass


class WorkerWrapper:
    """What functions are given in place of the worker: it has the worker's attributes and those that it is assigned."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


class Worker:
    """A rank, with a flat shard of each weight."""

    def __init__(self, vllm_config: Any, rank: int, llm: Any) -> None:
        self.wrapper = WorkerWrapper(self)
        self.vllm_config = vllm_config
        self.rank, self.llm = rank, llm
        self.device = torch.device('cpu')
        self.shards: dict[str, torch.Tensor] = {}
        self._weight_update_active = False
        self.weight_transfer_engine = SimpleNamespace(reset_weight_update_target=lambda: None)

    def get_model(self) -> Worker:
        return self

    def modules(self) -> list[Any]:
        return [ParallelLMHead()]

    def check_health(self) -> None:
        pass

    def apply_model(self, fn: Any) -> Any:
        return fn(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert self._weight_update_active, 'tensors derived from the weights would be outdated'
        own, ranks = self.llm.model.state_dict(), self.vllm_config.tensor_parallel_size
        for name, tensor in weights:
            assert tensor.shape == own[name].shape, name
            flat = tensor.reshape(-1)
            size = -(-len(flat) // ranks)
            self.shards[name] = flat[self.rank * size : (self.rank + 1) * size].clone()

    def reload_weights(self, weights_iterator: Any = None) -> None:
        assert 'weights' in self.llm.awake
        self.llm.events.append('load')
        self._weight_update_active = True
        self.load_weights(weights_iterator)
        self._weight_update_active = False

    def start_weight_update(self) -> None:
        assert self.vllm_config.weight_transfer_config is not None and not self._weight_update_active
        self._weight_update_active = True

    def finish_weight_update(self) -> None:
        assert self._weight_update_active
        self._weight_update_active = False


# ---------------------------------------------------------------- weights


class GlooCommunicator:
    """Has the methods of vLLM's `PyNcclCommunicator` that this package uses."""

    disabled = False

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        timeout = timedelta(seconds=60)
        store = TCPStore(address, port, world_size, rank == 0, timeout, wait_for_workers=False)
        self.group: Any = ProcessGroupGloo(store, rank, world_size, timeout)
        self.rank = rank

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor], options).wait()
        die = os.environ.get('STAND_IN_DIES')
        if die and self.rank == 2:
            with suppress(FileNotFoundError):  # another worker may have removed it, and dies alone
                os.remove(die)
                os._exit(1)

    def destroy(self) -> None:
        self.group = None


def stateless_init_process_group(
    master_address: str, master_port: int, rank: int, world_size: int, device: Any
) -> GlooCommunicator:
    return GlooCommunicator(master_address, master_port, rank, world_size)


@contextmanager
def set_current_vllm_config(vllm_config: Any) -> Iterator[None]:
    yield
