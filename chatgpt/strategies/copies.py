"""Forms of a module other than its fp32 weights: weights in the compute dtype with fp32 masters of those that learn,
copies for generation, and frozen models that are in host memory while they are not used."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STATE_BUFFERS = re.compile(
    r'(^|\.)(embed_positions\.weights|attn\.bias|slope_rate|query_decay|key_decay|diagonal_decay)$'
)
"""buffers that are added to hidden states or multiplied with them: sinusoids (XGLM), a mask (GPT-1), decays (MiniMax);
transformers casts them to the model's dtype too"""


def narrow_states(module: nn.Module, dtype: torch.dtype) -> None:
    """Converts non-persistent buffers that are added to hidden states or multiplied with them to `dtype`, in place."""
    for path, owner in module.named_modules():
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers[name]
            if buffer is not None and buffer.is_floating_point() and STATE_BUFFERS.search(f'{path}.{name}'):
                owner._buffers[name] = buffer.to(dtype)


def kept_in_fp32(module: nn.Module) -> re.Pattern[str] | None:
    """Returns a pattern of the names of parameters that transformers keeps in fp32 in models of 16 bits (gates of some
    mixtures of experts, small convolutions)."""
    parts = {name for m in module.modules() for name in getattr(m, '_keep_in_fp32_modules_strict', None) or ()}
    return re.compile('|'.join(sorted(parts))) if parts else None


def matmul_weights(module: nn.Module) -> list[nn.Parameter]:
    """Returns the weights that only matrix products read: those of linear layers in transformer blocks. Autocast rounds
    them to the compute dtype at each use, so storing them in it gives the same bits; not so embeddings, norms, heads.
    """
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
                linear.pop(id(parameter), None)  # other modules read it too
    return [p for p in linear.values() if isinstance(p, nn.Parameter) and not is_shared(p)]


def fits(module: nn.Module, weights: Iterable[nn.Parameter], dtype: torch.dtype) -> list[bool]:
    """Returns, for weights of `module`, whether `dtype` rounds none of their numbers; for weights on the meta device,
    whether the files that they are read from have it."""
    sources = ((m, getattr(m, 'weights_source', None)) for m in module.modules())
    read = [m for m, s in sources if s is not None and s.dtype is dtype and not s.wide and s.adapter is None]
    stored = {id(p) for trunk in read for p in trunk.parameters()}
    return [id(p) in stored if p.is_meta else torch.equal(p.to(dtype).to(p.dtype), p) for p in weights]


def stored_weights(module: nn.Module) -> list[nn.Parameter]:
    """Returns the weights that a bf16 run stores in bf16: those of transformers models in `module`, but for what
    transformers itself keeps in fp32 in models of 16 bits. Heads of `chatgpt.nn` compute in fp32 and are not among
    them. Empty for a model with adapters, whose base must be exact for folding."""
    from transformers import PreTrainedModel

    from chatgpt.nn.lora import has_lora, is_shared

    if has_lora(module):
        return []
    models = [(path, part) for path, part in module.named_modules() if isinstance(part, PreTrainedModel)]
    named = [pair for path, part in models for pair in part.named_parameters(path)]
    fp32 = kept_in_fp32(module)
    found = {id(p): p for name, p in named if not is_shared(p) and not (fp32 is not None and fp32.search(name))}
    return list(found.values())


@torch.no_grad()
def narrow(weights: Iterable[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    """Converts the fp32 ones among these weights to `dtype`, in place, and returns them."""
    changed = [weight for weight in weights if weight.dtype is torch.float32]
    for weight in changed:
        weight.data = weight.detach().to(dtype)
    return changed


def of_mixed_dtypes(hook: Any) -> Any:
    """Marks a forward hook that a copy in one dtype must not have."""
    hook.of_mixed_dtypes = True
    return hook


def without_autocast(copied: nn.Module) -> nn.Module:
    """Removes the hooks of `NarrowWeights` from a copy in which all weights have the compute dtype."""
    for part in copied.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, 'of_mixed_dtypes', False)]:
                del hooks[key]
                part._forward_hooks_always_called.pop(key, None)
    return copied


class NarrowWeights:
    """Weights that are stored in the compute dtype: frozen ones, and those that learn, in place of which an optimizer
    steps fp32 masters (Micikevicius et al. 2018, "Mixed precision training", section 3.1). Autocast then casts no
    weight in a micro-batch, and with all weights of a model in 16 bits the states between its blocks are too.

    Args:
        autocast: context to enter in forwards without it, where weights and states of two dtypes cannot be multiplied.
    """

    def __init__(self, dtype: torch.dtype, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self.dtype, self.autocast = dtype, autocast
        self._kept: dict[int, list[nn.Parameter]] = {}
        """by id of a module"""
        self._wide: set[int] = set()
        """ids of modules inside `widened`"""
        self._masters: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """(weight, master) by id of the weight"""
        self._hooks: list[Any] = []

    def keep(self, module: nn.Module, frozen: Iterable[nn.Parameter]) -> None:
        """Stores these parameters of `module` in the compute dtype from now on."""
        kept = narrow(frozen, self.dtype)
        if kept and id(module) not in self._kept:
            self._kept[id(module)] = kept
            self._enter_autocast(module)

    def give_masters(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Stores the weights of a module in 16 bits if this optimizer trains all of them, and gives it their masters.

        The gradient of a micro-batch is added to the master's in fp32 and then freed.
        """
        owned = {id(p) for group in optimizer.param_groups for p in group['params'] if p.requires_grad}
        weights = [p for p in stored_weights(module) if p.dtype is torch.float32]
        if any(id(p) not in owned for p in weights):
            return
        for weight in weights:
            master = nn.Parameter(weight.data)
            master.master_of = weight  # type: ignore[attr-defined]
            self._masters[id(weight)] = weight, master
            weight.data = weight.detach().to(self.dtype)
            self._hooks.append(weight.register_post_accumulate_grad_hook(self._add_gradient))
        for group in optimizer.param_groups:
            group['params'] = [self.exact(p) for p in group['params']]
        for weight in weights:
            if weight in optimizer.state:
                optimizer.state[self.exact(weight)] = optimizer.state.pop(weight)
        if weights:
            self._enter_autocast(module)

    def _add_gradient(self, weight: Tensor) -> None:
        master, gradient = self.exact(weight), weight.grad
        weight.grad = None
        if gradient is not None:
            master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
        for hook in (master._post_accumulate_grad_hooks or {}).values():  # such as of a reduction over ranks
            hook(master)

    def exact(self, tensor: Any) -> Any:
        """Returns the master of a weight, and any other tensor itself."""
        return self._masters[id(tensor)][1] if id(tensor) in self._masters else tensor

    def mastered(self, module: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Returns (weight, master) of the weights of a module that have one."""
        return [self._masters[id(p)] for p in module.parameters() if id(p) in self._masters]

    @torch.no_grad()
    def store(self, module: nn.Module) -> None:
        """Writes masters into the weights of a module, after a step or a load."""
        if pairs := self.mastered(module):
            weights, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(weights, masters)

    def ids(self, module: nn.Module) -> set[int]:
        """Returns the ids of the parameters of `module` that are stored in the compute dtype."""
        return {id(p) for p in self._kept.get(id(module), [])}

    def _enter_autocast(self, module: nn.Module) -> None:
        """Enters autocast in forwards of the module, and of transformers models in it, which users call too
        (`actor.model.generate`)."""
        from transformers import PreTrainedModel

        entered: list[AbstractContextManager[Any]] = []

        @of_mixed_dtypes
        def enter(*_: Any) -> None:
            entered.append(nullcontext() if id(module) in self._wide else self.autocast())
            entered[-1].__enter__()

        @of_mixed_dtypes
        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        for part in module.modules():
            if part is module or isinstance(part, PreTrainedModel):
                self._hooks.append(part.register_forward_pre_hook(enter))
                self._hooks.append(part.register_forward_hook(leave, always_call=True))

    @contextmanager
    def widened(self, module: nn.Module, *, changes: bool = False, learns: bool = False) -> Iterator[None]:
        """A context in which the 16-bit weights of `module` are in fp32.

        Args:
            changes: keep the values at the end of the context; otherwise the old ones are restored.
            learns: with `changes`, leave weights in fp32 that 16 bits would round, so that what is saved is exact.
        """
        kept = [(p, p.data) for p in self._kept.get(id(module), [])]
        narrow = [(weight, weight.data) for weight, _ in self.mastered(module)]
        for parameter, data in kept:
            parameter.data = data.float()
        for weight, master in self.mastered(module):
            weight.data = master.data
        self._wide.add(id(module))
        try:
            yield
        finally:
            self._wide.discard(id(module))
            for weight, data in narrow:
                weight.data = data
            for parameter, data in kept:
                if changes:
                    before = parameter.data
                    data.copy_(before)
                    if learns and not torch.equal(data.float(), before):
                        self._kept[id(module)] = [p for p in self._kept[id(module)] if p is not parameter]
                        continue
                parameter.data = data

    def release(self) -> None:
        """Converts the weights back to fp32 and removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        for parameter in (p for kept in self._kept.values() for p in kept):
            parameter.data = parameter.data.float()
        for weight, master in self._masters.values():
            weight.data = master.data
        for held in (self._hooks, self._kept, self._masters):
            held.clear()


@contextmanager
def lora_merged(module: nn.Module) -> Iterator[None]:
    """A context in which adapters are folded into the weights; the exact bits are restored on exit. Does nothing
    without adapters, or where other models share the weights."""
    from chatgpt.nn import lora

    with lora.merged(module) if lora.can_fold(module) else nullcontext():
        yield


@torch.no_grad()
def fold_adapters(copied: nn.Module, *, in_place: bool = False) -> None:
    """Folds adapters into a copy, layer by layer. They cannot be unfolded.

    Args:
        in_place: write into the memory of the adapted layers, which must not be shared.
    """
    from chatgpt.nn import lora

    for layer in lora.layers_to_fold(copied) if lora.can_fold(copied) else ():
        weight = layer.folded_weight().to(layer.weight.dtype)
        if in_place:
            layer.weight.copy_(weight)
            layer.lora_B.zero_()
        else:  # with one process the copy shares its tensors with the trained module
            layer.weight.data, layer.lora_B.data = weight, torch.zeros_like(layer.lora_B)
        layer.merged = True  # so that the local engine treats it as a plain layer


@torch.no_grad()
def cast_copy(module: nn.Module, dtype: torch.dtype, into: nn.Module | None = None) -> nn.Module:
    """Returns a deep copy with floating parameters in `dtype` and LoRA folded in, without an fp32 copy on the way.

    Weights are folded one at a time, in fp32, and rounded once; the copy's adapters are zero. A shared trunk is not
    copied; its adapters are cast. Buffers keep their dtype, since rotary frequencies need fp32, except those that are
    added to hidden states or multiplied with them. Weights that transformers keeps in fp32 stay in fp32.

    Args:
        into: an earlier copy of this module in this dtype (`KeptCopy`), to overwrite in place.
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
        if buffer.is_floating_point() and STATE_BUFFERS.search(name):
            memo[id(buffer)] = buffer.to(dtype, copy=True)
    copied = without_autocast(copy.deepcopy(module, memo)) if into is None else into
    for buffer, own in zip(copied.buffers(), module.buffers(), strict=True) if into is not None else ():
        if buffer is not own:
            buffer.copy_(own)
    for layer in lora.lora_layers(copied).values():
        if layer.shares_base:
            continue
        layer.saved = None  # the base weights in fp32, which the copy would keep alive
        layer.merged = False
        layer.lora_B.zero_()
    return copied


class KeptCopy:
    """A copy of a module in the compute dtype, kept between uses while it has users."""

    def __init__(self) -> None:
        self._users: WeakSet[Any] = WeakSet()
        self._module: weakref.ref[nn.Module] | None = None
        self._copied: nn.Module | None = None
        self._copy_key: Any = None

    def keep(self, user: Any, keep: bool) -> None:
        """Adds or removes a user; without users the copy is freed."""
        if keep:
            self._users.add(user)
        else:
            self._users.discard(user)
        if not self._users:
            self._copied = None

    @contextmanager
    def reused(self, module: nn.Module, dtype: torch.dtype) -> Iterator[SimpleNamespace]:
        """Yields a namespace in which `copied` is the copy of this module, or None; its value on exit is kept."""
        copied, self._copied = self._copied, None  # a copy in use is not given out twice
        if copied is not None and (self._module is None or self._module() is not module):
            copied = None
        if copied is not None and self._copy_key != _copy_key(module, copied, dtype):
            copied = None
        held = SimpleNamespace(copied=copied)
        del copied
        yield held
        if self._users and held.copied is not None:
            self._module, self._copied = weakref.ref(module), held.copied
            self._copy_key = _copy_key(module, held.copied, dtype)

    def free(self) -> None:
        self._copied = None

    @property
    def nbytes(self) -> int:
        return 0 if self._copied is None else sum(p.nbytes for p in self._copied.parameters())


def _copy_key(module: nn.Module, copied: nn.Module, dtype: torch.dtype) -> Any:
    """Returns a value that changes when a new copy would differ in more than the numbers of its tensors."""
    from chatgpt.nn.trunk import plain_settings

    def shapes(of: nn.Module) -> list[Any]:
        return [(name, t.shape) for name, t in (*of.named_parameters(), *of.named_buffers())]

    return dtype, next(module.parameters()).device, plain_settings(module), shapes(module) == shapes(copied)


class OffloadedWeights:
    """A frozen module in host memory, on the device in the `with` block. Moves weights and buffers; parameters stay the
    same objects. The host copy is kept, page-locked for a CUDA device: frozen weights never change, so offloading
    copies nothing."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.tensors = [*module.parameters(), *(b for b in module.buffers() if b is not None)]
        cuda = device.type == 'cuda'  # one tensor at a time, so that only one has both copies
        self.host = [t.detach().to('cpu', copy=True).pin_memory() if cuda else t.detach().cpu() for t in self.tensors]
        for tensor, kept in zip(self.tensors, self.host, strict=True):
            tensor.data = kept

    def on_device(self, kept: Tensor) -> Tensor:
        return kept.to(self.device, non_blocking=True)

    def __enter__(self) -> None:
        for tensor, kept in zip(self.tensors, self.host, strict=True):
            tensor.data = self.on_device(kept)

    def __exit__(self, *_: object) -> None:
        for tensor, kept in zip(self.tensors, self.host, strict=True):
            tensor.data = kept


class OffloadedShards:
    """A frozen module under FSDP2 in host memory, on the device in the `with` block. Moves it by `Module.to`, which
    tells FSDP2 the device of its shards."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module.to('cpu'), device

    def __enter__(self) -> None:
        self.module.to(self.device)

    def __exit__(self, *_: object) -> None:
        self.module.to('cpu')
