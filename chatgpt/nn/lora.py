"""Low-rank adapters (LoRA) on linear layers, on loralib's `LoRALayer` base.

An adapted layer computes y = x W^T + b + (alpha / r) x A^T B^T (Hu et al. 2021, "LoRA", equation 3), A (r, in), B (out,
r). `convert_to_lora` replaces `nn.Linear` and GPT-2's `Conv1D` in place. `weight` and `bias` stay the same parameters
under the same names, next to `lora_A` and `lora_B`. loralib's own layers merge the adapter into the weight on `eval()`
and subtract it on `train()`, which rounds; these do not. `merge_lora` merges, and `unmerge_lora` restores the saved
weight exactly; while merged, `state_dict()` still contains the base weight.

PEFT's file format is in `chatgpt.nn.peft_format`; docs/results/peft_layers.md compares its layers with these.
"""

from __future__ import annotations

import fnmatch
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast, get_args

import loralib
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from chatgpt.nn.computed import ComputedTensors
from chatgpt.nn.quantized import NF4Linear, is_linear, reads_weight

BiasMode = Literal['none', 'all', 'lora_only']


class _Adapter(loralib.LoRALayer):
    """Mixin of an `nn.Module`: the two factors, the switch, merging and unmerging."""

    in_features: int
    out_features: int
    weight: Any
    bias: Any
    merged: bool
    weight_is_transposed = False
    """True if `weight` is stored as (in, out)"""
    shares_base = False
    """True if other models use the weight too, or it is in 4 bits, so that no adapter can be merged into it"""

    def __init__(
        self,
        base: nn.Linear | Conv1D | NF4Linear,
        rank: int,
        *,
        alpha: float,
        dropout: float = 0.0,
        bias_mode: BiasMode = 'none',
    ) -> None:
        """Takes the parameter objects of `base` and adds the two factors."""
        module = cast(nn.Module, self)
        nn.Module.__init__(module)
        loralib.LoRALayer.__init__(self, r=rank, lora_alpha=alpha, lora_dropout=dropout, merge_weights=False)
        if dropout == 0:
            self.lora_dropout = nn.Identity()  # the base class sets a lambda, which cannot be pickled
        self.scaling = alpha / rank
        self.bias_mode = bias_mode
        self.adapter_on = True
        self.saved: Tensor | None = None  # the base weight while the adapter is merged
        self._take_weight(base)
        like = next(iter((*base.parameters(), *base.buffers())))
        # trained parameters are in fp32, whatever the dtype of the frozen weight
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.lora_A = nn.Parameter(torch.zeros(rank, self.in_features, dtype=dtype, device=like.device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, dtype=dtype, device=like.device))
        self.reset_lora_parameters()
        module.train(base.training)

    def _take_weight(self, base: Any) -> None:
        module = cast(nn.Module, self)
        module.register_parameter('weight', base.weight)
        module.register_parameter('bias', base.bias)
        self.shares_base = is_shared(base.weight)
        if isinstance(base, nn.Linear):
            self.in_features, self.out_features = base.in_features, base.out_features

    def reset_lora_parameters(self) -> None:
        """Initialises A like the weight of `nn.Linear` and B with zeros: the outputs are those of the base layer."""
        # On the meta device the generator advances as elsewhere, so that later draws are the same.
        drawn = torch.empty_like(self.lora_A, device='cpu') if self.lora_A.is_meta else self.lora_A
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def base_output(self, x: Tensor) -> Tensor:
        """Returns x W^T + b."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self._add_adapter(self.base_output(x), x)

    def _add_adapter(self, result: Tensor, x: Tensor) -> Tensor:
        if self.merged or not self.adapter_on:
            return result
        # Gemini gathers parameters before the backward of an operation on them, but not of one on what `to` returns.
        lora_A, lora_B = (w if w.dtype == x.dtype else w.to(x.dtype) for w in (self.lora_A, self.lora_B))
        return result + F.linear(F.linear(self.lora_dropout(x), lora_A), lora_B) * self.scaling

    def folded_weight(self) -> Tensor:
        """Returns a new tensor W + scaling * B A in the layout of `weight`, in fp32 or wider: W may be in 16 bits,
        which would round the sum."""
        weight = self.weight if self.saved is None else self.saved
        return self._folded(weight, self.lora_A, self.lora_B)

    def fold(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> Tensor:
        """Returns W + scaling * B A of given tensors in the layout and dtype of `weight`; summed in fp32 or wider,
        rounded once."""
        return self._folded(weight, lora_A, lora_B).to(weight.dtype)

    @torch.no_grad()
    def _folded(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        with torch.autocast(device_type=weight.device.type, enabled=False):
            delta = (lora_B.to(wide) @ lora_A.to(wide)) * self.scaling
        return weight.to(wide) + (delta.T if self.weight_is_transposed else delta)

    @torch.no_grad()
    def merge(self) -> None:
        if self.merged:
            return
        if self.shares_base:
            raise ValueError('merge_lora: the weight is shared with other models or in 4 bits; export it instead')
        self.saved = self.weight.detach().clone()
        self.weight.copy_(self.folded_weight())
        self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        if self.saved is None:
            return
        self.weight.copy_(self.saved)
        self.saved = None
        self.merged = False

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if self.saved is not None:
            destination[prefix + 'weight'] = self.saved

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.merged:
            errors = args[-1]
            errors.append(f'{prefix[:-1]}: its adapter is merged; call unmerge_lora before load_state_dict')
            return
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def extra_repr(self) -> str:
        return f'in_features={self.in_features}, out_features={self.out_features}, r={self.r}, alpha={self.lora_alpha}'


class LoRALinear(_Adapter, nn.Linear):
    """An `nn.Linear` with an adapter. Input (..., in), output (..., out)."""

    def reset_parameters(self) -> None:
        nn.Linear.reset_parameters(self)
        self.reset_lora_parameters()

    def base_output(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LoRAConv1D(_Adapter, Conv1D):
    """transformers' `Conv1D` (GPT-2: a linear layer with a weight stored as (in, out)) with an adapter."""

    weight_is_transposed = True

    def _take_weight(self, base: Any) -> None:
        super()._take_weight(base)
        self.nx, self.nf = base.nx, base.nf
        self.in_features, self.out_features = base.nx, base.nf

    def base_output(self, x: Tensor) -> Tensor:
        return Conv1D.forward(self, x)


class LoRANF4Linear(_Adapter, nn.Module):
    """An `NF4Linear` with an adapter; other models may share `base`. Input (..., in), output (..., out)."""

    shares_base = True

    def _take_weight(self, base: NF4Linear) -> None:
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight_is_transposed = base.is_transposed

    def folded_weight(self) -> Tensor:
        """Returns a new dense tensor W + scaling * B A, in fp32."""
        return self._folded(self.base.dense(), self.lora_A, self.lora_B)

    def base_output(self, x: Tensor) -> Tensor:
        return self.base(x)


_REPLACED_BY: dict[type[nn.Module], Any] = {nn.Linear: LoRALinear, Conv1D: LoRAConv1D, NF4Linear: LoRANF4Linear}
WITHOUT_ADAPTERS = ('gate', 'router', 'shared_expert_gate', 'dt_proj')
"""names of layers, or of their parents, without adapters unless a pattern names them: the routers of a mixture of
experts, and the step size of a state space model"""
NON_TEXT = re.compile(r'(^|\.)(visual|vision\w*|audio\w*|image\w*|speech\w*)(\.|$)')
"""parts of a multimodal model that do not process text"""


def _replacement(layer: nn.Module) -> Any:
    """Returns the adapted class for a layer; None for one that is not linear."""
    return _REPLACED_BY.get(nn.Linear if is_linear(layer) else type(layer))


def is_shared(parameter: Tensor) -> bool:
    """Returns True if other models share this parameter (`chatgpt.nn.shared`)."""
    return getattr(parameter, 'in_shared_trunk', False)


def can_fold(module: nn.Module) -> bool:
    """Returns True if there are adapters and all can be merged into their weights."""
    layers = lora_layers(module).values()
    return bool(layers) and not any(layer.shares_base for layer in layers)


# --- conversion -----------------------------------------------------------------------------------------------------


def convert_to_lora(
    module: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: str | Iterable[str] | None = None,
    bias: BiasMode = 'none',
) -> None:
    """Replaces linear layers by adapted ones, in place, and freezes everything else in `module`. B is initialised with
    zeros, so outputs do not change. Parameters outside `module`, such as a value head, do not change.

    Args:
        alpha: None for `rank`, a scaling of 1.
        targets: one or more patterns, each the full name of a layer, the end of it after a dot (`'q_proj'`), a glob
            (`'*.attn.*'`) or a regular expression for the whole name. None takes every linear layer inside the
            transformer blocks (below an `nn.ModuleList`) except routers of a mixture of experts, layers with one
            output, vision and audio parts, and layers whose weight is read without calling them, such as Mamba's
            `out_proj`. Fused experts are not layers: a warning reports the share of the blocks' weights with adapters.
        bias: train no bias, every bias of `module`, or those of the adapted layers.

    Raises ValueError, before any change, for a rank outside 1..min(in, out), a pattern that matches no linear layer, a
    named layer with a weight shared with another module (merging would change both) or read without calling it, an
    unknown bias mode, or a second conversion.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f'LoRA rank: {rank!r} given; it must be a positive integer')
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f'LoRA dropout: {dropout} given; it must lie in [0, 1)')
    if alpha is not None and not alpha > 0:
        raise ValueError(f'LoRA alpha: {alpha} given; it must be positive (the adapter is scaled by alpha / rank)')
    if bias not in get_args(BiasMode):
        raise ValueError(f'LoRA bias mode: {bias!r} given; allowed are {", ".join(get_args(BiasMode))}')
    if has_lora(module):
        raise ValueError('convert_to_lora: the module already has adapters; convert a module once')
    if any(getattr(m, 'is_reference_branch', False) for m in module.modules()):
        raise ValueError(
            'convert_to_lora: the module has a hydra reference branch; use LoRA or num_layers_unfrozen, not both'
        )
    chosen = _target_layers(module, targets)
    for name, layer in chosen.items():
        shape = weight_shape(layer)
        if rank > min(shape):
            raise ValueError(f'LoRA rank: {rank} given, but {name} is {shape}; the rank must be at most {min(shape)}')
    for name, layer in chosen.items():
        parent, _, child = name.rpartition('.')
        adapted = _replacement(layer)(layer, rank, alpha=alpha or rank, dropout=dropout, bias_mode=bias)
        setattr(module.get_submodule(parent), child, adapted)
    loralib.mark_only_lora_as_trainable(module, bias)
    if targets is None:
        _warn_about_missed_weights(module)


def _of_the_blocks(module: nn.Module) -> Callable[[str], bool]:
    """Returns a predicate of names: True in a transformer block (below an `nn.ModuleList`) that processes text."""
    lists = tuple(f'{n}.' if n else '' for n, m in module.named_modules() if isinstance(m, nn.ModuleList))
    return lambda name: name.startswith(lists) and not NON_TEXT.search(name)


def _warn_about_missed_weights(module: nn.Module) -> None:
    """Warns if matrices of the blocks have no adapter, such as fused experts."""
    layers, in_blocks = lora_layers(module).values(), _of_the_blocks(module)
    reached = {id(p) for layer in layers for p in layer.parameters()}
    within = sum(layer.in_features * layer.out_features for layer in layers)
    beside = {
        name: parameter.numel()
        for name, parameter in module.named_parameters()
        if in_blocks(name) and id(parameter) not in reached and parameter.dim() > 1
    }
    if sum(beside.values()) > 0.1 * (within + sum(beside.values())):
        share = within / (within + sum(beside.values()))
        warnings.warn(
            f'LoRA: adapters stand beside {share:.0%} of the weights of the blocks; the rest, such as '
            f'{max(beside, key=lambda name: beside[name])}, is not in linear layers that are called and stays so',
            stacklevel=3,
        )


def _target_layers(module: nn.Module, targets: str | Iterable[str] | None) -> dict[str, Any]:
    linear: dict[str, Any] = {n: m for n, m in module.named_modules() if n and _replacement(m) is not None}
    if targets is None:
        in_blocks = _of_the_blocks(module)
        chosen = {
            n: m
            for n, m in linear.items()
            if in_blocks(n)
            and not set(n.split('.')) & set(WITHOUT_ADAPTERS)
            and min(weight_shape(m)) > 1
            and not _bypassed(module, n)
        }
        if not chosen:
            raise ValueError(
                f'convert_to_lora: no transformer blocks with linear layers in {type(module).__name__}; '
                f'name the layers with targets=; linear layers: {_some(linear)}'
            )
    else:
        patterns = [targets] if isinstance(targets, str) else list(targets)
        if not patterns:
            raise ValueError('LoRA targets: an empty list given; give patterns, or None for every layer in the blocks')
        for pattern in patterns:
            if not any(_matches(pattern, n) for n in linear):
                raise ValueError(f'LoRA targets: {pattern!r} matches no linear layer; there are {_some(linear)}')
        chosen = {n: m for n, m in linear.items() if any(_matches(pattern, n) for pattern in patterns)}
        for name in chosen:
            if _bypassed(module, name):
                parent, _, child = name.rpartition('.')
                raise ValueError(
                    f'LoRA targets: {type(module.get_submodule(parent)).__name__} multiplies by the weight of {child} '
                    f'without calling that layer, so an adapter on {name} would not be heard; leave it out of targets'
                )
    holders: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    for name, layer in chosen.items():
        if isinstance(layer, NF4Linear):
            continue
        shared = [h for h in holders[id(layer.weight)] if h != f'{name}.weight']
        if shared:
            raise ValueError(
                f'LoRA targets: {name} of {type(module).__name__} shares its weight with {shared[0]}; leave it out of '
                'targets'
            )
    return chosen


def _bypassed(module: nn.Module, name: str) -> bool:
    parent, _, child = name.rpartition('.')
    owner: Any = type(module.get_submodule(parent))  # a class, whose hash mypy takes for that of its instances
    return reads_weight(owner, child)


def weight_shape(layer: Any) -> tuple[int, ...]:
    """Returns the shape of a linear layer's weight as stored."""
    if isinstance(layer, NF4Linear):
        shape = layer.out_features, layer.in_features
        return shape[::-1] if layer.is_transposed else shape
    return tuple(layer.weight.shape)


def _matches(pattern: str, name: str) -> bool:
    if name == pattern or name.endswith('.' + pattern) or fnmatch.fnmatchcase(name, pattern):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:  # a glob such as '*.q_proj' is not a regular expression
        return False


def _some(names: Iterable[str], most: int = 6) -> str:
    listed = list(names)
    return (', '.join(listed[:most]) + (f' and {len(listed) - most} more' if len(listed) > most else '')) or 'none'


# --- queries and switches -------------------------------------------------------------------------------------------


AdaptedLayer = LoRALinear | LoRAConv1D | LoRANF4Linear


def lora_layers(module: nn.Module) -> dict[str, AdaptedLayer]:
    """Returns the adapted layers of `module` by name."""
    return {n: m for n, m in module.named_modules() if isinstance(m, AdaptedLayer)}


def has_lora(module: nn.Module) -> bool:
    return any(isinstance(m, loralib.LoRALayer) for m in module.modules())


def trains_biases(module: nn.Module) -> bool:
    """Returns True if biases are trained beside the adapters, so that without these it is not the initial model."""
    return any(layer.bias_mode != 'none' for layer in lora_layers(module).values())


def _require_lora(module: nn.Module, what: str) -> dict[str, AdaptedLayer]:
    layers = lora_layers(module)
    if not layers:
        raise ValueError(f'{what}: {type(module).__name__} has no adapters; call convert_to_lora first')
    return layers


def layers_to_fold(module: nn.Module) -> list[AdaptedLayer]:
    """Returns the adapted layers. Raises ValueError without any, or while they are switched off."""
    layers = list(_require_lora(module, 'merge_lora').values())
    if not all(layer.adapter_on for layer in layers):
        raise ValueError('merge_lora: the adapter is switched off; leave adapter_disabled first')
    return layers


def merge_lora(module: nn.Module) -> None:
    """Merges every adapter into its weight, W + scaling * B A, and saves the base weights. A second call does
    nothing."""
    for layer in layers_to_fold(module):
        layer.merge()


def unmerge_lora(module: nn.Module) -> None:
    """Restores the base weights from before `merge_lora`, exactly."""
    for layer in _require_lora(module, 'unmerge_lora').values():
        layer.unmerge()


@contextmanager
def merged(module: nn.Module) -> Iterator[None]:
    """Inside this context the adapters are merged; on exit every layer is as before."""
    before = [layer for layer in _require_lora(module, 'merged').values() if not layer.merged]
    merge_lora(module)
    try:
        yield
    finally:
        for layer in before:
            layer.unmerge()


@contextmanager
def adapter_disabled(module: nn.Module) -> Iterator[None]:
    """Inside this context `module` computes as before conversion: the initial model, without a second copy.

    Merged adapters are unmerged inside. Contexts may be nested. Raises ValueError if biases are trained: then the
    layers without adapters are not the initial model.
    """
    layers = list(_require_lora(module, 'adapter_disabled').values())
    if trains_biases(module):
        raise ValueError(
            f'adapter_disabled: biases are trained (bias={layers[0].bias_mode!r}), so without adapters this is not the '
            "initial model; use bias='none' or keep a copy as initial_model"
        )
    before = [(layer, layer.adapter_on, layer.merged) for layer in layers]
    try:
        for layer in layers:
            layer.unmerge()
            layer.adapter_on = False
        yield
    finally:
        for layer, was_on, was_merged in before:
            layer.adapter_on = was_on
            if was_merged:
                layer.merge()


# --- state dicts ----------------------------------------------------------------------------------------------------


def lora_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Returns the adapter tensors by name, and the biases that the bias mode trains."""
    layers = _require_lora(module, 'lora_state_dict')
    return loralib.lora_state_dict(module, next(iter(layers.values())).bias_mode)


def load_lora_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads a dict of `lora_state_dict`. Raises ValueError, before anything is copied, with the first names if names or
    shapes differ.
    """
    own = lora_state_dict(module)
    missing, unexpected = [k for k in own if k not in state], [k for k in state if k not in own]
    if missing or unexpected:
        raise ValueError(f'load_lora_state_dict: missing {_some(missing, 3)}; unexpected {_some(unexpected, 3)}')
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise ValueError(
                f'load_lora_state_dict: {name} is {tuple(state[name].shape)}, the module has {tuple(tensor.shape)}; '
                'convert with the same rank and targets'
            )
    if any(layer.merged for layer in lora_layers(module).values()):
        raise ValueError('load_lora_state_dict: the adapters are merged; call unmerge_lora first')
    module.load_state_dict(dict(state), strict=False)


def merged_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of the architecture before conversion, with adapters merged and 4-bit weights dequantized.
    `module` does not change.

    Merged and dequantized weights are new tensors; those of a shared or quantized base are on the CPU, because together
    they may exceed the device's memory. All others are those of `module.state_dict()`.
    """
    return dict(merged_tensors(module))


def merged_tensors(module: nn.Module) -> ComputedTensors:
    """Returns the tensors of `merged_state_dict`; merged and dequantized ones are computed at each access."""
    layers = _require_lora(module, 'merged_state_dict')
    kept, computed = dict(module.state_dict()), {}
    dense = {n.removesuffix('.base'): m for n, m in module.named_modules() if isinstance(m, NF4Linear)}
    for name, base in dense.items():
        prefix = f'{name}.' if name else ''
        if name not in layers:
            computed[prefix + 'weight'] = partial(_dense_on_cpu, base)
        if base.bias is not None:
            kept[prefix + 'bias'] = base.bias.clone()
    for name, layer in layers.items():
        prefix = f'{name}.' if name else ''
        computed[prefix + 'weight'] = partial(_folded_weight, layer)
        del kept[prefix + 'lora_A'], kept[prefix + 'lora_B']
    return ComputedTensors(kept, computed)


def _dense_on_cpu(base: NF4Linear) -> Tensor:
    return base.dense().cpu()


def _folded_weight(layer: Any) -> Tensor:
    folded: Tensor = layer.folded_weight()
    return folded.cpu() if layer.shares_base else folded
