"""Weights and optimizer states by parameter name: functions on modules, optimizers and `TensorReader`s that the
strategies share, without files or collectives."""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.strategies.checkpoint.layout import CheckpointMismatch, TensorReader


def refuse_shared(model: nn.Module, what: str) -> None:
    """Raises ValueError if other models share the weights of `model`. `what` is the refused operation."""
    from chatgpt.nn.lora import is_shared, lora_layers

    adapted = lora_layers(model).values()
    if any(is_shared(p) for p in model.parameters()) or any(layer.shares_base for layer in adapted):
        raise ValueError(
            f'{what}, and this {type(model).__name__} shares them with other models (SharedTrunk); '
            'use NaiveStrategy or DDPStrategy, without offload'
        )


CHUNK = 1 << 24
"""elements copied at a time, which bounds the buffer of loading"""

_ELEMENTWISE = {'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'momentum_buffer'}
"""slots that must have the shape of their parameter"""

MACHINERY = {'params', 'foreach', 'fused', 'capturable', 'differentiable'}
"""keys of a parameter group that select the implementation of a step and are not hyperparameters"""


def named_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns parameters and persistent buffers, each once, and other names of tied ones: ({name: tensor}, {alias:
    name}). Does not return the frozen weights of a shared trunk."""
    from chatgpt.nn.lora import is_shared

    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or is_shared(tensor):
            continue
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return tensors, aliases


def match_names(
    wanted: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str], reader: TensorReader, *, strict: bool = True
) -> dict[str, str]:
    """Returns {wanted name: name in the reader}. A tied tensor may be stored under any of its names.

    Raises:
        CheckpointMismatch: with the first missing, unexpected and wrongly shaped tensors; with `strict=False` only for
            wrong shapes, or if no tensor is in both. Missing and unexpected ones are then a warning.
    """
    found = reader.names()
    source = {name: name for name in wanted if name in found}
    for alias, name in aliases.items():
        if name not in source and alias in found:
            source[name] = alias
    left_out = getattr(reader, 'left_out', ())
    # tensors without elements are not written
    missing = [n for n in wanted if n not in source and n not in left_out and 0 not in wanted[n]]
    unexpected = sorted(found - set(wanted) - set(aliases))
    wrong = [
        f'{name}: checkpoint {tuple(reader.shape(stored))}, model {tuple(wanted[name])}'
        for name, stored in source.items()
        if tuple(reader.shape(stored)) != tuple(wanted[name])
    ]
    found_out = _listed('missing', missing), _listed('unexpected', unexpected), _listed('wrong shape', wrong, sep='; ')
    faults = [text for text in found_out if text]
    if wrong or (strict and faults):
        raise CheckpointMismatch(f'the checkpoint does not fit: {"; ".join(faults)}')
    if not source and wanted:
        raise CheckpointMismatch(f'the checkpoint shares no tensor with the model: {"; ".join(faults)}')
    if faults:
        warnings.warn(f'loaded {len(source)} of {len(wanted)} tensors: {"; ".join(faults)}', stacklevel=3)
    return source


def _listed(what: str, names: list[str], limit: int = 5, sep: str = ', ') -> str:
    if not names:
        return ''
    more = f' and {len(names) - limit} more' if len(names) > limit else ''
    return f'{what} {sep.join(names[:limit])}{more}'


def copy_from(reader: TensorReader, name: str, tensor: Tensor) -> None:
    """Fills `tensor` with the reader's `name`, in chunks of bounded size."""
    with torch.no_grad():
        if not tensor.is_contiguous():
            tensor.copy_(reader.read(name, 0, tensor.numel()).view(tensor.shape))
            return
        flat = tensor.detach().view(-1)
        for start in range(0, flat.numel(), CHUNK):
            stop = min(start + CHUNK, flat.numel())
            flat[start:stop].copy_(reader.read(name, start, stop))


def assign_owners(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Assigns tensors to ranks: {name: rank}, the largest first, each to the rank with the fewest bytes."""
    loads = [(0, rank) for rank in range(world_size)]
    owner = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        load, rank = heapq.heappop(loads)
        owner[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owner


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Returns the names in `model` of the optimizer's parameters, per group. ValueError if one is not in `model`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        strange = sum(id(p) not in names for p in group['params'])
        if strange:
            raise ValueError(
                f'prepare: {strange} parameter(s) in group {number} of {type(optimizer).__name__} do not belong to the '
                f'{type(model).__name__} it is paired with; build the optimizer from model.parameters()'
            )
        groups.append([names[id(p)] for p in group['params']])
    return groups


def slots_of(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors and numbers of the optimizer's state as {'<parameter>/<slot>': tensor}."""
    slots = {}
    for name, parameter in named:
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                slots[f'{name}/{slot}'] = value
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                slots[f'{name}/{slot}'] = torch.tensor(float(value))
    return slots


def slot_device(optimizer: Optimizer, parameter: Tensor, shape: tuple[int, ...]) -> torch.device:
    """Returns a slot's device in torch's optimizers: numbers are on the CPU unless the step is fused or captured."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g['params']))
    return parameter.device if shape or group.get('fused') or group.get('capturable') else torch.device('cpu')


Fill = Callable[[TensorReader, str, Tensor], None]


def load_slots(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], reader: TensorReader, fill: Fill | None = None
) -> None:
    """Replaces the optimizer's state by the reader's '<parameter>/<slot>' tensors, after checking all of them.

    Args:
        fill: for sharded parameters, reads this rank's part of a named tensor into a tensor sharded alike. Every slot
            is then a number or has the shape of its parameter.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    slots = checked_slots(reader, shapes, None if fill is not None else _ELEMENTWISE)
    optimizer.state.clear()
    for name, parameter in parameters.items():
        for slot in slots.get(name, []):
            shape = tuple(reader.shape(f'{name}/{slot}'))
            if fill is not None and shape:
                value = torch.zeros_like(parameter, requires_grad=False)
                fill(reader, f'{name}/{slot}', value)
            else:
                value = reader.read(f'{name}/{slot}', 0, math.prod(shape)).reshape(shape)
                value = value.to(slot_device(optimizer, parameter, shape), copy=True)
                if slot in ('state1', 'state2') and getattr(optimizer, 'is_paged', False):  # as bitsandbytes makes them
                    value = optimizer.get_state_buffer(parameter, dtype=value.dtype).copy_(value)  # type: ignore[attr-defined]
            counts = slot == 'step' and type(optimizer).__module__.startswith('bitsandbytes')  # stores a plain int
            optimizer.state[parameter][slot] = int(value) if counts else value


def checked_slots(
    reader: TensorReader, shapes: Mapping[str, tuple[int, ...]], elementwise: Container[str] | None
) -> dict[str, list[str]]:
    """Returns the slots by parameter: {'a.weight': ['exp_avg', 'step']} for 'a.weight/exp_avg' and 'a.weight/step'.

    Args:
        shapes: shapes of the optimizer's parameters.
        elementwise: slots that must have the shape of their parameter; None: all except numbers.

    Raises:
        CheckpointMismatch: for an unknown parameter or a wrong shape.
    """
    slots: dict[str, list[str]] = {}
    for name in sorted(reader.names()):
        parameter, _, slot = name.rpartition('/')
        slots.setdefault(parameter, []).append(slot)
    if strange := _listed('unexpected', sorted(set(slots) - set(shapes))):
        raise CheckpointMismatch(f'the optimizer state does not fit: parameters {strange}')
    for parameter, whole in shapes.items():
        for slot in slots.get(parameter, []):
            shape = tuple(reader.shape(f'{parameter}/{slot}'))
            sized = shape != () if elementwise is None else slot in elementwise
            if sized and shape != whole:
                raise CheckpointMismatch(f'{parameter}/{slot}: wrong shape: checkpoint {shape}, parameter {whole}')
    return slots


def groups_to_json(optimizer: Optimizer, names: list[list[str]]) -> list[dict[str, Any]]:
    """Returns the hyperparameters of each group that JSON can hold, and the names of its parameters."""
    groups: list[dict[str, Any]] = []
    for group, members in zip(optimizer.param_groups, names, strict=True):
        settings = {key: plain(value) for key, value in group.items() if key not in MACHINERY}
        groups.append({'params': list(members), **{key: v for key, v in settings.items() if v is not NotImplemented}})
    return groups


def plain(value: Any) -> Any:
    """Converts a hyperparameter for JSON; returns NotImplemented if that is not possible."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else NotImplemented
    if isinstance(value, (tuple, list)):
        items = [plain(v) for v in value]
        return NotImplemented if any(v is NotImplemented for v in items) else items
    return value if value is None or isinstance(value, (bool, int, float, str)) else NotImplemented


def groups_from_json(optimizer: Optimizer, names: list[list[str]], groups: list[dict[str, Any]]) -> None:
    """Sets hyperparameters from `groups_to_json`. Groups are matched by the names of their parameters."""
    stored = {name: number for number, group in enumerate(groups) for name in group['params']}
    missing = [name for members in names for name in members if name not in stored]
    unexpected = sorted(set(stored) - {name for members in names for name in members})
    if missing or unexpected:
        faults = '; '.join(text for text in (_listed('missing', missing), _listed('unexpected', unexpected)) if text)
        raise CheckpointMismatch(f'the optimizer state does not fit: parameters {faults}')
    for number, (group, members) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        sources = {stored[name] for name in members}
        if len(sources) > 1:
            where = ', '.join(map(str, sorted(sources)))
            raise CheckpointMismatch(
                f'the optimizer state does not fit: parameters of group {number} are spread over {where}'
            )
        for source in sources:
            for key, value in groups[source].items():
                if key in group and key not in MACHINERY:
                    group[key] = like(group[key], value)


def like(old: Any, value: Any) -> Any:
    """Converts a JSON value to the type of the value that it replaces."""
    if isinstance(old, Tensor):
        return torch.full_like(old, value)
    return tuple(value) if isinstance(old, tuple) and isinstance(value, list) else value
