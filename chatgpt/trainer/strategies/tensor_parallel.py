"""Tensor parallelism: a few processes hold each block's matrices together and compute every token together (Shoeybi et
al. 2019, "Megatron-LM").

Which matrix is cut, and along which side, says the model: transformers' `base_model_tp_plan` of its config and
`_tp_plan` of its class, or `tensor_plans`, whose styles become styles of torch's `parallelize_module` here.

    input ── copy ──▶ colwise: own rows of the weight ──▶ own heads, own features ──▶ rowwise: own columns ── sum ──▶

Our styles keep a process's part of a weight as an ordinary parameter, and not as a DTensor over the tensor dimension
as torch's own styles do: `fully_shard` then cuts every parameter, planned or not, over the data dimension alone, so
that an optimizer's foreach and fused steps see tensors of one mesh, products run without DTensor's dispatch, and the
part of a model that generates is an ordinary module. `Cut` remembers what a part is a part of.

What a process computes from replicated numbers is equal to the bit on all processes of a group: results are summed or
gathered once, for all. Left out: log-probs over parts of the vocabulary (`chatgpt.functional.vocabulary_parallel`),
pieces of files (`cuts`), mixtures' experts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional as F

from chatgpt.functional.vocabulary_parallel import VocabularyPart
from chatgpt.trainer.strategies.cuts import Cut
from chatgpt.trainer.strategies.processes import buckets
from chatgpt.trainer.strategies.tensor_group import TensorGroup
from chatgpt.trainer.strategies.tensor_plans import FUSED, count_own_heads, family_plan, is_transposed

_BUCKET = 32 << 20
"""bytes of gradients that are summed at a time"""
PARTIAL = 'replicated_with_grad_allreduce'
"""the style of what is whole on each process, while each sees its own heads only: its gradients are summed"""
STYLES = ('colwise', FUSED, 'colwise_gather_output', 'colwise_rep', 'rowwise', 'rowwise_split_input', 'rowwise_rep')
VOCABULARY = 'embedding_rowwise'
WHOLE = 'replicate'
KNOWN = (*STYLES, VOCABULARY, PARTIAL, WHOLE)


def plan_of(module: nn.Module) -> dict[str, str]:
    """{name of a module of `module`: style}, numbers of layers filled in, from the outermost model that has a plan.

    Raises:
        ValueError: there is none, or one with styles that are not known here.
    """
    found_plans = ((n, m, family_plan(m) or getattr(m, '_tp_plan', None)) for n, m in module.named_modules())
    prefix, owner, given = next((found for found in found_plans if found[2]), ('', None, None))
    plan = dict(given or {})
    inside = dict(owner.named_modules()) if owner is not None else {}
    found = {n: plan[key] for n in inside if (key := _pattern(n)) in plan}
    name = type(getattr(module, 'model', module)).__name__
    if not any(style == 'colwise' or style.startswith('colwise_') for n, style in found.items() if n != _pattern(n)):
        raise ValueError(
            f'tensor_parallel: {name} has no plan of its own for it in transformers (base_model_tp_plan); the families '
            'of Llama, Qwen, Mistral, Gemma, Phi, Cohere, GLM, OLMo, StarCoder2 and GPT-NeoX have one, and GPT-2, OPT, '
            'GPT-J and BLOOM here, or leave tensor_parallel out'
        )
    found |= {n: style for n, style in plan.items() if n in inside}
    found = _with_vocabulary(owner, found)
    strange = next(((n, s) for n, s in plan.items() if s not in KNOWN), None)
    if strange is not None:
        raise ValueError(
            f'tensor_parallel: the plan of {name} has {strange[0]} in the style {strange[1]!r}, as mixtures of experts '
            f'do, and only {", ".join(KNOWN)} are known; leave tensor_parallel out'
        )
    return {f'{prefix}.{n}' if prefix else n: style for n, style in found.items()}


def _pattern(name: str) -> str:
    """'layers.3.mlp.fc1' → 'layers.*.mlp.fc1'."""
    return '.'.join('*' if part.isdigit() else part for part in name.split('.'))


def _with_vocabulary(owner: Any, plan: dict[str, str]) -> dict[str, str]:
    """The plan in which input and output embeddings that are one tensor are cut alike, along the vocabulary."""
    names = {m: n for n, m in owner.named_modules()}
    inputs: Any = getattr(owner, 'get_input_embeddings', lambda: None)()
    outputs: Any = getattr(owner, 'get_output_embeddings', lambda: None)()
    first, last = names.get(inputs, ''), names.get(outputs, '')
    if not first:
        return plan
    tied = bool(last) and inputs.weight is outputs.weight
    can = type(inputs).forward is nn.Embedding.forward or _calls_embedding(inputs)
    plan = {n: style for n, style in plan.items() if n not in ((first, last) if tied else (first,))}
    if can:
        plan[first] = VOCABULARY
    if can and tied:
        plan[last] = 'colwise_gather_output'
    return plan


def _calls_embedding(layer: Any) -> bool:
    """A scaled embedding, as of Gemma 3: a subclass that multiplies what `nn.Embedding` gives."""
    return isinstance(layer, nn.Embedding) and 'Scaled' in type(layer).__name__


def check_model(module: nn.Module, tensor_parallel: int) -> dict[str, str]:
    """The model's plan. ValueError, before anything is cut, for a model that cannot be cut into so many parts."""
    name = type(getattr(module, 'model', module)).__name__
    if any(getattr(getattr(m, 'config', None), 'is_encoder_decoder', False) for m in module.modules()):
        raise ValueError(f'tensor_parallel: {name} is an encoder-decoder, which is not cut; leave tensor_parallel out')
    if any(getattr(m, 'is_reference_branch', False) for m in module.modules()):
        raise ValueError(
            'tensor_parallel does not know the frozen top blocks of num_layers_unfrozen (hydra): leave one of them out'
        )
    plan = plan_of(module)
    _check_all_planned(module, plan, name)
    for layer_name, style in plan.items():
        layer: Any = module.get_submodule(layer_name)
        if style not in STYLES:
            continue
        if not (isinstance(layer, nn.Linear) or is_transposed(layer)):
            raise ValueError(f'tensor_parallel cuts linear layers, and {layer_name} is a {type(layer).__name__}')
        inputs, outputs = layer.weight.shape if is_transposed(layer) else reversed(layer.weight.shape)
        side, width = ('output', outputs) if style.startswith('colwise') else ('input', inputs)
        attention = module.get_submodule(layer_name.rpartition('.')[0])
        size = getattr(attention, 'head_dim', None) or getattr(attention, 'head_size', None)
        if style in ('colwise', FUSED) and isinstance(size, int) and not width % size:
            num_heads = width // size
            # heads lie behind one another, each with its three parts; or all queries, keys and values do
            fused = 'query_key_value' in layer_name or style == FUSED
            num_heads = num_heads // 3 if fused and num_heads % 3 == 0 else num_heads
            if num_heads % tensor_parallel:
                raise ValueError(
                    f'tensor_parallel={tensor_parallel}: {name} has {num_heads} heads in {layer_name}, which it does '
                    f'not divide; choose one of {_divisors(num_heads)}'
                )
        if width % tensor_parallel and '.' in layer_name and not _is_output(module, layer):
            raise ValueError(
                f'tensor_parallel={tensor_parallel} does not divide the {side} width {width} of {layer_name} in {name}'
            )
    return plan


def _check_all_planned(module: nn.Module, plan: dict[str, str], name: str) -> None:
    """Raises ValueError for a parameter beside layers whose output is cut that the plan does not name: whether it sees
    a part or all, and so what its gradient is, cannot be told."""
    for owner in {n.rpartition('.')[0] for n, style in plan.items() if style in ('colwise', FUSED)}:
        for inner, _ in module.get_submodule(owner).named_parameters(prefix=owner):
            layer = inner.rpartition('.')[0]
            if layer not in plan:
                raise ValueError(
                    f'tensor_parallel: the plan of {name} does not say what becomes of {inner}, which '
                    'stands beside layers that it cuts; leave tensor_parallel out'
                )


def _is_output(module: nn.Module, layer: nn.Module) -> bool:
    return any(getattr(m, 'get_output_embeddings', lambda: None)() is layer for m in module.modules())


def _divisors(number: int) -> str:
    return ', '.join(str(d) for d in range(1, number + 1) if number % d == 0)


def parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> tuple[dict[str, Cut], set[str]]:
    """Cut the weights of `module` in place, and let its layers compute with their parts.

    Args:
        module: whole, the same on every process of the group, or on the meta device.
        mesh: the one tensor dimension.
        plan: of `check_model`.

    Returns:
        {name of a parameter: how it is cut}, tied names included; and names of parameters that are whole and whose
        gradients are sums over the group.
    """
    group = TensorGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    parts = _Parts(group)
    styles: dict[str, ParallelStyle] = {name: _style(style, parts) for name, style in plan.items() if style != WHOLE}
    parallelize_module(module, mesh, styles)
    count_own_heads(module, group)
    named = dict(module.named_parameters(remove_duplicate=False))
    cuts = {name: parts.cuts[id(p)] for name, p in named.items() if id(p) in parts.cuts}
    return cuts, {name for name, p in module.named_parameters() if id(p) in parts.partial}


def cut(module: nn.Module, group: TensorGroup, plan: dict[str, str]) -> None:
    """`parallelize` for a group that has no mesh, such as the planner's."""
    parts = _Parts(group)
    for name, style in plan.items():
        layer_style: Any = _style(style, parts)
        layer_style._apply(module.get_submodule(name), None)
    count_own_heads(module, group)


class _Parts:
    """The parts that were made so far, so that tied weights stay tied."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.copies = _Copies(group)
        self.cuts: dict[int, Cut] = {}
        """by id of a part"""
        self.partial: set[int] = set()
        """ids of whole parameters whose gradients are partial"""
        self._made: dict[int, nn.Parameter] = {}
        self._whole: list[nn.Parameter] = []  # ids are keys above

    def cut(self, owner: nn.Module, name: str, dim: int, blocks: int = 1) -> None:
        """Keep this process's part of a parameter along `dim`."""
        whole = owner._parameters.get(name)
        if whole is None or id(whole) in self.cuts:
            return
        if id(whole) not in self._made:
            cut = Cut(tuple(whole.shape), dim, self.group.index, self.group.size, blocks)
            part = nn.Parameter(cut.take(whole.detach()).clone(), requires_grad=whole.requires_grad)
            self._made[id(whole)] = part
            self._whole.append(whole)
            self.cuts[id(part)] = cut
        owner._parameters[name] = self._made[id(whole)]
        owner.cut_over = self.group  # type: ignore[assignment]

    def mark_partial(self, owner: nn.Module, *names: str) -> None:
        self.partial |= {id(p) for n in names if (p := owner._parameters.get(n)) is not None}


def _style(name: str, parts: _Parts) -> ParallelStyle:
    if name == PARTIAL:
        return _Partial(parts)
    if name == VOCABULARY:
        return _Vocabulary(parts)
    if name.startswith('colwise'):
        return _Colwise(parts, gathers=name not in ('colwise', FUSED), blocks=3 if name == FUSED else 1)
    return _Rowwise(parts, splits=name != 'rowwise')


class _Colwise(ParallelStyle):
    """Own rows of a linear layer's weight: (..., in) on all → this process's part of (..., out), or all of it."""

    def __init__(self, parts: _Parts, gathers: bool, blocks: int) -> None:
        self.parts, self.gathers, self.blocks = parts, gathers, blocks

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        group, copies, parts = self.parts.group, self.parts.copies, self.parts
        linear, transposed = type(module) is nn.Linear, is_transposed(module)
        width = module.weight.shape[0]
        for name in ('weight', 'bias', 'lora_B'):
            parts.cut(module, name, 1 if transposed and name == 'weight' else 0, self.blocks)
        if transposed:
            module.nf = module.weight.shape[1]
        parts.mark_partial(module, 'lora_A')
        module.register_forward_pre_hook(lambda _, args: (copies(args[0]), *args[1:]))
        if self.gathers:
            module.register_forward_hook(lambda _, args, output: gather(output, group, width))
            if linear:  # log-probs may be taken from the parts (chatgpt.nn.head_kernels)
                module.vocabulary = VocabularyPart(group, parts.cuts[id(module.weight)].start, width)
        return module


class _Rowwise(ParallelStyle):
    """Own columns of a linear layer's weight: this process's part of (..., in), or all of it → (..., out) on all."""

    def __init__(self, parts: _Parts, splits: bool) -> None:
        self.parts, self.splits = parts, splits

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        group, parts = self.parts.group, self.parts
        for name in ('weight', 'lora_A'):
            parts.cut(module, name, 0 if is_transposed(module) and name == 'weight' else 1)
        parts.mark_partial(module, 'lora_B')
        if self.splits:
            module.register_forward_pre_hook(lambda _, args: (split(args[0], group), *args[1:]))
        if module.bias is None:
            module.register_forward_hook(lambda _, args, output: total(output, group))
        else:  # which is added once, to the sum
            module.tensor_group = group
            module.forward = MethodType(_rowwise_with_bias, module)
        return module


def _rowwise_with_bias(layer: Any, x: Tensor) -> Tensor:
    out = x @ layer.weight if is_transposed(layer) else F.linear(x, layer.weight)
    if hasattr(layer, 'lora_A'):
        out = layer._add_adapter(out, x)
    return total(out, layer.tensor_group) + layer.bias


class _Vocabulary(ParallelStyle):
    """Own rows of an embedding: (...) ids → (..., D) on all."""

    def __init__(self, parts: _Parts) -> None:
        self.parts = parts

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        whole = module.weight
        self.parts.cut(module, 'weight', 0)
        cut = self.parts.cuts[id(module.weight)]
        if (padding := module.padding_idx) is not None:  # whose row learns nothing
            padding = padding % whole.shape[0] - cut.start
            module.padding_idx = padding if 0 <= padding < cut.local_shape[0] else None
        module.vocabulary = VocabularyPart(self.parts.group, cut.start, cut.shape[0])
        module.forward = MethodType(_embedded, module)
        return module


def _embedded(layer: Any, ids: Tensor) -> Tensor:
    part, rows = layer.vocabulary, layer.weight.shape[0]
    inside = (ids >= part.start) & (ids < part.start + rows)
    out = type(layer).forward(layer, torch.where(inside, ids - part.start, 0))
    return total(out * inside[..., None], part.group)


class _Partial(ParallelStyle):
    def __init__(self, parts: _Parts) -> None:
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.parts.mark_partial(module, *module._parameters)
        return module


# ---------------------------------------------------------------- between the processes of a group


@torch.no_grad()
def add_up(gradients: Iterable[Tensor], group: TensorGroup) -> None:
    """Of what is whole on each process, while each knows the gradient for its own heads only: it becomes the sum over
    the group, in place."""
    for bucket in buckets((g for g in gradients if g.numel()), _BUCKET):
        summed = group.sum(torch.cat([g.reshape(-1) for g in bucket]))
        for gradient, values in zip(bucket, summed.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(values.view_as(gradient))


class _Copies:
    """Megatron's f: the same numbers forward; backward the sum of what the processes' parts give. Layers that read one
    tensor (queries, keys and values) share one copy, and so one sum."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self._last: tuple[Any, Any] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._last is not None and self._last[0]() is x and (known := self._last[1]()) is not None:
            return known
        copied = _Copy.apply(x, self.group)
        self._last = weakref.ref(x), weakref.ref(copied)
        return copied

    def __deepcopy__(self, memo: Any) -> _Copies:
        return self


def total(x: Tensor, group: TensorGroup) -> Tensor:
    """Megatron's g: forward the sum over the group; backward the same gradient for each."""
    return _Total.apply(x, group)


def gather(x: Tensor, group: TensorGroup, width: int) -> Tensor:
    """(..., own part) → (..., width); backward the own part of the gradient."""
    return _Gather.apply(x, group, width)


def split(x: Tensor, group: TensorGroup) -> Tensor:
    """(..., width) → (..., own part); backward all parts' gradients."""
    return _Split.apply(x, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(grad), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, width: int) -> Tensor:
        ctx.own = group.bounds(width)
        return group.joined(x, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start, stop = ctx.own
        return grad[..., start:stop], None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        start, stop = group.bounds(x.shape[-1])
        return x[..., start:stop].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.joined(grad, ctx.width), None
