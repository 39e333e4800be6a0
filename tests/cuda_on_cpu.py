"""A pretend CUDA device: tensors on `cuda:0` compute on the CPU, refuse to mix with CPU tensors as on CUDA, and count
the operations that make the host wait for a GPU.

::

    with pretend_cuda() as cuda:
        strategy = NaiveStrategy(device='cuda:0')
        ...
        print(cuda.syncs)  # Counter({Sync(kind='item', where='chatgpt/trainer/step.py:131'): 3})

Counted, by the calling line of chatgpt: `item` and its callers (`float`, `bool`, `if`), `tolist`, boolean masks as
indices, `nonzero` and other results with a size that depends on values, `torch.cuda.synchronize`, and copies between
host and device, except page-locked ones with `non_blocking`. A copy from pageable memory always counts, since CUDA may
wait.

A CUDA graph records operations and repeats them at `replay` on the same tensors. A wait inside a capture is an error,
as on CUDA; operations on a device other than that of the capture's stream are not recorded.

Does not cover streams (everything is in order), memory, speed, CUDA's rounding and kernels, autocast (fp32 only),
`torch.compile`, operations that change a tensor's shape in place, a device that torch's C++ code takes from one of
several tensors (here from the latest operation), and the meta device outside `with torch.device('meta')`.
`torch.cuda.is_available()` stays False, so the device must be named. One thread only.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

import chatgpt

PACKAGE = str(Path(chatgpt.__file__).parent)

HOST_INDICES = {'index', 'index_put', 'index_put_', '_index_put_impl_', '_unsafe_index', '_unsafe_index_put'}
"""operations that also accept CPU indices, which are copied"""
NO_HOST_SCALARS = {*'cat stack gather index_select index_add index_copy index_copy_ scatter scatter_add'.split()}
"""operations that refuse a CPU tensor without dimensions, which arithmetic accepts as a number"""
MEMORY = 16 * 2**30
"""bytes of a device, all of them free"""
SIZED_BY_DEVICE = {'nonzero', 'masked_select', 'bincount', '_unique2', 'unique_dim', 'unique_consecutive'}
COPIES = {'_to_copy', 'copy_'}


class Sync(NamedTuple):
    """A wait of the host for the device."""

    kind: str
    where: str
    """line of chatgpt, or of another package if chatgpt is not on the stack"""


class PretendTensor(Tensor):
    """A tensor on the pretend device; its values are in `inner`, on the CPU."""

    inner: Tensor  # type: ignore[assignment]
    place: torch.device

    @staticmethod
    def __new__(cls, inner: Tensor, place: torch.device) -> PretendTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device('meta'),  # needs no hardware
        )
        made.inner, made.place = inner, place
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f'{func}: the pretend device of this tensor has been closed')

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return int(self.place.index)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f'{self.inner!r} on {self.place}'

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            memo[id(self)] = (
                nn.Parameter(copied, self.requires_grad)
                if isinstance(self, nn.Parameter)
                else copied.requires_grad_(self.requires_grad)
            )
        return memo[id(self)]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Returns self if nothing changes; torch would treat it as a tensor on the meta device."""
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop('copy', False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device = self.place if device is None else _indexed(device)
        if device == self.place and dtype in (None, self.dtype) and not copy:
            return self
        return torch.ops.aten._to_copy(self, dtype=dtype, device=device, non_blocking=non_blocking)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
        return self.to('cuda' if device is None else device, non_blocking=non_blocking)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.place, **kwargs)

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        _device().note('tolist')
        return self.inner.detach().tolist()

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"can't convert {self.place} device type tensor to numpy; use Tensor.cpu() first")

    __array__ = numpy  # type: ignore[assignment]


def _without_lists(index: Any) -> Any:
    """Converts lists to CPU tensors, which torch would make without values on the meta device."""
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    return torch.tensor(index, dtype=None if index else torch.int64) if isinstance(index, list) else index


@dataclass
class PretendCuda:
    """The state of the pretend device; `pretend_cuda` yields it."""

    num_devices: int = 1
    syncs: Counter[Sync] = field(default_factory=Counter)
    """number of waits by line"""
    current: int = 0
    """the current device"""
    latest: torch.device = torch.device('cuda', 0)
    """device of the latest operation"""
    on_meta: bool = False
    """within a call under `with torch.device('meta')`"""
    capturing: PretendGraph | None = None
    pinned: dict[int, Tensor] = field(default_factory=dict)
    """page-locked tensors by address; kept alive, so that no address is reused"""

    def note(self, kind: str) -> None:
        if self.capturing is not None:
            raise RuntimeError(f'CUDA error: operation not permitted when stream is capturing ({kind} at {_caller()})')
        self.syncs[Sync(kind, _caller())] += 1

    def is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, PretendTensor) and tensor.untyped_storage().data_ptr() in self.pinned

    def pin(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, PretendTensor):
            raise RuntimeError(f"cannot pin '{tensor.place.type} tensor': only dense CPU tensors can be pinned")
        if self.is_pinned(tensor):
            return tensor
        copied = tensor.detach().clone()
        self.pinned[copied.untyped_storage().data_ptr()] = copied
        return copied


_open: list[PretendCuda] = []
"""the device inside `pretend_cuda`"""


def _device() -> PretendCuda:
    if not _open:
        raise RuntimeError('the pretend device of this tensor has been closed')
    return _open[-1]


@contextmanager
def pretend_cuda(num_devices: int = 1) -> Iterator[PretendCuda]:
    """Makes 'cuda:0' to 'cuda:<num_devices - 1>' devices of this thread; their tensors are invalid afterwards.

    Raises:
        RuntimeError: there is a real GPU, or the context is entered twice.
    """
    if torch.cuda.is_available():
        raise RuntimeError('pretend_cuda: this machine has a GPU; run the tests marked gpu on it')
    if _open:
        raise RuntimeError('pretend_cuda: already inside')
    cuda = PretendCuda(num_devices)
    swaps, lifts = torch.__future__.get_swap_module_params_on_conversion(), torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        for owner, name, replacement in _replacements(cuda):
            stack.enter_context(patch.object(owner, name, replacement))
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        torch.__future__.set_swap_module_params_on_conversion(True)  # a module's parameters change class
        torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device=...) copies by a visible operation
        stack.callback(_forget_tables)
        stack.callback(_open.clear)
        _open.append(cuda)
        stack.enter_context(_Operations(cuda))
        yield cuda


def _forget_tables() -> None:
    """Clears bitsandbytes' cached code tables, which are on the device of their first use."""
    if (functional := sys.modules.get('bitsandbytes.functional')) is not None:
        functional.name2qmap.clear()


# ---------------------------------------------------------------- operations


class _Operations(TorchDispatchMode):
    """Runs every operation on the CPU and sets the device of its results."""

    def __init__(self, cuda: PretendCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = list(_tensors((args, kwargs)))
        device = _asked_device(func, args, kwargs)
        places = {t.place for t in tensors if isinstance(t, PretendTensor)}
        name = func._schema.name.split('::')[1]
        if device is not None and device.type == 'meta' and not self.cuda.on_meta:
            # torch's C++ code creates a tensor on the device of another: that of the operation before
            device = next(iter(places), self.cuda.latest)
        if not places and (device is None or device.type != 'cuda') and not kwargs.get('pin_memory'):
            return func(*args, **kwargs)
        if places and name not in COPIES:
            _check_places(name, args, tensors, places)
        self._count(name, args, kwargs, tensors, device)
        if device is not None and device.type == 'cuda':
            device = _indexed(device)
        pin = kwargs.pop('pin_memory', None)
        place = device if device is not None else tensors[0].device if name in COPIES else next(iter(places))
        if place.type == 'cuda':
            self.cuda.latest = place
        result = self._run(func, args, kwargs, place)
        return self.cuda.pin(result) if pin else result

    def _run(self, func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
        inner_args, inner_kwargs = _mapped(_inner, (args, kwargs))
        graph = self.cuda.capturing
        recorded = graph is not None and graph.place == place
        if graph is not None and recorded:
            graph.keep(func, inner_args, inner_kwargs)
        with torch.no_grad():
            out = func(*inner_args, **inner_kwargs)
        if graph is not None and recorded:
            graph.steps.append((func, inner_args, inner_kwargs, out))
        returns = func._schema.returns
        if returns and returns[0].alias_info is not None and returns[0].alias_info.is_write:
            return kwargs['out'] if 'out' in kwargs else args[0]
        if place.type == 'cpu':
            return out
        return _mapped(lambda x: PretendTensor(x.detach(), place) if isinstance(x, Tensor) else x, out)

    def _count(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], device: torch.device | None) -> None:
        on_device = [isinstance(t, PretendTensor) for t in tensors]
        if name in COPIES:
            self._count_copy(name, args, kwargs, tensors, device)
        elif not any(on_device):
            return
        elif name == '_local_scalar_dense':
            self.cuda.note('item')
        elif name in SIZED_BY_DEVICE or (name == 'repeat_interleave' and kwargs.get('output_size') is None):
            self.cuda.note(name)
        elif name in HOST_INDICES:
            indices = [i for i in args[1] if i is not None]
            if not all(isinstance(i, PretendTensor) for i in indices):
                self.cuda.note('index to device')
            # x[mask] = number does not need the count of True
            one_number = name.startswith(('index_put', '_index_put')) and args[2].numel() == 1 and len(indices) == 1
            if any(i.dtype in (torch.bool, torch.uint8) for i in indices) and not one_number:
                self.cuda.note('boolean mask')

    def _count_copy(
        self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], device: torch.device | None
    ) -> None:
        source, target = tensors[-1], tensors[0]
        comes = isinstance(source, PretendTensor)
        if name == 'copy_':
            goes, non_blocking = isinstance(target, PretendTensor), kwargs.get('non_blocking') or args[2:3] == (True,)
            waits = not (non_blocking and self.cuda.is_pinned(target if comes else source))
        else:  # a new host tensor is not page-locked
            goes = comes if device is None else device.type != 'cpu'
            waits = comes or not (kwargs.get('non_blocking') and self.cuda.is_pinned(source))
        if goes != comes and waits:
            self.cuda.note('copy to host' if comes else 'copy to device')


def _check_places(name: str, args: Any, tensors: list[Tensor], places: set[torch.device]) -> None:
    """Raises RuntimeError where CUDA would."""
    hosts = [t for t in tensors if not isinstance(t, PretendTensor)]
    if name in HOST_INDICES:
        if not isinstance(args[0], PretendTensor):
            raise RuntimeError(
                f'indices should be either on cpu or on the same device as the indexed tensor (cpu) ({_caller()})'
            )
        hosts = [t for t in args[2:3] if isinstance(t, Tensor) and not isinstance(t, PretendTensor)]
    wrong = [t for t in hosts if t.dim() > 0 or name in NO_HOST_SCALARS]
    if wrong or len(places) > 1:
        found = [*sorted(map(str, places)), 'cpu']
        raise RuntimeError(
            'Expected all tensors to be on the same device, but found at least two devices, '
            f'{found[0]} and {found[1]}! ({name}, {_caller()})'
        )


def _asked_device(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    if kwargs.get('device') is not None:
        return torch.device(kwargs['device'])
    for value, parameter in zip(args, func._schema.arguments, strict=False):
        if parameter.name == 'device' and value is not None:
            return torch.device(value)
    return None


def _indexed(device: Any) -> torch.device:
    """Returns the device with an index ('cuda': the current one). Raises ValueError if it does not exist."""
    device = torch.device('cuda', device) if isinstance(device, int) else torch.device(device)
    if device.type != 'cuda':
        return device
    index = _device().current if device.index is None else device.index
    if not index < _device().num_devices:
        raise RuntimeError(f'CUDA error: invalid device ordinal ({device}; pretended are {_device().num_devices})')
    return torch.device('cuda', index)


def _mapped(function: Callable[[Any], Any], nested: Any) -> Any:
    """Applies `function` to each leaf of tuples, lists and dicts: a cheaper `tree_map`."""
    if isinstance(nested, (tuple, list)):
        return type(nested)([_mapped(function, x) for x in nested])
    if isinstance(nested, dict):
        return {key: _mapped(function, x) for key, x in nested.items()}
    return function(nested)


def _tensors(nested: Any) -> Iterator[Tensor]:
    """Yields the tensors in tuples, lists and dicts, in order."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (tuple, list)):
        for x in nested:
            yield from _tensors(x)
    elif isinstance(nested, dict):
        yield from _tensors(list(nested.values()))


def _inner(x: Any) -> Any:
    if isinstance(x, PretendTensor):
        return x.inner
    return torch.device('cpu') if isinstance(x, torch.device) else x


def _caller() -> str:
    """Returns the innermost line of chatgpt on the stack, else the innermost outside torch and this file."""
    frame, other = sys._getframe(1), ''
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__:
            if name.startswith(PACKAGE):
                return f'chatgpt{name[len(PACKAGE) :]}:{frame.f_lineno}'
            if not other and '/torch/' not in name and '<' not in name:
                other = f'{Path(name).name}:{frame.f_lineno}'
        frame = frame.f_back  # type: ignore[assignment]
    return other or 'torch'


# ---------------------------------------------------------------- torch.cuda


class PretendGraph:
    """A replacement of `torch.cuda.CUDAGraph` that records operations of one device and repeats them at `replay`."""

    def __init__(self) -> None:
        self.place = torch.device('cuda', 0)
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def keep(self, func: Any, args: Any, kwargs: Any) -> None:
        """Saves the tensors that an operation overwrites, since a capture computes nothing."""
        for number, parameter in enumerate(func._schema.arguments):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(parameter.name)
                self.before += [(t, t.clone()) for t in _tensors(written)]

    def end(self) -> None:
        for tensor, before in reversed(self.before):
            tensor.copy_(before)
        self.before = []

    def replay(self) -> None:
        for func, args, kwargs, out in self.steps:
            with torch.no_grad():
                again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def _replacements(cuda: PretendCuda) -> list[tuple[Any, str, Any]]:
    """Returns (object, name, replacement) of every patched attribute."""
    kept_default = DeviceContext.__torch_function__
    kept_data = torch._C.TensorBase.data  # type: ignore[attr-defined]

    @contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before, cuda.current = cuda.current, _number(device)
        try:
            yield
        finally:
            cuda.current = before

    @contextmanager
    def capture(
        graph: PretendGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = 'global'
    ) -> Iterator[None]:
        graph.place = torch.device('cuda', cuda.current) if stream is None else stream.device
        cuda.capturing = graph
        try:
            yield
        finally:
            cuda.capturing = None
            graph.end()

    def stream(device: Any = None, **_: Any) -> Any:
        place = torch.device('cuda', _number(device))
        return SimpleNamespace(device=place, synchronize=lambda: cuda.note('synchronize'))

    class Event:
        def record(self, stream: Any = None) -> None:
            pass

        def synchronize(self) -> None:
            cuda.note('event')

    def data(self: Tensor) -> Any:
        return self.detach() if isinstance(self, PretendTensor) else kept_data.__get__(self)  # type: ignore[attr-defined]

    def set_data(self: Tensor, value: Tensor) -> None:
        if isinstance(self, PretendTensor) or isinstance(value, PretendTensor):
            made = value.detach()
            torch.utils.swap_tensors(
                self, nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
            )
        else:
            kept_data.__set__(self, value)  # type: ignore[attr-defined]

    def _number(device: Any) -> int:
        return int(_indexed('cuda' if device is None else device).index)

    def by_default(self: DeviceContext, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, cuda.on_meta = cuda.on_meta, self.device.type == 'meta'
        try:
            return kept_default(self, func, types, args, kwargs)
        finally:
            cuda.on_meta = before

    def synchronize(device: Any = None) -> None:
        cuda.note('synchronize')

    return [
        (torch, 'inference_mode', lambda mode=True: torch.no_grad() if mode else nullcontext()),
        (Tensor, 'pin_memory', lambda self, *_: cuda.pin(self)),
        (Tensor, 'is_pinned', lambda self, *_: cuda.is_pinned(self)),
        (Tensor, 'data', property(data, set_data)),
        (DeviceContext, '__torch_function__', by_default),
        (torch.accelerator, 'current_accelerator', lambda check_available=False: None),  # as without a CUDA build
        (torch.cuda, '_lazy_init', lambda: None),
        (torch.cuda, 'current_device', lambda: cuda.current),
        (torch.cuda, 'set_device', lambda device: setattr(cuda, 'current', _number(device))),
        (torch.cuda, 'device', on_device),
        (torch.cuda, 'synchronize', synchronize),
        (torch.cuda, 'max_memory_allocated', lambda device=None: 0),
        (torch.cuda, 'memory_allocated', lambda device=None: 0),
        (torch.cuda, 'memory_reserved', lambda device=None: 0),
        (torch.cuda, 'mem_get_info', lambda device=None: (MEMORY, MEMORY)),
        (torch.cuda, 'is_bf16_supported', lambda including_emulation=True: True),
        (torch.cuda, 'graph_pool_handle', lambda: (0, 0)),
        (torch.cuda, 'is_current_stream_capturing', lambda: False),
        (torch.cuda, 'Stream', stream),
        (torch.cuda, 'current_stream', stream),
        (torch.cuda, 'set_stream', lambda stream: None),
        (torch.cuda, 'default_generators', (torch.default_generator,) * cuda.num_devices),
        (torch.cuda, 'CUDAGraph', PretendGraph),
        (torch.cuda, 'Event', Event),
        (torch.cuda, 'graph', capture),
    ]
