"""Tensor parallelism: the processes of a group split each block's matrices and compute every token together (Shoeybi et
al. 2019, "Megatron-LM").

The plan of a model in transformers (`base_model_tp_plan`, `_tp_plan`) gives the dimension along which each matrix is
split; GPT-2's plan is here. Its styles become styles of torch's `parallelize_module`:

    input ── copy ──▶ colwise: own rows of the weight ──▶ own heads, own features ──▶ rowwise: own columns ── sum ──▶

A process's part of a weight is an ordinary parameter, and not a DTensor over the tensor dimension as in torch's styles.
So `fully_shard` shards every parameter over the data dimension alone, foreach and fused optimizer steps see tensors of
one mesh, products avoid DTensor's dispatch, and models that generate are ordinary modules. `Cut` records the position
of a part in its whole, for checkpoints.

Results of replicated inputs have the same bits on all processes of a group, since each is summed or gathered once for
all of them. Log-probs over parts of the vocabulary are in `chatgpt.functional.fused_logprobs`.
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
"""colwise, for a layer with all queries, then all keys, then all values as its output"""
PARTIAL = 'replicated_with_grad_allreduce'
"""the style of replicated parameters that each process uses for its own heads only; their gradients are summed"""
STYLES = ('colwise', FUSED, 'colwise_gather_output', 'colwise_rep', 'rowwise', 'rowwise_split_input', 'rowwise_rep')
VOCABULARY = 'embedding_rowwise'
WHOLE = 'replicate'
KNOWN = (*STYLES, VOCABULARY, PARTIAL, WHOLE)
GPT2 = {'h.*.attn.c_attn': FUSED, 'h.*.mlp.c_fc': 'colwise'}
GPT2 |= {'h.*.attn.c_proj': 'rowwise', 'h.*.mlp.c_proj': 'rowwise'}
"""names as in the base model"""


def plan_of(module: nn.Module) -> dict[str, str]:
    """Returns {name of a submodule: style}, with layer indices filled in, from the outermost model that has a plan.

    Raises:
        ValueError: if there is no plan, or one with unknown styles.
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
    """Returns GPT-2's plan with names as in `model`; empty for other models."""
    prefix = getattr(model, 'base_model_prefix', None)
    if prefix is None or model.config.model_type != 'gpt2':
        return {}
    inside = f'{prefix}.' if prefix and hasattr(model, prefix) else ''
    return {inside + name: style for name, style in GPT2.items()} | {'lm_head': 'colwise_gather_output'}


def is_transposed(layer: nn.Module) -> bool:
    """Returns True for GPT-2's `Conv1D`, also with an adapter: a linear layer that stores its weight as (in, out).
    Compares names, since strategies are imported without transformers."""
    return any(kind.__name__ == 'Conv1D' for kind in type(layer).__mro__)


def _pattern(name: str) -> str:
    """'layers.3.mlp.fc1' → 'layers.*.mlp.fc1'."""
    return '.'.join('*' if part.isdigit() else part for part in name.split('.'))


def _with_vocabulary(owner: Any, plan: dict[str, str]) -> dict[str, str]:
    """Returns the plan with embeddings split along the vocabulary, input and output alike if they are tied."""
    names = {m: n for n, m in owner.named_modules()}
    inputs: Any = getattr(owner, 'get_input_embeddings', lambda: None)()
    outputs: Any = getattr(owner, 'get_output_embeddings', lambda: None)()
    first, last = names.get(inputs, ''), names.get(outputs, '')
    if not first:
        return plan
    tied = bool(last) and inputs.weight is outputs.weight
    # A scaled embedding, as in Gemma 3, multiplies the output of `nn.Embedding`.
    scaled = isinstance(inputs, nn.Embedding) and 'Scaled' in type(inputs).__name__
    can = type(inputs).forward is nn.Embedding.forward or scaled
    plan = {n: style for n, style in plan.items() if n not in ((first, last) if tied else (first,))}
    if can:
        plan[first] = VOCABULARY
    if can and tied:
        plan[last] = 'colwise_gather_output'
    return plan


def check_model(module: nn.Module, tensor_parallel: int) -> dict[str, str]:
    """Returns the model's plan. ValueError for a model that cannot be split into that many parts."""
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
            # the output is q, k, v for each head in turn, or all queries, then all keys, then all values
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
    """Raises ValueError for a parameter beside colwise layers that is not in the plan: it is unknown if its input is
    split, and so if its gradient is partial."""
    for owner in {n.rpartition('.')[0] for n, style in plan.items() if style in ('colwise', FUSED)}:
        for inner, _ in module.get_submodule(owner).named_parameters(prefix=owner):
            layer = inner.rpartition('.')[0]
            if layer not in plan:
                raise ValueError(
                    f'tensor_parallel: the plan of {name} does not say what becomes of {inner}, which '
                    'stands beside layers that it cuts; leave tensor_parallel out'
                )


def parallelize(module: nn.Module, group: TensorGroup, mesh: DeviceMesh | None, plan: dict[str, str]) -> Parts:
    """Splits the weights of `module` in place, and changes its layers to compute with their parts.

    Args:
        module: a whole module, the same on every process of the group, or on the meta device.
        mesh: the tensor dimension; None without processes, as when planning.
        plan: as from `check_model`.
    """
    made = _LocalParts(group)
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
    """The parts of a model that a process holds; by default the whole model."""

    group: TensorGroup | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """by name of a split parameter, including tied names"""
    partial: Set[str] = frozenset()
    """names of replicated parameters with gradients of the own heads only"""

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Returns this process's part of a whole tensor."""
        return self.cuts[name].take(whole) if name in self.cuts else whole

    def join(self, name: str, part: Tensor) -> Tensor:
        """Returns the whole tensor. Collective in the group if it is split."""
        return self.cuts[name].join(part, self.group) if self.group is not None and name in self.cuts else part


@dataclass(frozen=True)
class Cut:
    """Part `index` of `size` of a tensor of `shape`, split along dimension `dim` (0, or 1 of a matrix). With `blocks` >
    1 each of that many equal blocks along it is split, into parts of equal size.

    Example: process 1 of 2 holds rows 2, 3, 6 and 7 of an (8, 4) weight with two blocks.
    """

    shape: tuple[int, ...]
    dim: int
    index: int
    size: int
    blocks: int = 1

    @property
    def start(self) -> int:
        """Index along `dim` at which this part of a block begins."""
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
        """Number of equal ranges of elements of the flat tensor that contain one range of this part each."""
        return self.blocks * math.prod(self.shape[: self.dim])

    @property
    def columns(self) -> tuple[int, int, int]:
        """Number of elements of such a row, and [start, stop) of this part in it."""
        inner = math.prod(self.shape[self.dim + 1 :])
        return self.shape[self.dim] // self.blocks * inner, self.start * inner, self.stop * inner

    def take(self, whole: Tensor) -> Tensor:
        """Returns the part of a whole tensor: a view, or with several blocks a copy."""
        blocks = whole.unflatten(self.dim, (self.blocks, self.shape[self.dim] // self.blocks))
        return blocks.narrow(self.dim + 1, self.start, self.stop - self.start).flatten(self.dim, self.dim + 1)

    def join(self, part: Tensor, group: TensorGroup) -> Tensor:
        """Returns the whole tensor from the parts of all processes. Collective."""
        blocks = part.unflatten(self.dim, (self.blocks, self.stop - self.start))
        width = self.shape[self.dim] // self.blocks
        return group.joined(blocks, width, self.dim + 1).flatten(self.dim, self.dim + 1)

    def pieces(self, name: str, start: int, stop: int, flat: Tensor, group: TensorGroup) -> Iterator[Piece]:
        """Yields the pieces that this process writes of elements [start, stop) of the flattened part. With several
        rows, a collective of the group with the same range on all: complete rows are gathered, and each process writes
        the incomplete ones at the ends of the range."""
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
    """A reader of this process's parts of the tensors of another reader.

    Args:
        cuts: by name; optimizer states 'NAME/SLOT' are split like NAME. A stored tensor with a shape other than the
            cut's is read whole.
    """

    def __init__(self, reader: TensorReader, cuts: Mapping[str, Cut]) -> None:
        self.reader, self.cuts = reader, cuts
        self.left_out: frozenset[str] = getattr(reader, 'left_out', frozenset())

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
        # a few rows at a time, since whole rows are read
        step = max(1, (1 << 22) // width)
        parts = [
            self.reader.read(name, row * width, min(row + step, last) * width).view(-1, width)[:, begin:end].reshape(-1)
            for row in range(first, last, step)
        ]
        return torch.cat(parts)[start - first * own : stop - first * own]


class _LocalParts:
    """The parts made so far, by which tied weights stay tied."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.copies = _Copies(group)
        self.cuts: dict[int, Cut] = {}
        """by id of a part"""
        self.partial: set[int] = set()
        """ids of replicated parameters with partial gradients"""
        self._made: dict[int, nn.Parameter] = {}
        self._whole: list[nn.Parameter] = []  # keeps alive the parameters with the ids above

    def cut(self, owner: nn.Module, name: str, dim: int, blocks: int = 1) -> None:
        """Replaces a parameter by this process's part along `dim`."""
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
    """A style of splitting a layer; `name` is its name in a plan."""

    def __init__(self, made: _LocalParts, name: str) -> None:
        self.made, self.name = made, name


class _Colwise(_Style):
    """A linear layer with rows of the weight: (..., in) on all → this process's part of (..., out), or all of it."""

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
            if linear:  # chatgpt.nn.head_kernels may compute log-probs from the parts
                module.vocabulary = VocabularyPart(group, made.cuts[id(module.weight)].start, width)
        return module


class _Rowwise(_Style):
    """A linear layer with columns of the weight: this process's part of (..., in), or all of it → (..., out) on all."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        group, made = self.made.group, self.made
        for name in ('weight', 'lora_A'):
            made.cut(module, name, 0 if is_transposed(module) and name == 'weight' else 1)
        made.mark_partial(module, 'lora_B')
        if self.name != 'rowwise':
            module.register_forward_pre_hook(lambda _, args: (split(args[0], group), *args[1:]))
        if module.bias is None:
            module.register_forward_hook(lambda _, args, output: total(output, group))
        else:  # the bias is added once, to the sum
            module.tensor_group = group
            module.forward = MethodType(_rowwise_with_bias, module)
        return module


def _rowwise_with_bias(layer: Any, x: Tensor) -> Tensor:
    out = x @ layer.weight if is_transposed(layer) else F.linear(x, layer.weight)
    if hasattr(layer, 'lora_A'):
        out = layer._add_adapter(out, x)
    return total(out, layer.tensor_group) + layer.bias


class _Vocabulary(_Style):
    """An embedding with rows of the weight: (...) ids → (..., D) on all."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        whole = module.weight
        self.made.cut(module, 'weight', 0)
        cut = self.made.cuts[id(module.weight)]
        if (padding := module.padding_idx) is not None:  # the gradient of this row is 0
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
    """A replicated module; each process has its gradients for its own heads only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.made.mark_partial(module, *module._parameters)
        return module


_STYLES: dict[str, type[_Style]] = {
    **{name: _Colwise if name.startswith('colwise') else _Rowwise for name in STYLES},
    VOCABULARY: _Vocabulary,
    PARTIAL: _Partial,
}

# ---------------------------------------------------------------- collectives of a group


@torch.no_grad()
def sum_over_group(gradients: Iterable[Tensor], group: TensorGroup) -> None:
    """Sums partial gradients over the group, in place."""
    for bucket in buckets((g for g in gradients if g.numel()), _BUCKET):
        summed = group.sum(torch.cat([g.reshape(-1) for g in bucket]))
        for gradient, values in zip(bucket, summed.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(values.view_as(gradient))


class _Copies:
    """Megatron's f: identity in forward, sum over the group in backward. Layers that read the same tensor (queries,
    keys and values) share one copy, and so one sum."""

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
    """Megatron's g: sum over the group in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """(..., own part) → (..., width); the backward takes the own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, width: int) -> Tensor:
        ctx.own = group.bounds(width)
        return group.joined(x, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start, stop = ctx.own
        return grad[..., start:stop], None, None


class _Split(torch.autograd.Function):
    """(..., width) → (..., own part); the backward gathers the gradients of all parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        start, stop = group.bounds(x.shape[-1])
        return x[..., start:stop].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.joined(grad, ctx.width), None


total, gather, split = _Total.apply, _Gather.apply, _Split.apply
