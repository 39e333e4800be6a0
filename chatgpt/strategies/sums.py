"""Split of batches over ranks, and sums over ranks: `Sums`, in an order that depends on the layout, and `ExactSums`
(`reproducible='exact'`), in one order for all layouts.

A strategy owns one of them (`Strategy.sums`), which all code that splits batches or sums numbers uses. Below are sums
of gradients in a fixed order, a norm that does not depend on sharding, and the test for elementwise optimizers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.batching import align, cut_by_tokens, cut_shares, micro_batches, split_over_ranks
from chatgpt.rules import Rule, check
from chatgpt.strategies.ranks import Ranks

_CHUNK = 1 << 16
"""elements whose squares are summed at a time: they fit in a CPU's cache, and their sum in 53 bits"""
_BITS = 26
"""bits of each of the two integers that represent a square"""
_ALIGNED = 64
"""alignment in bytes of torch's memory on a CPU"""


class Sums:
    """Splits and sums in an order that depends on the layout. Positions are indices into `lengths`."""

    exact: ClassVar[bool] = False
    """True: the same bits in every layout; samples are redistributed before scoring, so that scores do not depend on
    the rank that generated them"""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def rounds(self, lengths: SequenceOf[int], max_tokens: int | None) -> list[tuple[int, list[list[int]]]]:
        """Returns rounds of this rank's micro-batches, as positions, of a train batch that all ranks hold.

        All ranks have equally many. The micro-batches of a round are accumulated before those of the next. Each round
        has a number, unique over all ranks, that seeds its randomness.
        """
        return [(self.ranks.rank, self.share(lengths, max_tokens))]

    def share(self, lengths: SequenceOf[int], max_tokens: int | None) -> list[list[int]]:
        """Returns this rank's micro-batches of a list that all ranks hold, without training; equally many on all."""
        return micro_batches(lengths, self.ranks.world_size, max_tokens)[self.ranks.rank]

    def ranks_of(self, lengths: SequenceOf[int]) -> list[int]:
        """Returns the rank to which `rounds` gives each item of a train batch, and `share` of a list."""
        return _dealt(split_over_ranks(lengths, self.ranks.world_size))

    def own(self, lengths: SequenceOf[int], max_tokens: int | None) -> list[list[int]]:
        """Returns the micro-batches of a list that only this rank holds."""
        return [
            [part[j] for j in cut]
            for part in self.parts(len(lengths))
            for cut in cut_by_tokens([lengths[i] for i in part], max_tokens)
        ]

    def parts(self, count: int) -> list[list[int]]:
        """Splits `count` items that only this rank holds into parts that may be computed together."""
        return [list(range(count))] if count else []

    def check_counts(self, fewest: int, most: int) -> None:
        """Raises ValueError if ranks hold different numbers of items and may not."""

    def own_range(self, count: int) -> range:
        """Returns the positions that this rank scores of `count` samples of all ranks; later ones are padding."""
        raise NotImplementedError

    def refuse(self, settings: Any, rules: Iterable[Rule]) -> None:
        """Raises ValueError for settings that an exact run does not support."""

    def check_model(self, module: nn.Module) -> None:
        """Raises ValueError for a model with results that depend on the layout; called before `prepare` moves it."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ValueError for an optimizer with a step that depends on the layout."""

    def tree(self) -> TreeSum | None:
        """Returns a new tree of the sums of gradients over rounds; None if there is one round."""
        return None

    def begin_all_reduce(self, flat: Tensor) -> tuple[Tensor, Any]:
        """Returns a tensor that becomes the sum over ranks of gradients, shape (n,), and the work to wait for, None if
        it is done; may overwrite them."""
        return flat, dist.all_reduce(flat, async_op=True)

    def totals(self, columns: SequenceOf[SequenceOf[Tensor]]) -> list[list[float]]:
        """Returns each column's sum over micro-batches and ranks. A column has a (k,) tensor per micro-batch."""
        own = torch.stack([sum(rows[1:], rows[0]) for rows in columns])
        return self.ranks.all_reduce(own.to(self.ranks.device), 'sum').tolist()


class ExactSums(Sums):
    """Splits and sums with the same bits on any number of ranks.

    A global batch is split into `atoms`, micro-batches that depend on the batch alone, so that forwards see the same
    tensors in every layout. Atoms are summed in a perfect binary tree: ((1 + 2) + (3 + 4)) + ((5 + 6) + (7 + 8)).

    Args:
        atoms: a power of two; the maximum number of ranks.
        ranks_below: sums over ranks are the lower levels of the tree, computed after every atom, for strategies with
            sharded gradients. Otherwise they are the upper levels, computed once per step.
    """

    exact: ClassVar[bool] = True

    def __init__(self, ranks: Ranks, atoms: int = 8, *, ranks_below: bool = False) -> None:
        super().__init__(ranks)
        check_atoms(atoms, ranks.world_size)
        self.atoms, self.ranks_below = atoms, ranks_below

    def of_rank(self, rank: int) -> range:
        """Returns the atoms of a rank, in its order."""
        if self.ranks_below:
            return range(rank, self.atoms, self.ranks.world_size)
        return range(rank * self.per_rank, (rank + 1) * self.per_rank)

    @property
    def per_rank(self) -> int:
        return self.atoms // self.ranks.world_size

    def rounds(self, lengths: SequenceOf[int], max_tokens: int | None) -> list[tuple[int, list[list[int]]]]:
        """Returns one round for each atom, with one micro-batch, which may be empty.

        Raises:
            ValueError: if an atom of any rank is larger than `max_tokens`; atoms are never split.
        """
        atoms = split_over_ranks(lengths, self.atoms)
        for atom in atoms if max_tokens is not None else ():
            longest = max((lengths[i] for i in atom), default=0)
            if len(atom) * longest > max_tokens:  # type: ignore[operator]
                raise ValueError(
                    f"reproducible='exact': one of the {self.atoms} atoms of a train batch of {len(lengths)} has "
                    f'{len(atom)} rows of up to {longest} tokens, {len(atom) * longest} padded ones, above '
                    f'max_tokens_per_batch={max_tokens}; raise that or atoms, or lower train_batch_size'
                )
        return [(i, [atoms[i]]) for i in self.of_rank(self.ranks.rank)]

    def ranks_of(self, lengths: SequenceOf[int]) -> list[int]:
        atoms = split_over_ranks(lengths, self.atoms)
        ranks = range(self.ranks.world_size)
        return _dealt([[at for i in self.of_rank(rank) for at in atoms[i]] for rank in ranks])

    def share(self, lengths: SequenceOf[int], max_tokens: int | None) -> list[list[int]]:
        cuts = cut_shares(lengths, self.atoms, max_tokens)
        of_ranks = [[cut for i in self.of_rank(r) for cut in cuts[i]] for r in range(self.ranks.world_size)]
        return align(of_ranks)[self.ranks.rank]

    def parts(self, count: int) -> list[list[int]]:
        """Splits this rank's equal share of a list into its atoms."""
        ends = [i * count // self.per_rank for i in range(self.per_rank + 1)]
        return [list(range(start, stop)) for start, stop in zip(ends, ends[1:], strict=False) if stop > start]

    def check_counts(self, fewest: int, most: int) -> None:
        if fewest != most:
            raise ValueError(
                f"reproducible='exact': ranks have between {fewest} and {most} samples; give each the same number, a "
                'share in the order of the ranks'
            )

    def own_range(self, count: int) -> range:
        share = -(-count // self.atoms) * self.per_rank
        return range(self.ranks.rank * share, (self.ranks.rank + 1) * share)

    def refuse(self, settings: Any, rules: Iterable[Rule]) -> None:
        check(settings, rules)

    def check_model(self, module: nn.Module) -> None:
        """Refuses compiled blocks, since their kernels depend on sizes. Also copies weights and buffers that are not
        aligned, as those read from files, since a BLAS may choose its kernel by alignment."""
        from chatgpt.nn.compiled import is_compiled

        if is_compiled(module):
            raise ValueError(
                f"reproducible='exact' promises bits, which the compiled graphs of {type(module).__name__} do not "
                'repeat under another layout: leave compile_blocks out'
            )
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.data_ptr() % _ALIGNED:
                tensor.data = tensor.data.clone()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        check_elementwise(optimizer)

    def tree(self) -> TreeSum | None:
        return TreeSum(self.per_rank)

    def begin_all_reduce(self, flat: Tensor) -> tuple[Tensor, Any]:
        return tree_all_reduce(flat), None

    def totals(self, columns: SequenceOf[SequenceOf[Tensor]]) -> list[list[float]]:
        """Gathers the numbers of all atoms, equally many on all ranks, and rounds each sum once."""
        own = torch.stack([row for rows in columns for row in rows]).to(self.ranks.device)
        gathered = own.new_zeros(self.ranks.world_size, *own.shape)
        gathered[self.ranks.rank] = own
        parts = self.ranks.all_reduce(gathered, 'sum').split([len(rows) for rows in columns], dim=1)
        return [[rounded_sum(numbers.flatten().tolist()) for numbers in part.unbind(-1)] for part in parts]


def _dealt(shares: SequenceOf[SequenceOf[int]]) -> list[int]:
    """Returns the number of the share that each item is in."""
    return [rank for _, rank in sorted((at, rank) for rank, share in enumerate(shares) for at in share)]


def check_atoms(atoms: int, world_size: int) -> None:
    """Raises ValueError for numbers of atoms and ranks without a perfect binary tree."""
    if atoms < 1 or atoms & (atoms - 1):
        raise ValueError(f'atoms={atoms} must be a power of two: 1, 2, 4, 8, ...')
    if atoms % world_size:
        raise ValueError(
            f"reproducible='exact': {atoms} atoms cannot be dealt to {world_size} processes; start "
            f'{" or ".join(str(2**k) for k in range(atoms.bit_length()))} of them, or give other atoms '
            '(another number has other last bits)'
        )


def rounded_sum(numbers: SequenceOf[float]) -> float:
    """Returns the sum, rounded once and so independent of the order; the plain sum if a number is not finite."""
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor  # a DTensor, whose class is slow to import


class TreeSum:
    """A sum of the gradients of atoms in a binary tree: neighbours, then neighbours of those.

    It keeps at most log2(atoms) partial sums. A gradient that is None counts as +0; the sum is None if all are.

    Args:
        expected: number of atoms of a step on this rank, a power of two.
    """

    def __init__(self, expected: int) -> None:
        self.expected, self.count = expected, 0
        self._waiting: list[tuple[int, list[Tensor | None]]] = []
        """(number of atoms, a sum for each parameter), larger ones first"""

    def add(self, node: list[Tensor | None]) -> None:
        """Adds the gradients of an atom; may overwrite them."""
        size = 1
        while self._waiting and self._waiting[-1][0] == size:
            size, node = 2 * size, _add_pairs(self._waiting.pop()[1], node)
        self._waiting.append((size, node))
        self.count += 1

    def finish(self) -> list[Tensor | None]:
        """Returns the sum of all atoms."""
        if self.count != self.expected:
            raise RuntimeError(
                f"reproducible='exact': a step needs the gradients of {self.expected} atoms on this rank, and has "
                f'those of {self.count}; enter strategy.accumulate(model, last=True) for each, as learn_batch does'
            )
        total = self._waiting[0][1]
        self.clear()
        return total

    def add_gradients(self, parameters: list[Tensor]) -> None:
        """Adds the parameters' gradients as those of one atom, and clears them."""
        self.add([p.grad for p in parameters])
        for parameter in parameters:
            parameter.grad = None

    def set_gradients(self, parameters: list[Tensor]) -> None:
        """Sets the parameters' gradients to the sum of all atoms."""
        for parameter, gradient in zip(parameters, self.finish(), strict=True):
            parameter.grad = gradient

    def clear(self) -> None:
        self.count = 0
        self._waiting.clear()


@torch.no_grad()
def _add_pairs(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """Returns left + right for each parameter; overwrites them."""
    total, to, more, alone = [], [], [], []
    for a, b in zip(left, right, strict=True):
        total.append(b if a is None else a)
        if a is not None and b is not None:
            to.append(local_part(a))
            more.append(local_part(b))
        elif total[-1] is not None:
            alone.append(local_part(total[-1]))
    if to:
        torch._foreach_add_(to, more)
    if alone:
        torch._foreach_add_(alone, 0.0)  # -0 + 0 is +0
    return total


def tree_reduce_scatter(flat: Tensor, group: Any = None) -> Tensor:
    """Returns this rank's part, shape (n / ranks,), of the sum over ranks of `flat`, shape (n,), added in a binary tree
    over rank indices. Sends as many bytes as a ring."""
    ranks = dist.get_world_size(group)
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    parts = list(received.view(ranks, -1))
    while len(parts) > 1:
        parts = [a.add_(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def tree_all_reduce(flat: Tensor) -> Tensor:
    """Returns the sum over ranks of `flat`, shape (n,), added as in `tree_reduce_scatter`."""
    ranks = dist.get_world_size()
    padded = nn.functional.pad(flat, (0, -flat.numel() % ranks))
    part = tree_reduce_scatter(padded)
    dist.all_gather_into_tensor(padded, part)
    return padded[: flat.numel()]


@torch.no_grad()
def exact_norm(
    gradients: Iterable[Tensor], device: torch.device, all_reduce: Callable[[Tensor, str], Tensor] | None = None
) -> float:
    """Returns the L2 norm, to about 2^-50 of the greatest element, with the same bits for any sharding.

    Squares, exact in fp64, are converted to integers in units of 2^-52 of a power of two above the greatest one, since
    sums of integers do not depend on the order.

    Args:
        gradients: the gradients of this rank, fp32 or narrower.
        all_reduce: reduction over the ranks with the other parts; None if there are none.
    """
    flat = [g.detach().reshape(-1) for g in gradients if g.numel()]
    peaks = [g.abs().max().float().to(device) for g in flat]
    peak = torch.stack(peaks).max() if peaks else torch.zeros((), device=device)
    peak = torch.where(peak.isfinite(), peak, torch.inf)  # a maximum over ranks may drop a NaN
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


def check_elementwise(optimizer: Optimizer) -> None:
    """Raises ValueError if the optimizer's step of a part of a tensor differs from its step of the whole, by a trial.

    torch's fused steps are refused on every CPU: the last elements, too few for a vector, are rounded differently.
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
