"""Sequence parallelism: the processes of a group compute each packed row together (Ulysses, Jacobs et al. 2023,
"DeepSpeed Ulysses", arXiv 2309.14509).

    tokens of a row ── own part ──▶ embedding, norms, projections, MLP ──▶ own part of the states ── gather ──▶ heads
                                        │            ▲
                          all-to-all: all tokens of own heads, in attention

All processes of a group have the same records and batches, and are one rank (`SequenceRanks`). Parameters are sharded
over all processes. Outputs of a model are gathered, so each process computes the same loss, and the sum of the losses
of all processes is the group's size times that of the rank. Every collective has its adjoint as its backward, so that
the mean of gradients over processes, times the number of ranks, is the gradient of the sum over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from chatgpt.strategies.tensor_ranks import TensorGroup, TensorRanks, part_of

T = TypeVar('T')


@dataclass(frozen=True, eq=False)
class SequenceGroup(TensorGroup):
    """The processes that hold equal parts of a row, the last ones with copies of its last token where it does not
    divide."""

    def own_index(self, count: int, device: torch.device) -> Tensor:
        """Returns the positions of this process's part of `count` tokens or actions."""
        longest = -(-count // self.size)
        return (torch.arange(longest, device=device) + self.index * longest).clamp(max=count - 1)

    def gather(self, x: Tensor, count: int) -> Tensor:
        """Maps the parts of all processes, (part, ...) each, to (count, ...)."""
        return _Gather.apply(x, self)[:count]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor, count: int) -> tuple[Tensor, ...]:
        """Maps query (1, H, part, d), key and value (1, H_kv, part, d) to this process's heads of all tokens, (1, H /
        size, count, d) and as many heads of keys and values as these read."""
        times = copies_of_keys(query.shape[1], key.shape[1], self.size)
        key, value = (x.repeat_interleave(times, dim=1) if times > 1 else x for x in (key, value))
        return tuple(_Exchange.apply(x, self)[:, :, :count] for x in (query, key, value))

    def to_tokens(self, out: Tensor) -> Tensor:
        """Maps attention's (1, count, H / size, d) to this process's tokens of all heads, (1, part, H, d)."""
        return _Exchange.apply(pad(out, (0, 0, 0, 0, 0, -out.shape[1] % self.size)), self)

    def exchanged(self, blocks: Tensor) -> Tensor:
        """Sends block i of (size, ...) to process i; returns the blocks received, in the order of the processes."""
        out = torch.empty_like(blocks)
        dist.all_to_all_single(out, blocks, group=self.group)
        return out


def copies_of_keys(heads: int, key_heads: int, size: int) -> int:
    """Returns how often heads of keys and values are repeated so that each of `size` processes has those that its query
    heads read. ValueError if heads do not divide."""
    if heads % size or (key_heads % size and size % key_heads):
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
        raise ValueError(
            f'sequence_parallel={size}: {heads} heads of queries and {key_heads} of keys and values cannot be dealt to '
            f'{size} processes; choose one of {", ".join(map(str, possible))}'
        )
    return max(size // key_heads, 1)


class _Exchange(torch.autograd.Function):
    """(1, a, b, ...) → (1, a / size, b * size, ...): parts of dimension 2 become parts of dimension 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return _swapped(x, group, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _swapped(grad, ctx.group, 2, 1), None


def _swapped(x: Tensor, group: SequenceGroup, cut: int, joined: int) -> Tensor:
    blocks = x.unflatten(cut, (group.size, -1)).movedim(cut, 0).contiguous()
    return group.exchanged(blocks).movedim(0, joined).flatten(joined, joined + 1)


class _Gather(torch.autograd.Function):
    """(part, ...) → (size * part, ...); the backward sums the gradients of all processes for the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.joined(x, group.size * len(x), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.exchanged(grad.unflatten(0, (ctx.group.size, -1)).contiguous()).sum(0), None


class SequenceRanks(TensorRanks):
    """Ranks of neighbouring processes that compute their sequences together, each with whole models."""

    option: ClassVar[str] = 'sequence_parallel'

    @property
    def group(self) -> SequenceGroup:
        return SequenceGroup(self.mesh.get_group('tensor'), self.index, self.tensor_parallel)

    def own_part(self, count: int) -> slice:
        return slice(*part_of(count, self.index, self.tensor_parallel))

    def from_parts(self, items: list[T]) -> list[T]:
        parts: list[Any] = [None] * self.tensor_parallel
        with self.status.waiting():
            dist.all_gather_object(parts, items, group=self.mesh.get_group('tensor'))
        return [item for part in parts for item in part]


def check_sequences(module: nn.Module, size: int) -> nn.Module:
    """Returns the trunk of a model whose rows `size` processes can compute together, which may be on the meta device.

    Raises:
        ValueError: for a model without the padding-free forward or with sliding windows, and if heads do not divide.
    """
    from chatgpt.nn.packing import packs, window_of
    from chatgpt.nn.trunk import base_model, text_config

    model: Any = getattr(module, 'model', None)
    trunk: Any = base_model(model) if hasattr(model, 'config') else None
    name = type(module if trunk is None else model).__name__
    if trunk is None or not packs(trunk):
        raise ValueError(
            f'sequence_parallel: {name} does not run without padding (chatgpt.nn.packing), and only packed rows are '
            'cut; leave sequence_parallel out'
        )
    if window_of(trunk) is not None:
        raise ValueError(
            f'sequence_parallel: {name} has sliding windows, and longer sequences run padded; leave it out'
        )
    heads = text_config(trunk.config).num_attention_heads
    copies_of_keys(heads, getattr(text_config(trunk.config), 'num_key_value_heads', None) or heads, size)
    return trunk
