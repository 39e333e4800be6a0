"""Tensor parallelism: a few processes hold each block's matrices together and compute every token together (Shoeybi et
al. 2019, "Megatron-LM").

transformers' plan of a model (`base_model_tp_plan`, `_tp_plan`) says which matrix is cut, and along which side; GPT-2's
plan is here. Its styles become styles of torch's `parallelize_module`:

    input ── copy ──▶ colwise: own rows of the weight ──▶ own heads, own features ──▶ rowwise: own columns ── sum ──▶

A process's part of a weight is an ordinary parameter, and not a DTensor over the tensor dimension as in torch's own
styles: `fully_shard` then cuts every parameter over the data dimension alone, so that an optimizer's foreach and fused
steps see tensors of one mesh, products run without DTensor's dispatch, and the part of a model that generates is an
ordinary module. `Cut` remembers what a part is a part of, for checkpoints.

What a process computes from replicated numbers is equal to the bit on all processes of a group: results are summed or
gathered once, for all. Log-probs over parts of the vocabulary are in `chatgpt.functional.fused_logprobs`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional as F

from chatgpt.functional.fused_logprobs import VocabularyPart
from chatgpt.nn.layouts import check_causal
from chatgpt.strategies.checkpoint.layout import Piece, TensorReader
from chatgpt.strategies.processes import buckets
from chatgpt.strategies.tensor_ranks import TensorGroup, part_of

_BUCKET = 32 << 20
"""bytes of gradients that are summed at a time"""
FUSED = 'colwise_qkv'
"""colwise, of a layer that puts out all queries, then all keys, then all values"""
PARTIAL = 'replicated_with_grad_allreduce'
"""the style of what is whole on each process, while each sees its own heads only: its gradients are summed"""
STYLES = ('colwise', FUSED, 'colwise_gather_output', 'colwise_rep', 'rowwise', 'rowwise_split_input', 'rowwise_rep')
VOCABULARY = 'embedding_rowwise'
WHOLE = 'replicate'
KNOWN = (*STYLES, VOCABULARY, PARTIAL, WHOLE)
GPT2 = {'h.*.attn.c_attn': FUSED, 'h.*.mlp.c_fc': 'colwise'}
GPT2 |= {'h.*.attn.c_proj': 'rowwise', 'h.*.mlp.c_proj': 'rowwise'}
"""names as in the base model"""


def plan_of(module: nn.Module) -> dict[str, str]:
    """{name of a module of `module`: style}, numbers of layers filled in, from the outermost model that has a plan.

    Raises:
        ValueError: there is none, or one with styles that are not known here.
    """
    found_plans = ((n, m, _own_plan(m) or getattr(m, '_tp_plan', None)) for n, m in module.named_modules())
    prefix, owner, given = next((found for found in found_plans if found[2]), ('', None, None))
    plan = dict(given or {})
    inside = dict(owner.named_modules()) if owner is not None else {}
    found = {n: plan[key] for n in inside if (key := _pattern(n)) in plan}
    name = type(getattr(module, 'model', module)).__name__
    if not any(style == 'colwise' or style.startswith('colwise_') for n, style in found.items() if n != _pattern(n)):
        raise ValueError(
            f'tensor_parallel: {name} has no plan for it in transformers (base_model_tp_plan); the families of Llama, '
            'Qwen, Mistral, Gemma, Phi, Cohere, GLM, OLMo, StarCoder2 and GPT-NeoX have one, and GPT-2 here; leave '
            'tensor_parallel out'
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


def _own_plan(model: Any) -> dict[str, str]:
    """GPT-2's plan, names as in `model`; empty for other models."""
    prefix = getattr(model, 'base_model_prefix', None)
    if prefix is None or model.config.model_type != 'gpt2':
        return {}
    inside = f'{prefix}.' if prefix and hasattr(model, prefix) else ''
    return {inside + name: style for name, style in GPT2.items()} | {'lm_head': 'colwise_gather_output'}


def is_transposed(layer: nn.Module) -> bool:
    """GPT-2's `Conv1D`, or one with an adapter: a linear layer whose weight is stored (in, out). Known by name, for
    strategies are imported without transformers."""
    return any(kind.__name__ == 'Conv1D' for kind in type(layer).__mro__)


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
    # A scaled embedding, as of Gemma 3, multiplies what `nn.Embedding` gives.
    scaled = isinstance(inputs, nn.Embedding) and 'Scaled' in type(inputs).__name__
    can = type(inputs).forward is nn.Embedding.forward or scaled
    plan = {n: style for n, style in plan.items() if n not in ((first, last) if tied else (first,))}
    if can:
        plan[first] = VOCABULARY
    if can and tied:
        plan[last] = 'colwise_gather_output'
    return plan


def check_model(module: nn.Module, tensor_parallel: int) -> dict[str, str]:
    """The model's plan. ValueError, before anything is cut, for a model that cannot be cut into so many parts."""
    name = type(getattr(module, 'model', module)).__name__
    check_causal(getattr(module, 'model', module), 'tensor_parallel cuts', 'leave tensor_parallel out')
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
                divisors = ', '.join(str(d) for d in range(1, num_heads + 1) if num_heads % d == 0)
                raise ValueError(
                    f'tensor_parallel={tensor_parallel}: {name} has {num_heads} heads in {layer_name}, which it does '
                    f'not divide; choose one of {divisors}'
                )
        is_output = any(getattr(m, 'get_output_embeddings', lambda: None)() is layer for m in module.modules())
        if width % tensor_parallel and '.' in layer_name and not is_output:
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


def parallelize(module: nn.Module, group: TensorGroup, mesh: DeviceMesh | None, plan: dict[str, str]) -> Parts:
    """Cut the weights of `module` in place, and let its layers compute with their parts.

    Args:
        module: whole, the same on every process of the group, or on the meta device.
        mesh: the one tensor dimension; None without processes, as when planning.
        plan: of `check_model`.
    """
    made = _Made(group)
    styles: dict[str, Any] = {n: _STYLES[style](made, style) for n, style in plan.items() if style != WHOLE}
    if mesh is not None:
        parallelize_module(module, mesh, styles)
    else:
        for name, style in styles.items():
            style._apply(module.get_submodule(name), None)
    attention: Any
    for attention in module.modules():
        if any(kind.__name__ == 'GPT2Attention' for kind in type(attention).__mro__):  # which counts heads itself
            attention.num_heads //= group.size
            attention.split_size //= group.size
    named = dict(module.named_parameters(remove_duplicate=False))
    cuts = {name: made.cuts[id(p)] for name, p in named.items() if id(p) in made.cuts}
    return Parts(group, cuts, {name for name, p in module.named_parameters() if id(p) in made.partial})


@dataclass(frozen=True)
class Parts:
    """What a process holds of one model; by default all of it."""

    group: TensorGroup | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """by name of a parameter that is held in parts, tied names included"""
    partial: Set[str] = frozenset()
    """names of whole parameters of which each process knows the gradient for its own heads only"""

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor."""
        return self.cuts[name].take(whole) if name in self.cuts else whole

    def join(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor. A collective of the group where it is cut."""
        return self.cuts[name].join(part, self.group) if self.group is not None and name in self.cuts else part


@dataclass(frozen=True)
class Cut:
    """Part `index` of `size` of a tensor of `shape`, along dimension `dim` (0, or 1 of a matrix); with `blocks`, of
    each of so many equal blocks that lie behind one another along it, which the parts must divide.

    Example: process 1 of 2 holds rows 2, 3, 6 and 7 of a (8, 4) weight that is cut in two blocks.
    """

    shape: tuple[int, ...]
    dim: int
    index: int
    size: int
    blocks: int = 1

    @property
    def start(self) -> int:
        """Where this part of a block begins, along `dim`."""
        return part_of(self.shape[self.dim] // self.blocks, self.index, self.size)[0]

    @property
    def stop(self) -> int:
        return part_of(self.shape[self.dim] // self.blocks, self.index, self.size)[1]

    @property
    def local_shape(self) -> tuple[int, ...]:
        length = self.blocks * (self.stop - self.start)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def rows(self) -> int:
        """In how many equal ranges of elements the tensor lies of which this part has one range each."""
        return self.blocks * math.prod(self.shape[: self.dim])

    @property
    def columns(self) -> tuple[int, int, int]:
        """Elements of such a row, and [start, stop) of this part's among them."""
        inner = math.prod(self.shape[self.dim + 1 :])
        return self.shape[self.dim] // self.blocks * inner, self.start * inner, self.stop * inner

    def take(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor: a view, or with several blocks a copy."""
        blocks = whole.unflatten(self.dim, (self.blocks, self.shape[self.dim] // self.blocks))
        return blocks.narrow(self.dim + 1, self.start, self.stop - self.start).flatten(self.dim, self.dim + 1)

    def join(self, part: Tensor, group: TensorGroup) -> Tensor:
        """The whole tensor out of all processes' parts. A collective."""
        blocks = part.unflatten(self.dim, (self.blocks, self.stop - self.start))
        width = self.shape[self.dim] // self.blocks
        return group.joined(blocks, width, self.dim + 1).flatten(self.dim, self.dim + 1)

    def pieces(self, name: str, start: int, stop: int, flat: Tensor, group: TensorGroup) -> Iterator[Piece]:
        """Of elements [start, stop) of the flattened part, what this process writes. Where there are several rows, a
        collective of the group with the same range on all: rows that are whole in it are gathered, and what is left at
        its ends each process writes itself."""
        width, first_column, last_column = self.columns
        own = last_column - first_column
        first, last = (-(-start // own), stop // own) if self.rows > 1 and own else (stop + 1, 0)
        ends = [(start, min(first * own, stop)), (max(last * own, start), stop)][: 2 if first <= last else 1]
        for begin, end in ends:
            if end > begin:
                row = begin // own
                at = row * width + first_column + begin - row * own
                yield Piece(name, self.shape, at, at + end - begin, flat[begin - start : end - start])
        if first < last:
            rows = group.joined(flat[first * own - start : last * own - start].view(-1, own), width)
            if group.index == 0:
                yield Piece(name, self.shape, first * width, last * width, rows.reshape(-1))


class CutReader:
    """Another reader's tensors as this process's parts of them.

    Args:
        cuts: by name; the names 'NAME/SLOT' of optimizer states are cut like NAME. A stored tensor of another shape
            than the cut's is given as it is.
    """

    def __init__(self, reader: TensorReader, cuts: Mapping[str, Cut]) -> None:
        self.reader, self.cuts = reader, cuts

    def _cut(self, name: str) -> Cut | None:
        cut = self.cuts.get(name) or self.cuts.get(name.rpartition('/')[0])
        return cut if cut is not None and tuple(self.reader.shape(name)) == cut.shape else None

    def names(self) -> set[str]:
        return self.reader.names()

    def shape(self, name: str) -> tuple[int, ...]:
        cut = self._cut(name)
        return self.reader.shape(name) if cut is None else cut.local_shape

    def read(self, name: str, start: int, stop: int) -> Tensor:
        cut = self._cut(name)
        if cut is None or stop == start:
            return self.reader.read(name, start, stop)
        width, begin, end = cut.columns
        if cut.rows == 1:
            return self.reader.read(name, start + begin, stop + begin)
        own = end - begin
        first, last = start // own, -(-stop // own)
        # a few rows at a time: they are read whole
        step = max(1, (1 << 22) // width)
        parts = [
            self.reader.read(name, row * width, min(row + step, last) * width).view(-1, width)[:, begin:end].reshape(-1)
            for row in range(first, last, step)
        ]
        return torch.cat(parts)[start - first * own : stop - first * own]


class _Made:
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
        owner.sharding_group = self.group  # type: ignore[assignment]

    def mark_partial(self, owner: nn.Module, *names: str) -> None:
        self.partial |= {id(p) for n in names if (p := owner._parameters.get(n)) is not None}


class _Style(ParallelStyle):
    """How a layer is cut. `name` is the style's in a plan."""

    def __init__(self, made: _Made, name: str) -> None:
        self.made, self.name = made, name


class _Colwise(_Style):
    """Own rows of a linear layer's weight: (..., in) on all → this process's part of (..., out), or all of it."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        group, copies, made = self.made.group, self.made.copies, self.made
        linear, transposed = type(module) is nn.Linear, is_transposed(module)
        width = module.weight.shape[0]
        for name in ('weight', 'bias', 'lora_B'):
            made.cut(module, name, 1 if transposed and name == 'weight' else 0, 3 if self.name == FUSED else 1)
        if transposed:
            module.nf = module.weight.shape[1]
        made.mark_partial(module, 'lora_A')
        module.register_forward_pre_hook(lambda _, args: (copies(args[0]), *args[1:]))
        if self.name not in ('colwise', FUSED):
            module.register_forward_hook(lambda _, args, output: gather(output, group, width))
            if linear:  # log-probs may be taken from the parts (chatgpt.nn.head_kernels)
                module.vocabulary = VocabularyPart(group, made.cuts[id(module.weight)].start, width)
        return module


class _Rowwise(_Style):
    """Own columns of a linear layer's weight: this process's part of (..., in), or all of it → (..., out) on all."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        group, made = self.made.group, self.made
        for name in ('weight', 'lora_A'):
            made.cut(module, name, 0 if is_transposed(module) and name == 'weight' else 1)
        made.mark_partial(module, 'lora_B')
        if self.name != 'rowwise':
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


class _Vocabulary(_Style):
    """Own rows of an embedding: (...) ids → (..., D) on all."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        whole = module.weight
        self.made.cut(module, 'weight', 0)
        cut = self.made.cuts[id(module.weight)]
        if (padding := module.padding_idx) is not None:  # whose row learns nothing
            padding = padding % whole.shape[0] - cut.start
            module.padding_idx = padding if 0 <= padding < cut.local_shape[0] else None
        module.vocabulary = VocabularyPart(self.made.group, cut.start, cut.shape[0])
        module.forward = MethodType(_embedded, module)
        return module


def _embedded(layer: Any, ids: Tensor) -> Tensor:
    part, rows = layer.vocabulary, layer.weight.shape[0]
    inside = (ids >= part.start) & (ids < part.start + rows)
    out = type(layer).forward(layer, torch.where(inside, ids - part.start, 0))
    return total(out * inside[..., None], part.group)


class _Partial(_Style):
    """Whole on each process, of which each knows the gradient for its own heads only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.made.mark_partial(module, *module._parameters)
        return module


_STYLES: dict[str, type[_Style]] = {
    **{name: _Colwise if name.startswith('colwise') else _Rowwise for name in STYLES},
    VOCABULARY: _Vocabulary,
    PARTIAL: _Partial,
}

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


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(grad), None


class _Total(torch.autograd.Function):
    """Megatron's g: forward the sum over the group; backward the same gradient for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """(..., own part) → (..., width); backward the own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, width: int) -> Tensor:
        ctx.own = group.bounds(width)
        return group.joined(x, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start, stop = ctx.own
        return grad[..., start:stop], None, None


class _Split(torch.autograd.Function):
    """(..., width) → (..., own part); backward all parts' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        start, stop = group.bounds(x.shape[-1])
        return x[..., start:stop].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.joined(grad, ctx.width), None


total, gather, split = _Total.apply, _Gather.apply, _Split.apply
