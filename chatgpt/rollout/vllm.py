"""An engine with vLLM in this process: `begin` copies the weights, `end` frees the memory.

Between collect phases vLLM sleeps, if its platform supports it (level 2: neither weights nor cache stay on the device).
Its cache is allocated at the first prompts of a phase, after the trainer has freed its own copy of the weights. Random
numbers come from vLLM's generators, seeded per sample by (seed, sample index), but rounding depends on the batch, and
the trainer recomputes log-probs. vLLM reports log-probs after temperature and filters, so top_k, top_p and
min_new_tokens are rejected: the policy's unfiltered log-probs would be unknown.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatgpt.nn.lora import lora_layers
from chatgpt.nn.peft_format import export_peft
from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import Abilities, CheckedEngine
from chatgpt.rollout.randomness import stream_keys
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.rollout.wire import unique_tensors
from chatgpt.types import FinishReason, Sample

VLLM = 'vllm>=0.32,<0.34'
"""supported versions; the interface changes between versions"""


RESERVED = (
    *('model', 'load_format', 'enable_sleep_mode', 'skip_tokenizer_init', 'logprobs_mode'),
    *('gpu_memory_utilization', 'seed'),
)
"""keyword arguments of `vllm.LLM` that are set by the engine"""


def check_options(engine: str, options: Mapping[str, Any], own: Sequence[str] = RESERVED) -> None:
    """Raises ValueError for options that the engine sets itself, and for an invalid share of memory."""
    for name in own:
        if name in options:
            raise ValueError(f'{engine} sets {name!r} itself; leave it out')
    share = options.get('memory_share', 0.5)
    if not 0 < share < 1:
        raise ValueError(f'{engine}: memory_share={share} must lie between 0 and 1')


def llm_settings(model: str | os.PathLike[str], memory_share: float, **options: Any) -> dict[str, Any]:
    """Returns keyword arguments of `vllm.LLM` for the config.json in `model`."""
    return {
        'model': os.fspath(model),
        'load_format': 'dummy',
        'skip_tokenizer_init': True,
        'logprobs_mode': 'processed_logprobs',
        'gpu_memory_utilization': memory_share,
        'seed': 0,
        'max_model_len': -1,  # as long as fits into memory
        **options,
    }


class BaseVLLMEngine(CheckedEngine):
    """Base of engines that generate with a `vllm.LLM`, their attribute `llm`."""

    abilities = Abilities(copies_weights=False, exact_logprobs=False)
    llm: Any = None
    adapter: Any = None
    """vLLM's request for the policy's adapters, if they are not merged into its weights"""

    def check(self, config: Any, call: Call) -> list[int]:
        check_sampling(call.sampling)
        return super().check(config, call)

    def check_weights(self) -> None:
        try:
            super().check_weights()
        except RuntimeError:
            # Wrong weights may leave NaN in the cache. Attention multiplies masked slots by 0, which keeps NaN, and so
            # later prompts would be NaN with any weights.
            self.llm.collective_rpc(_clear_cache)
            raise

    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        keys = stream_keys(call.seed, torch.tensor(call.indices), torch.tensor(call.offsets)).tolist()
        params = [_params(call.sampling, limit, key) for limit, key in zip(limits, keys, strict=True)]
        given = [{'prompt_token_ids': p.ids.tolist()} for p in call.prompts]
        outputs = self.llm.generate(given, params, use_tqdm=False, lora_request=self.adapter)
        return [_sample(call, i, answer.outputs[0]) for i, answer in enumerate(outputs)]


class VLLMEngine(BaseVLLMEngine):
    """Generates with `vllm.LLM`.

    Args:
        pretrained: folder or hub name of the policy's config.json; no weights are read from it.
        memory_share: fraction of the device's memory that vLLM may use while it is awake.
        adapters: the policy's LoRA adapters are sent alone in every phase, and its other weights, which must be frozen,
            in the first; between the phases they wait in host memory. Not under FSDP and ColossalAI.
        options: further keyword arguments of `vllm.LLM`. With tensor_parallel_size, so many neighbouring processes of
            the run split the model over their devices; give the engine to `NeighboursEngine`.

    Raises:
        ImportError: vLLM is not installed. ValueError: an option that the engine sets itself, or tensor_parallel_size
            does not divide the number of processes.
    """

    abilities = Abilities(exact_logprobs=False, copies_weights=True)

    def __init__(
        self,
        pretrained: str | os.PathLike[str],
        *,
        memory_share: float = 0.4,
        adapters: bool = False,
        **options: Any,
    ) -> None:
        check_options('VLLMEngine', options | {'memory_share': memory_share})
        for name in ('pipeline_parallel_size', 'data_parallel_size'):
            if options.get(name, 1) != 1:
                raise ValueError(
                    f'VLLMEngine: {name}={options[name]!r}, but it runs within the training processes; leave it out, '
                    'or use rollout workers, which may own several GPUs each'
                )
        processes, parts = int(os.environ.get('WORLD_SIZE', '1')), options.get('tensor_parallel_size', 1)
        if parts < 1 or processes % parts:
            raise ValueError(
                f'VLLMEngine: tensor_parallel_size={parts} with {processes} training processes; start a multiple of it'
            )
        import_vllm()
        from vllm.platforms import current_platform

        can_sleep = current_platform.is_sleep_mode_available()  # False on a CPU
        self.settings = llm_settings(pretrained, memory_share, enable_sleep_mode=can_sleep, **options)
        # vLLM's processes are those of the run, within its process group.
        if processes > 1:
            self.settings.setdefault('distributed_executor_backend', 'external_launcher')
        self._has_head = True
        self.abilities = replace(type(self).abilities, takes_adapters=adapters)
        self._folder: Any = None  # of the adapters that vLLM has; None before the first
        self._asleep: list[str] = []
        """the parts without memory; vLLM falls asleep as a whole, wakes up by parts, and ignores `sleep` while
        asleep"""

    def transfer(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        """Wakes vLLM up and copies the weights."""
        # vLLM has its own allocator, which cannot use the memory that torch caches
        torch.cuda.empty_cache()
        if self.llm is None:
            if self.settings['enable_sleep_mode']:  # vLLM's allocator does not go with segments that grow
                torch._C._accelerator_setAllocatorSettings('expandable_segments:False')
            self.llm = start(self.settings | (_settings_of_adapters(model) if self.abilities.takes_adapters else {}))
            self.dtype, self._has_head = self.llm.model_config.dtype, has_head(self.llm)
            self._sleep()
        try:
            self._wake_up('weights')
            if self._folder is None:
                # not load_weights: vLLM also has to repeat what it derives from weights when it loads them
                wanted = tensors if self._has_head else unique_tensors(tensors)
                with self._without_adapters():
                    self.llm.collective_rpc('reload_weights', kwargs={'weights_iterator': iter(wanted.items())})
            if self.abilities.takes_adapters:
                self._send_adapters(model)
            self.llm.reset_prefix_cache()  # its keys and values are those of the previous weights
        except BaseException:
            self._sleep()
            raise

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """Context in which vLLM's layers have the names of a model without adapters."""
        if self.abilities.takes_adapters:
            self.llm.apply_model(_unwrap)
        try:
            yield
        finally:
            if self.abilities.takes_adapters:
                self.llm.apply_model(_wrap)

    def _send_adapters(self, model: Any) -> None:
        from vllm.lora.request import LoRARequest

        folder = tempfile.TemporaryDirectory(prefix='chatgpt_vllm_')
        export_peft(model, folder.name, base_model=str(self.settings['model']))  # vLLM has the folded base
        engine, before = self.llm.llm_engine, self.adapter
        if before is not None:
            engine.remove_lora(before.lora_int_id)
        self.adapter = LoRARequest('policy', 1 if before is None else before.lora_int_id + 1, folder.name)
        engine.add_lora(self.adapter)
        self._folder = folder

    def end(self) -> None:
        """Frees the device's memory."""
        if self._config is not None:
            self._sleep()
        super().end()

    def _wake_up(self, part: str) -> None:
        if part in self._asleep:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=[part])
            self._asleep.remove(part)

    def _sleep(self) -> None:
        if self._asleep == ['weights', 'kv_cache'] or not self.settings['enable_sleep_mode']:
            return
        self._wake_up('kv_cache')  # vLLM considers itself asleep while any part is
        self.llm.sleep(level=1 if self.abilities.takes_adapters else 2)
        self._asleep = ['weights', 'kv_cache']

    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        self._wake_up('kv_cache')
        return super().answer(call, limits)


def has_head(llm: Any) -> bool:
    """Returns True if vLLM's model has a separate output layer. It then requires this layer's tensor even if the policy
    ties it to the embedding; a model without one rejects the tensor."""
    return any(llm.apply_model(_has_head))


def _has_head(model: Any) -> bool:
    return any(type(module).__name__ == 'ParallelLMHead' for module in model.modules())


_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""values of vLLM's `max_lora_rank`"""


def _settings_of_adapters(model: Any) -> dict[str, Any]:
    """Returns keyword arguments of `vllm.LLM` for the adapters of a model. Raises ValueError if vLLM cannot have them
    apart."""
    layers: list[Any] = list(lora_layers(model).values())
    rank = max((layer.r for layer in layers), default=0)
    if not 0 < rank <= _ADAPTER_RANKS[-1] or any(layer.bias_mode != 'none' for layer in layers):
        raise ValueError(
            f'VLLMEngine(adapters=True): needs LoRA adapters of rank 1 to {_ADAPTER_RANKS[-1]} without trained biases, '
            f'and this policy has rank {rank}; leave adapters out'
        )
    return {'enable_lora': True, 'max_loras': 1, 'max_lora_rank': next(r for r in _ADAPTER_RANKS if r >= rank)}


def _unwrap(model: Any) -> None:
    """Puts layers in the place of those that add an adapter to them."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name != 'base_layer' and isinstance(getattr(child, 'base_layer', None), torch.nn.Module)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    model.__dict__['wrapped_layers'] = wrapped


def _wrap(model: Any) -> None:
    """Undoes `_unwrap`."""
    for parent, name, child in model.__dict__.pop('wrapped_layers', ()):
        setattr(parent, name, child)


def _clear_cache(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise ImportError(f"vLLM cannot be imported here ({error}); pip install '{VLLM}'") from error
    return vllm


def start(settings: Mapping[str, Any]) -> Any:
    """Starts `vllm.LLM` in this process, and restores the state of torch's random numbers and the number of threads
    that it changes. Warns if the version is not supported."""
    # in a separate process, tensors could only be passed to vLLM through host memory
    os.environ.setdefault('VLLM_ENABLE_V1_MULTIPROCESSING', '0')
    os.environ.setdefault('VLLM_CPU_OMP_THREADS_BIND', 'nobind')
    vllm = import_vllm()
    found, (low, high) = re.match(r'0\.(\d+)', vllm.__version__), map(int, re.findall(r'0\.(\d+)', VLLM))
    if found is None or not low <= int(found[1]) < high:
        text = f"vLLM {vllm.__version__} is installed, and this package knows the interface of '{VLLM}'"
        warnings.warn(text, stacklevel=2)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            llm = vllm.LLM(**settings)
        if settings.get('distributed_executor_backend') == 'external_launcher':
            # When the process ends, vLLM would destroy the process group, which is the strategy's and gone by then.
            llm.llm_engine.engine_core._finalizer.detach()
            # Shared memory of ranks on a CPU has the same name in every run; by now all of this group have mapped it.
            size = settings.get('tensor_parallel_size', 1)
            first = torch.distributed.get_rank() // size * size if torch.distributed.is_initialized() else 0
            ranks = '-'.join(map(str, range(first, first + size)))
            for name in Path('/dev/shm').glob(f'-tp:*-[[]{ranks}]-cpushm_*'):
                name.unlink(missing_ok=True)
        return llm
    finally:
        torch.set_num_threads = set_num_threads  # vLLM replaces it by a function that does nothing
        torch.set_num_threads(num_threads)


def check_sampling(sampling: Any) -> None:
    """Raises ValueError for settings with which vLLM does not report the policy's unfiltered log-probs."""
    for name, neutral in (('top_k', 0), ('top_p', 1.0), ('min_new_tokens', 0), ('stop', None)):
        if getattr(sampling, name) != neutral:
            raise ValueError(
                f"VLLMEngine cannot do {name}={getattr(sampling, name)!r}; leave it out or use engine='local'"
            )
    if sampling.extra:
        names = ', '.join(f'{k}={v!r}' for k, v in sampling.extra.items())
        raise ValueError(f"VLLMEngine cannot do {names}; leave it out or use engine='hf'")


def _params(sampling: SamplingParams, limit: int, key: int) -> Any:
    return import_vllm().SamplingParams(
        temperature=sampling.temperature if sampling.do_sample else 0.0,
        max_tokens=limit,
        stop_token_ids=list(sampling.eos_token_ids),
        ignore_eos=True,  # only `stop_token_ids` end a response
        seed=key & 0x7FFFFFFF,
        logprobs=0,  # only of the sampled token
        detokenize=False,
    )


def _sample(call: Call, i: int, output: Any) -> Sample:
    ids = list(output.token_ids)
    logprobs = torch.tensor([step[token].logprob for token, step in zip(ids, output.logprobs, strict=True)])
    reason: FinishReason = 'eos' if ids and ids[-1] in call.sampling.eos_token_ids else 'length'
    response_ids = torch.tensor(ids, dtype=torch.int64)
    return call.sample(i, response_ids, logprobs, logprobs.clone(), torch.ones(len(ids)), reason)
