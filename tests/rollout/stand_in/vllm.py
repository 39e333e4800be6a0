"""A fake of the parts of vLLM 0.33 that this package uses, with the same signatures, for a CPU; a single file for all
modules. It generates with the weights loaded into it, fails while asleep, and splits weights over ranks, each a thread.
Weights are sent by gloo instead of NCCL. See tests/real_vllm for tests with vLLM itself on a CPU."""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from math import prod
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from transformers import AutoConfig, AutoModelForCausalLM

__version__ = '0.33.0'
for _name in ('config', 'platforms', 'distributed', 'distributed.weight_transfer'):
    sys.modules[f'vllm.{_name}'] = sys.modules[__name__]
for _name in ('ipc_engine', 'nccl_engine'):
    sys.modules[f'vllm.distributed.weight_transfer.{_name}'] = sys.modules[__name__]
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
            function = method if callable(method) else getattr(Worker, method)
            return function(worker, *args, **(kwargs or {}))

        return list(self.threads.map(call, self.workers))

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        return self.collective_rpc('apply_model', args=(func,))

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.collective_rpc('init_weight_transfer_engine', kwargs={'init_info': request['init_info']})

    def start_weight_update(self) -> None:
        self.collective_rpc('start_weight_update')

    def update_weights(self, request: Any) -> None:
        self.collective_rpc('update_weights', kwargs={'update_info': request['update_info']})

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
        assert self.awake == {'weights', 'kv_cache'} and not any(w.updating for w in self.workers)
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


class Worker:
    """A rank, with a flat shard of each weight."""

    def __init__(self, vllm_config: Any, rank: int, llm: Any) -> None:
        self.vllm_config = vllm_config
        self.rank, self.llm = rank, llm
        self.device = torch.device('cpu')
        self.shards: dict[str, torch.Tensor] = {}
        self.updating = False
        self.weight_transfer_engine: Any = None
        if vllm_config.weight_transfer_config is not None:
            config = WeightTransferConfig(**vllm_config.weight_transfer_config)
            create = WeightTransferEngineFactory.create_engine
            self.weight_transfer_engine = create(config, vllm_config, self.device, self)

    def get_model(self) -> Worker:
        return self

    def modules(self) -> list[Any]:
        return [ParallelLMHead()]

    def check_health(self) -> None:
        pass

    def apply_model(self, fn: Any) -> Any:
        return fn(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert self.updating, 'tensors derived from the weights would be outdated'
        own, ranks = self.llm.model.state_dict(), self.vllm_config.tensor_parallel_size
        for name, tensor in weights:
            assert tensor.shape == own[name].shape, name
            flat = tensor.reshape(-1)
            size = -(-len(flat) // ranks)
            self.shards[name] = flat[self.rank * size : (self.rank + 1) * size].clone()

    def reload_weights(self, weights_iterator: Any = None) -> None:
        assert 'weights' in self.llm.awake
        self.llm.events.append('load')
        self.updating = True
        self.load_weights(weights_iterator)
        self.updating = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.weight_transfer_engine.init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        assert self.weight_transfer_engine is not None and not self.updating
        self.updating = True

    def update_weights(self, update_info: Any) -> None:
        assert self.updating
        self.weight_transfer_engine.receive_weights(update_info)

    def finish_weight_update(self) -> None:
        assert self.updating
        self.updating = False


# ---------------------------------------------------------------- weights


@dataclass
class WeightTransferConfig:
    backend: str = 'nccl'


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource(ABC):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        assert isinstance(cls.__dict__.get('metadata', cached_property(id)), cached_property)

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [m.name for m in self.metadata]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not WeightSource.iter_full

    def iter_full(self) -> Any:
        """Optional; see `implements_iter_full`."""
        raise NotImplementedError


@dataclass
class IPCTrainerInitInfo:
    backend: ClassVar[str] = 'ipc'
    rank: int = field(kw_only=True)
    packed: bool = False


class IPCWeightTransferEngine:
    def __init__(self, model: Any) -> None:
        self.model = model

    def init_transfer_engine(self, init_info: Any) -> None:
        assert init_info == {'packed': False}

    def receive_weights(self, update_info: Any) -> None:
        self.model.load_weights((name, torch.from_numpy(array)) for name, array in update_info['here'])


class IPCTrainerWeightTransferEngine:
    def __init__(self, info: IPCTrainerInitInfo, client: Any, source: Any) -> None:
        assert len(source.owned_names(info.rank)) == len(source.metadata)
        self.client, self.source = client, source
        client.init_weight_transfer_engine({'packed': info.packed})

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights({'here': [(name, tensor.numpy()) for name, tensor in self.source.iter_full()]})
        self.client.finish_weight_update()

    def shutdown(self) -> None: ...


@dataclass
class NCCLTrainerInitInfo:
    backend: ClassVar[str] = 'nccl'
    rank: int = field(kw_only=True)
    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2


def connect(address: str, port: int, rank: int, world_size: int) -> Any:
    timeout = timedelta(seconds=60)
    store = TCPStore(address, port, world_size, rank == 0, timeout, wait_for_workers=False)
    return ProcessGroupGloo(store, rank, world_size, timeout)


def packed_buckets(named: Sequence[ParamMeta], size: int) -> Iterator[list[ParamMeta]]:
    """Yields the tensors of each buffer, which is sent when it exceeds `size`."""
    bucket, used = [], 0
    for one in named:
        bucket.append(one)
        used += prod(one.shape) * one.dtype.itemsize
        if used > size:
            yield bucket
            bucket, used = [], 0
    if bucket:
        yield bucket


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


class NCCLWeightTransferEngine:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.group: Any = None
        self.named: list[ParamMeta] = []

    def init_transfer_engine(self, init_info: Any) -> None:
        info = self.info = NCCLTrainerInitInfo(rank=0, **init_info)
        self.group = connect(info.master_address, info.master_port, 1 + self.model.rank, info.world_size)
        self.named = []

    def receive_weights(self, update_info: Any) -> None:
        self.named = [ParamMeta(*one) for one in update_info['named']] or self.named
        for bucket in packed_buckets(self.named, self.info.packed_buffer_size_bytes):
            sizes = [prod(one.shape) * one.dtype.itemsize for one in bucket]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            broadcast(self.group, buffer)
            die = os.environ.get('STAND_IN_DIES', '')
            if os.path.exists(die) and self.model.rank == 1:
                os.remove(die)
                os._exit(1)
            parts = zip(bucket, buffer.split(sizes), strict=True)
            self.model.load_weights([(one.name, part.view(one.dtype).view(one.shape)) for one, part in parts])


class NCCLTrainerWeightTransferEngine:
    def __init__(self, info: NCCLTrainerInitInfo, client: Any, source: Any) -> None:
        assert source.implements_iter_full() and source.metadata
        self.client, self.source, self.info = client, source, info
        self.sent: list[ParamMeta] = []
        payload = asdict(info)
        del payload['rank']
        with ThreadPoolExecutor(1) as thread:
            there = thread.submit(client.init_weight_transfer_engine, payload)
            self.group = connect(info.master_address, info.master_port, 0, info.world_size)
            there.result()

    def send_weights(self) -> None:
        meta = self.source.metadata
        named = [] if meta == self.sent else [(m.name, m.dtype, m.shape) for m in meta]
        self.client.start_weight_update()
        thread = ThreadPoolExecutor(1)
        try:
            there = thread.submit(self.client.update_weights, {'named': named})
            tensors = dict(self.source.iter_full())
            assert [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()] == meta
            for bucket in packed_buckets(meta, self.info.packed_buffer_size_bytes):
                broadcast(self.group, torch.cat([tensors[one.name].view(-1).view(torch.uint8) for one in bucket]))
            there.result()
        finally:
            thread.shutdown(wait=False)
        self.client.finish_weight_update()
        self.sent = meta

    def shutdown(self) -> None:
        self.group = None


class WeightTransferEngineFactory:
    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        return {'nccl': NCCLWeightTransferEngine, 'ipc': IPCWeightTransferEngine}[config.backend](model)


class WeightTransferTrainerFactory:
    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        kinds = {'nccl': NCCLTrainerWeightTransferEngine, 'ipc': IPCTrainerWeightTransferEngine}
        return kinds[init_info.backend](init_info, client, source)
