"""What is kept of a module beside its weights in fp32: weights that nothing trains in the compute dtype, copies to
generate with, and frozen models that wait in host memory and are on the device only while they are used."""

from __future__ import annotations

import copy
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

WITH_STATES = re.compile(
    r'(^|\.)(embed_positions\.weights|attn\.bias|slope_rate|query_decay|key_decay|diagonal_decay)$'
)
"""buffers that are added to states or multiplied with them: sinusoids (XGLM), a mask (GPT-1), decays (MiniMax);
transformers makes them in a model's dtype too"""


def narrow_states(module: nn.Module, dtype: torch.dtype) -> None:
    """Put buffers that are added to states or multiplied with them in `dtype`, in place, where states are in it too.
    Those that files hold stay as they are."""
    for path, owner in module.named_modules():
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers[name]
            if buffer is not None and buffer.is_floating_point() and WITH_STATES.search(f'{path}.{name}'):
                owner._buffers[name] = buffer.to(dtype)


def kept_in_fp32(module: nn.Module) -> re.Pattern[str] | None:
    """Names of parameters that transformers keeps in fp32 in models of 16 bits, whose code counts on it (gates of some
    mixtures, small convolutions)."""
    parts = {name for m in module.modules() for name in getattr(m, '_keep_in_fp32_modules_strict', None) or ()}
    return re.compile('|'.join(sorted(parts))) if parts else None


def product_weights(module: nn.Module) -> list[nn.Parameter]:
    """Weights that only matrix products read: those of linear layers in transformer blocks, which autocast rounds to
    the compute dtype at each use. Kept in it, they give the same bits. Not so embeddings, norms and heads."""
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.pytorch_utils import Conv1D

    from chatgpt.nn.lora import LoRAConv1D, LoRALinear, is_shared

    linear = {
        id(m.weight): m.weight
        for block in module.modules()
        if isinstance(block, GradientCheckpointingLayer)
        for m in block.modules()
        if type(m) in (nn.Linear, Conv1D, LoRALinear, LoRAConv1D)
    }
    for m in module.modules():
        if type(m) not in (nn.Linear, Conv1D, LoRALinear, LoRAConv1D):
            for parameter in m._parameters.values():
                linear.pop(id(parameter), None)  # read by something else too
    return [p for p in linear.values() if isinstance(p, nn.Parameter) and not is_shared(p)]


@torch.no_grad()
def narrow(weights: Iterable[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    """Keep the fp32 ones of these weights in `dtype`, in place. Those that were changed."""
    changed = [weight for weight in weights if weight.dtype is torch.float32]
    for weight in changed:
        weight.data = weight.detach().to(dtype)
    return changed


class NarrowWeights:
    """Weights that nothing trains, kept in the compute dtype where that changes no bit of a result: `product_weights`,
    which autocast rounds at each use.

    Args:
        autocast: entered by a forward outside of it, where weights and states of two dtypes cannot be multiplied.
    """

    def __init__(self, dtype: torch.dtype, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self.dtype, self.autocast = dtype, autocast
        self._kept: dict[int, list[nn.Parameter]] = {}
        """by id of a module"""
        self._wide: set[int] = set()
        """ids of modules that are in fp32 at the moment"""
        self._hooks: list[Any] = []

    def keep(self, module: nn.Module, frozen: Iterable[nn.Parameter]) -> None:
        """Keep these parameters of `module` in the compute dtype from now on."""
        kept = narrow(frozen, self.dtype)
        if kept and id(module) not in self._kept:
            self._kept[id(module)] = kept
            self._enter_autocast(module)

    def ids(self, module: nn.Module) -> set[int]:
        """ids of the parameters of `module` that are kept so."""
        return {id(p) for p in self._kept.get(id(module), [])}

    def _enter_autocast(self, module: nn.Module) -> None:
        """At the module's own forwards, and those of transformers' models in it, which a user calls too
        (`actor.model.generate`)."""
        from transformers import PreTrainedModel

        entered: list[AbstractContextManager[Any]] = []

        def enter(*_: Any) -> None:
            entered.append(nullcontext() if id(module) in self._wide else self.autocast())
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        for part in module.modules():
            if part is module or isinstance(part, PreTrainedModel):
                self._hooks.append(part.register_forward_pre_hook(enter))
                self._hooks.append(part.register_forward_hook(leave, always_call=True))

    @contextmanager
    def widened(self, module: nn.Module, *, changes: bool = False, learns: bool = False) -> Iterator[None]:
        """Inside, weights of `module` that are kept in 16 bits are in fp32.

        Args:
            changes: they take the values that they have at the end; otherwise they come back as they were.
            learns: with `changes`, those that are not numbers of 16 bits stay in fp32, so that what is saved is exact.
        """
        kept = [(p, p.data) for p in self._kept.get(id(module), [])]
        for parameter, data in kept:
            parameter.data = data.float()
        self._wide.add(id(module))
        try:
            yield
        finally:
            self._wide.discard(id(module))
            for parameter, data in kept:
                if changes:
                    before = parameter.data
                    data.copy_(before)
                    if learns and not torch.equal(data.float(), before):
                        self._kept[id(module)] = [p for p in self._kept[id(module)] if p is not parameter]
                        continue
                parameter.data = data

    def release(self) -> None:
        """Give back fp32 weights, and forwards without hooks."""
        for hook in self._hooks:
            hook.remove()
        for parameter in (p for kept in self._kept.values() for p in kept):
            parameter.data = parameter.data.float()
        self._hooks.clear()
        self._kept.clear()


@contextmanager
def lora_merged(module: nn.Module) -> Iterator[None]:
    """Adapters folded into the weights inside; the weights' exact bits restored after. Nothing happens without
    adapters, and with weights that other models share."""
    from chatgpt.nn import lora

    with lora.merged(module) if lora.can_fold(module) else nullcontext():
        yield


@torch.no_grad()
def merge_for_good(copied: nn.Module, *, in_place: bool = False) -> None:
    """Fold adapters into a copy that is thrown away after use, layer by layer: nothing is put aside.

    in_place: into the memory that its adapted layers have, which must be theirs alone.
    """
    from chatgpt.nn import lora

    for layer in lora.layers_to_fold(copied) if lora.can_fold(copied) else ():
        weight = layer.folded_weight().to(layer.weight.dtype)
        if in_place:
            layer.weight.copy_(weight)
            layer.lora_B.zero_()
        else:  # with one process a copy's tensors are the trained ones themselves
            layer.weight.data, layer.lora_B.data = weight, torch.zeros_like(layer.lora_B)
        layer.merged = True  # so that the local engine takes it for a plain layer


@torch.no_grad()
def cast_copy(module: nn.Module, dtype: torch.dtype, into: nn.Module | None = None) -> nn.Module:
    """A deep copy with floating parameters in `dtype` and LoRA folded in, made without a copy in fp32 on the way.

    into: an earlier copy of this module in this dtype (`KeptCopy`), which takes the numbers in the memory that it has.

    Weights are folded one at a time, in fp32, and rounded once; the copy's own adapters are zero, so it computes, saves
    and folds as it stands. What a shared trunk holds is not copied, and its adapters are cast beside it. Buffers keep
    their dtype: rotary frequencies and the like lose their meaning in 16 bits. Those that are added to states or
    multiplied with them take the new one, and weights that transformers keeps in fp32 stay in it.
    """
    from chatgpt.nn import lora
    from chatgpt.nn.quantized import NF4Linear

    memo: dict[int, Any] = {id(part): part for part in module.modules() if isinstance(part, NF4Linear)}
    fp32 = kept_in_fp32(module)
    adapted = {id(layer.weight): layer for layer in lora.layers_to_fold(module)} if lora.can_fold(module) else {}
    for name, parameter in module.named_parameters():
        if lora.is_shared(parameter):
            memo[id(parameter)] = parameter
            continue
        layer = adapted.get(id(parameter))
        data = parameter.detach() if layer is None else layer.folded_weight()
        if into is not None:
            into.get_parameter(name).copy_(data)
            continue
        stays = not data.is_floating_point() or (fp32 is not None and fp32.search(name) is not None)
        data = data.clone() if stays else data.to(dtype, copy=layer is None)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=False)
    for name, buffer in module.named_buffers() if into is None else ():
        if buffer.is_floating_point() and WITH_STATES.search(name):
            memo[id(buffer)] = buffer.to(dtype, copy=True)
    copied = copy.deepcopy(module, memo) if into is None else into
    for buffer, own in zip(copied.buffers(), module.buffers(), strict=True) if into is not None else ():
        if buffer is not own:
            buffer.copy_(own)
    for layer in lora.lora_layers(copied).values():
        if layer.shares_base:
            continue
        layer.saved = None  # the base weights, which the copy would keep alive in fp32
        layer.merged = False
        layer.lora_B.zero_()
    return copied


class KeptCopy:
    """The copy of a module in the compute dtype, which stays between two uses while somebody wants it to."""

    def __init__(self) -> None:
        self._users: WeakSet[Any] = WeakSet()
        self._module: weakref.ref[nn.Module] | None = None
        self._copied: nn.Module | None = None
        self._form: Any = None

    def keep(self, user: Any, keep: bool) -> None:
        """Note whether `user` wants the copy to stay; without users it is freed."""
        if keep:
            self._users.add(user)
        else:
            self._users.discard(user)
        if not self._users:
            self._copied = None

    @contextmanager
    def lent(self, module: nn.Module, dtype: torch.dtype) -> Iterator[SimpleNamespace]:
        """Inside, `copied` of the result is the copy of this module if it is there, else None. What stands there at the
        end stays."""
        copied, self._copied = self._copied, None  # a copy that is in use is nobody else's
        if copied is not None and (self._module is None or self._module() is not module):
            copied = None
        if copied is not None and self._form != _form(module, copied, dtype):
            copied = None
        held = SimpleNamespace(copied=copied)
        del copied
        yield held
        if self._users and held.copied is not None:
            self._module, self._copied = weakref.ref(module), held.copied
            self._form = _form(module, held.copied, dtype)

    def free(self) -> None:
        self._copied = None


def _form(module: nn.Module, copied: nn.Module, dtype: torch.dtype) -> Any:
    """Equal where a new copy would differ from this one in the numbers of its tensors only."""
    from chatgpt.nn.trunk import plain_settings

    def shapes(of: nn.Module) -> list[Any]:
        return [(name, t.shape) for name, t in (*of.named_parameters(), *of.named_buffers())]

    return dtype, next(module.parameters()).device, plain_settings(module), shapes(module) == shapes(copied)


class Offloaded(ABC):
    """A frozen module in host memory. `with` this, it is on the device."""

    @abstractmethod
    def onload(self) -> None: ...

    @abstractmethod
    def offload(self) -> None: ...

    def __enter__(self) -> None:
        self.onload()

    def __exit__(self, *_: object) -> None:
        self.offload()


class OffloadedWeights(Offloaded):
    """Moves weights and buffers, keeping parameters the same objects. The host copy stays for good, page-locked for a
    CUDA device: frozen weights never change, so offloading copies nothing."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.tensors = [*module.parameters(), *(b for b in module.buffers() if b is not None)]
        self.host = [t.detach().to('cpu', copy=device.type == 'cuda') for t in self.tensors]
        if device.type == 'cuda':
            self.host = [t.pin_memory() for t in self.host]
        for tensor, kept in zip(self.tensors, self.host, strict=True):
            tensor.data = kept

    def on_device(self, kept: Tensor) -> Tensor:
        return kept.to(self.device, non_blocking=True)

    def onload(self) -> None:
        for tensor, kept in zip(self.tensors, self.host, strict=True):
            tensor.data = self.on_device(kept)

    def offload(self) -> None:
        for tensor, kept in zip(self.tensors, self.host, strict=True):
            tensor.data = kept


class OffloadedShards(Offloaded):
    """The same for a module under FSDP2, which has to know where its shards are."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module.to('cpu'), device

    def onload(self) -> None:
        self.module.to(self.device)

    def offload(self) -> None:
        self.module.to('cpu')
