"""`trainer.accelerator` on top of a strategy, and CUDA calls on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.strategies import Strategy


class Accelerator:
    """The interface of `accelerate.Accelerator` (`device`, `gather`, `unwrap_model`, ...) on a strategy.

    Args:
        log: called by `log` on the main process with a dict of values and a step or None.
        end: called by `end_training`.
    """

    def __init__(
        self,
        strategy: Strategy,
        log: Callable[[dict[str, Any], int | None], None] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._strategy, self._log, self._end = strategy, log, end
        self.device, self.process_index, self.num_processes = strategy.device, strategy.rank, strategy.world_size
        self.local_process_index = strategy.local_rank
        self.is_main_process, self.is_local_main_process = strategy.is_rank_0, strategy.local_rank == 0
        self.is_last_process = strategy.rank == strategy.world_size - 1
        precision = strategy.numerics.precision
        self.mixed_precision = 'no' if precision == 'fp32' else precision
        self.sync_gradients = True
        self.state = SimpleNamespace(deepspeed_plugin=None, num_processes=strategy.world_size)
        self.distributed_type = 'MULTI_GPU' if strategy.world_size > 1 else 'NO'

    def wait_for_everyone(self) -> None:
        self._strategy.barrier()

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        """Returns the model without the strategy's wrappers; of an `Actor` or another role the transformers model."""
        bare: Any = self._strategy.unwrap(model) if isinstance(model, nn.Module) else model
        return bare.model if isinstance(bare, (Actor, Critic, RewardModel)) and not hasattr(bare, 'v_head') else bare

    def prepare(self, *items: Any, **_: Any) -> Any:
        """Moves modules to the device in place and returns all items; others are unchanged."""
        for item in items:
            if isinstance(item, nn.Module):
                item.to(self.device)
        return items[0] if len(items) == 1 else items

    def gather(self, tensor: Any) -> Any:
        """Concatenates a tensor, or each in a list, tuple or dict, over processes along the first dimension."""
        if isinstance(tensor, dict):
            return {name: self.gather(value) for name, value in tensor.items()}
        if isinstance(tensor, (list, tuple)):
            return type(tensor)(self.gather(value) for value in tensor)
        if not isinstance(tensor, Tensor) or self.num_processes == 1:
            return tensor
        parts = self._strategy.all_gather_object(tensor.cpu())
        return torch.cat([part if part.dim() else part[None] for part in parts]).to(self.device)

    gather_for_metrics = gather

    def reduce(self, tensor: Tensor, reduction: str = 'sum', scale: float = 1.0) -> Tensor:
        """Returns the sum or mean of a tensor over processes."""
        total = self._strategy.all_reduce(tensor.clone(), op='sum') * scale
        return total / self.num_processes if reduction == 'mean' else total

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_main_process:
            print(*args, **kwargs)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if self.is_main_process and self._log is not None:
            self._log(values, step)

    def end_training(self) -> None:
        if self._end is not None:
            self._end()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def autocast(self) -> AbstractContextManager[Any]:
        return self._strategy.autocast()

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self.is_main_process else lambda *_, **__: None

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def free_memory(self) -> None:
        """Does nothing: no memory is held here."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f'accelerator.{name} is not served: there is no accelerate behind this trainer; optimizer steps and '
            "backward passes are the trainer's, and other questions `accelerate.Accelerator()` answers"
        )


# ---------------------------------------------------------------------- CUDA without a GPU

NO_OPERATION = (
    *('set_device', 'synchronize', 'empty_cache', 'ipc_collect', 'reset_accumulated_memory_stats'),
    *('reset_max_memory_allocated', 'reset_max_memory_cached', 'reset_peak_memory_stats'),
    'set_per_process_memory_fraction',
)
ZERO = (
    *('current_device', 'memory_allocated', 'max_memory_allocated', 'memory_reserved', 'max_memory_reserved'),
    *('memory_cached', 'max_memory_cached'),
)


def _on_cpu(device: Any) -> Any:
    """Replaces CUDA devices by the CPU, also in a map of devices."""
    if isinstance(device, dict):
        return {name: _on_cpu(place) for name, place in device.items()}
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_name = isinstance(device, (str, torch.device)) and str(device).partition(':')[0] == 'cuda'
    return torch.device('cpu') if is_number or is_name else device


def _moved(kwargs: dict[str, Any], name: str = 'device') -> dict[str, Any]:
    return kwargs | {name: _on_cpu(kwargs[name])} if name in kwargs else kwargs


class _OnCPU(TorchFunctionMode):
    """Replaces CUDA devices by the CPU in every call of torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return func(*args, **_moved(kwargs or {}))


@contextmanager
def without_gpu() -> Iterator[None]:
    """Runs CUDA calls of this thread on the CPU inside the block: `.cuda()`, `.to(0)`, `device=`, `device_map`,
    `map_location`. Does nothing if there is a GPU. Does not replace CUDA streams, events and generators, nor queries of
    device properties."""
    if torch.cuda.is_available():
        yield
        return
    from transformers import Pipeline, PreTrainedModel

    to, load, pipeline = nn.Module.to, torch.load, Pipeline.__init__
    from_pretrained = vars(PreTrainedModel)['from_pretrained'].__func__

    def module_to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return to(self, *map(_on_cpu, args[:1]), *args[1:], **_moved(kwargs))

    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = 'cpu' if map_location is None or isinstance(map_location, dict) else _on_cpu(map_location)
        return load(f, place, *args, **kwargs)

    def model_on_cpu(cls: type, *args: Any, **kwargs: Any) -> Any:  # loads weights in threads, which have no mode
        return from_pretrained(cls, *args, **_moved(kwargs, 'device_map'))

    def pipeline_on_cpu(self: Pipeline, *args: Any, **kwargs: Any) -> None:
        pipeline(self, *args, **_moved(kwargs))

    instead: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, lambda *args, **kwargs: None) for name in NO_OPERATION),
        *((torch.cuda, name, lambda *args, **kwargs: 0) for name in ZERO),
        (torch.cuda, 'device', nullcontext),
        (torch, 'load', load_on_cpu),
        (PreTrainedModel, 'from_pretrained', classmethod(model_on_cpu)),
        (Pipeline, '__init__', pipeline_on_cpu),
        (nn.Module, 'cuda', lambda self, device=None: self),
        (nn.Module, 'to', module_to),
    ]
    with ExitStack() as stack:
        for owner, name, value in instead:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(_OnCPU())
        yield
