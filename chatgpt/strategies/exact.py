"""`reproducible='exact'`: sums of gradients in one order, a norm in which no sharding shows, and optimizers whose step
is elementwise.

`chatgpt.batching.Exact` says what a batch is cut into and who computes which part.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

_CHUNK = 1 << 16
"""elements whose squares are added at a time: they stay in a CPU's cache, and their sum in 53 bits"""
_BITS = 26
"""of each of the two integers that a square becomes"""
_ALIGNED = 64
"""bytes, of torch's memory on a CPU"""


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor  # a DTensor, whose class is slow to import


class TreeSum:
    """Adds the gradients of one atom after the other up in a binary tree: neighbours, then neighbours of those.

    At most log2(atoms) sums wait beside the gradient that a backward makes. A parameter without a gradient counts as
    +0; one that never had any keeps none.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: list[tuple[int, list[Tensor | None]]] = []
        """(atoms in it, a sum for each parameter), larger ones first"""

    def add(self, node: list[Tensor | None]) -> None:
        """Gradients of one atom; their memory is used."""
        size = 1
        while self._waiting and self._waiting[-1][0] == size:
            size, node = 2 * size, _added(self._waiting.pop()[1], node)
        self._waiting.append((size, node))
        self.count += 1

    def finish(self, expected: int) -> list[Tensor | None]:
        """The sum of `expected` atoms, a power of two."""
        if self.count != expected:
            raise RuntimeError(
                f"reproducible='exact': a step needs the gradients of {expected} atoms on this rank, and has those of "
                f'{self.count}; call strategy.end_atom(optimizer) after the backward of each, as learn_batch does'
            )
        total = self._waiting[0][1]
        self.clear()
        return total

    def take(self, parameters: list[Tensor]) -> None:
        """Add the parameters' gradients as those of one atom, and clear them."""
        self.add([p.grad for p in parameters])
        for parameter in parameters:
            parameter.grad = None

    def give(self, parameters: list[Tensor], expected: int) -> None:
        """Set the parameters' gradients to the sum of `expected` atoms."""
        for parameter, gradient in zip(parameters, self.finish(expected), strict=True):
            parameter.grad = gradient

    def clear(self) -> None:
        self.count = 0
        self._waiting.clear()


@torch.no_grad()
def _added(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """Left plus right, for each parameter; memory of theirs is used."""
    total, to, more, alone = [], [], [], []
    for a, b in zip(left, right, strict=True):
        total.append(b if a is None else a)
        if a is not None and b is not None:
            to.append(own_part(a))
            more.append(own_part(b))
        elif total[-1] is not None:
            alone.append(own_part(total[-1]))
    if to:
        torch._foreach_add_(to, more)
    if alone:
        torch._foreach_add_(alone, 0.0)  # -0 + 0 is +0
    return total


def tree_reduce_scatter(flat: Tensor, group: Any = None) -> Tensor:
    """This rank's part, (n / ranks,), of the sum over ranks of `flat`, (n,), added in a binary tree over their numbers.

    As much is sent as by a ring.
    """
    ranks = dist.get_world_size(group)
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    parts = list(received.view(ranks, -1))
    while len(parts) > 1:
        parts = [a.add_(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def tree_all_reduce(flat: Tensor) -> Tensor:
    """The sum of (n,) over ranks, added as in `tree_reduce_scatter`."""
    ranks = dist.get_world_size()
    padded = nn.functional.pad(flat, (0, -flat.numel() % ranks))
    part = tree_reduce_scatter(padded)
    dist.all_gather_into_tensor(padded, part)
    return padded[: flat.numel()]


@torch.no_grad()
def exact_norm(
    gradients: Iterable[Tensor], device: torch.device, all_reduce: Callable[[Tensor, str], Tensor] | None = None
) -> float:
    """L2 norm, to about 2^-50 of the greatest element: the same bits however the elements lie on ranks.

    Squares, which fp64 holds exactly, become integers in units of 2^-52 of a power of two above the greatest one, and
    integers add up to the same in any order.

    Args:
        gradients: this rank's, fp32 or shorter.
        all_reduce: over the ranks that have the other parts; None where these are all.
    """
    flat = [g.detach().reshape(-1) for g in gradients if g.numel()]
    peaks = [g.abs().max().float().to(device) for g in flat]
    peak = torch.stack(peaks).max() if peaks else torch.zeros((), device=device)
    peak = torch.where(peak.isfinite(), peak, torch.inf)  # a NaN may get lost among ranks
    greatest = float(all_reduce(peak, 'max') if all_reduce is not None else peak)
    if greatest == 0.0 or not math.isfinite(greatest):
        return greatest
    exponent = math.frexp(greatest)[1]  # |g| < 2^exponent
    unit, sums = 2.0 ** (_BITS // 2 - exponent), torch.zeros(2, dtype=torch.int64, device=device)
    for gradient in flat:
        for chunk in gradient.split(_CHUNK if gradient.device.type == 'cpu' else 1 << _BITS):
            squares = chunk.double().mul_(unit).square_()  # < 2^26
            high = squares.round()
            low = squares.sub_(high).mul_(2.0**_BITS).round_()
            sums += torch.stack([high.sum(), low.sum()]).long().to(device)
    high, low = (all_reduce(sums, 'sum') if all_reduce is not None else sums).tolist()
    return math.sqrt((high << _BITS) + low) * 2.0 ** (exponent - _BITS)


def align(module: nn.Module) -> None:
    """Lets every weight and buffer begin where an allocation would: gathered ones do, those read from files do not, and
    a BLAS may choose its kernel by that. Raises ValueError for compiled blocks, whose kernels follow from sizes."""
    from chatgpt.nn.compiled import is_compiled

    if is_compiled(module):
        raise ValueError(
            f"reproducible='exact' promises bits, which the compiled graphs of {type(module).__name__} do not repeat "
            'under another layout: leave compile_blocks out'
        )
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.data_ptr() % _ALIGNED:
            tensor.data = tensor.data.clone()


def check_elementwise(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer that steps a part of a tensor otherwise than within the whole: it is tried.

    Fused steps of torch are such on a CPU with vectors: the last elements, too few for one, are rounded differently.
    They are refused on every CPU.
    """
    taken = inspect.signature(type(optimizer)).parameters
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k in taken and k != 'params'}
    device = optimizer.param_groups[0]['params'][0].device
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 300, generator=generator)
    ends = [0, 1, 4, 11, 24, 55, 118, 300]
    parts = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    def stepped(part: slice) -> Tensor:
        parameter = nn.Parameter(start[part].to(device, copy=True))
        tried: Any = type(optimizer)([parameter], **settings)
        for gradient in gradients:
            parameter.grad = gradient[part].to(device, copy=True)
            tried.step()
        slots = [v for v in tried.state[parameter].values() if isinstance(v, Tensor) and v.shape == parameter.shape]
        return torch.stack([parameter.detach(), *slots])

    fused = bool(settings.get('fused'))
    if (fused and device.type == 'cpu') or not torch.equal(
        torch.cat([stepped(part) for part in parts], dim=1), stepped(slice(None))
    ):
        leave = ' with fused=True: leave that out' if fused else ''
        raise ValueError(
            f"reproducible='exact': {type(optimizer).__name__} steps a part of a tensor otherwise than within the "
            f'whole{leave}; AdamW and SGD of torch are the same'
        )
