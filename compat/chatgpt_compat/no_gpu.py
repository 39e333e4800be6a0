"""`.cuda()`, `.to('cuda')`, `.to(0)`, `device=0`, `device_map` and `map_location` on a machine without a GPU: they stay
on the CPU, for the script that `chatgpt_compat run` runs and nobody else.

Left out: streams, events and generators of CUDA, and what asks after a device's properties or free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NO_OPERATION = (
    'set_device',
    'synchronize',
    'empty_cache',
    'ipc_collect',
    'reset_accumulated_memory_stats',
    'reset_max_memory_allocated',
    'reset_max_memory_cached',
    'reset_peak_memory_stats',
    'set_per_process_memory_fraction',
)
ZERO = (
    *('current_device', 'memory_allocated', 'max_memory_allocated', 'memory_reserved', 'max_memory_reserved'),
    *('memory_cached', 'max_memory_cached'),
)


def _on_cpu(device: Any) -> Any:
    if isinstance(device, bool):
        return device
    is_cuda = isinstance(device, int) or (
        isinstance(device, (str, torch.device)) and str(device).partition(':')[0] == 'cuda'
    )
    return torch.device('cpu') if is_cuda else device


class _OnCPU(TorchFunctionMode):
    """Takes CUDA devices out of every call of torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        if 'device' in kwargs:
            kwargs = kwargs | {'device': _on_cpu(kwargs['device'])}
        return func(*args, **kwargs)


def _module_cuda(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    return self


def _map_on_cpu(device_map: Any) -> Any:
    if isinstance(device_map, dict):
        return {name: _on_cpu(device) for name, device in device_map.items()}
    return _on_cpu(device_map)


@contextmanager
def without_gpu() -> Iterator[None]:
    """Inside, in this thread, what is asked of CUDA happens on the CPU. Nothing where there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    from transformers import Pipeline, PreTrainedModel

    to, load, pipeline = torch.nn.Module.to, torch.load, Pipeline.__init__
    from_pretrained = vars(PreTrainedModel)['from_pretrained'].__func__

    def module_to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        args = (_on_cpu(args[0]), *args[1:]) if args else args
        return to(self, *args, **({k: _on_cpu(v) if k == 'device' else v for k, v in kwargs.items()}))

    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = 'cpu' if map_location is None or isinstance(map_location, dict) else _on_cpu(map_location)
        return load(f, place, *args, **kwargs)

    def model_on_cpu(cls: type, *args: Any, **kwargs: Any) -> Any:  # weights are loaded in threads, which have no mode
        if 'device_map' in kwargs:
            kwargs['device_map'] = _map_on_cpu(kwargs['device_map'])
        return from_pretrained(cls, *args, **kwargs)

    def pipeline_on_cpu(self: Pipeline, *args: Any, **kwargs: Any) -> None:
        if 'device' in kwargs:
            kwargs['device'] = _on_cpu(kwargs['device'])
        pipeline(self, *args, **kwargs)

    with ExitStack() as stack:
        for name in NO_OPERATION:
            stack.enter_context(patch.object(torch.cuda, name, lambda *args, **kwargs: None))
        for name in ZERO:
            stack.enter_context(patch.object(torch.cuda, name, lambda *args, **kwargs: 0))
        stack.enter_context(patch.object(torch.cuda, 'device', nullcontext))
        stack.enter_context(patch.object(torch, 'load', load_on_cpu))
        stack.enter_context(patch.object(PreTrainedModel, 'from_pretrained', classmethod(model_on_cpu)))
        stack.enter_context(patch.object(Pipeline, '__init__', pipeline_on_cpu))
        stack.enter_context(patch.object(torch.nn.Module, 'cuda', _module_cuda))
        stack.enter_context(patch.object(torch.nn.Module, 'to', module_to))
        stack.enter_context(_OnCPU())
        yield
