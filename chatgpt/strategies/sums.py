"""How a run's batches are cut over ranks and its numbers are added up: `Sums`, in the order that the layout gives, and
`ExactSums`, `reproducible='exact'`, in one order for all layouts.

A strategy owns one of them (`Strategy.sums`) and whoever cuts a batch or adds numbers up asks it. Below are the sums of
gradients in one order, a norm in which no sharding shows, and the test for optimizers whose step is elementwise.
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
"""elements whose squares are added at a time: they stay in a CPU's cache, and their sum in 53 bits"""
_BITS = 26
"""of each of the two integers that a square becomes"""
_ALIGNED = 64
"""bytes, of torch's memory on a CPU"""


class Sums:
    """The order that the layout gives. Positions are those of an item's length in `lengths`."""

    exact: ClassVar[bool] = False
    """the same bits in every layout"""
    deals: ClassVar[bool] = False
    """samples are dealt out anew before models score them: who generated them may not show"""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def rounds(self, lengths: SequenceOf[int], max_tokens: int | None) -> list[tuple[int, list[list[int]]]]:
        """This rank's micro-batches, as positions, of a train batch that all ranks hold; as many as on any other.

        Those of a round are accumulated before those of the next one. With each round comes a number that no other
        round of any rank has: what is drawn at random in it follows from that.
        """
        return [(self.ranks.rank, self.share(lengths, max_tokens))]

    def share(self, lengths: SequenceOf[int], max_tokens: int | None) -> list[list[int]]:
        """This rank's micro-batches of a list that all ranks hold and nobody learns from; as many as on any other."""
        return micro_batches(lengths, self.ranks.world_size, max_tokens)[self.ranks.rank]

    def own(self, lengths: SequenceOf[int], max_tokens: int | None) -> list[list[int]]:
        """Micro-batches of a list that is this rank's alone."""
        return [
            [part[j] for j in cut]
            for part in self.parts(len(lengths))
            for cut in cut_by_tokens([lengths[i] for i in part], max_tokens)
        ]

    def parts(self, count: int) -> list[list[int]]:
        """`count` items that are this rank's alone, in the parts that may be computed together."""
        return [list(range(count))] if count else []

    def check_counts(self, fewest: int, most: int) -> None:
        """Raises ValueError where ranks may not have different numbers of items of their own."""

    def dealt(self, count: int) -> range:
        """Of `count` samples of all ranks in order, those that this rank scores, past the last one to fill its
        parts."""
        raise NotImplementedError

    def refuse(self, settings: Any, rules: Iterable[Rule]) -> None:
        """Raises ValueError for settings that break rules of exact runs."""

    def check_model(self, module: nn.Module) -> None:
        """Raises ValueError for a model whose numbers depend on the layout; called before `prepare` moves it."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ValueError for an optimizer whose step depends on the layout."""

    def tree(self) -> TreeSum | None:
        """Where a pair's gradients wait between rounds; None: there is one round."""
        return None

    def all_reduced(self, flat: Tensor) -> Tensor:
        """The sum over ranks of gradients (n,); their memory is used."""
        dist.all_reduce(flat)
        return flat

    def totals(self, columns: SequenceOf[SequenceOf[Tensor]]) -> list[list[float]]:
        """Each column's sum over its micro-batches and over ranks. A column has a (k,) tensor per micro-batch."""
        own = torch.stack([sum(rows[1:], rows[0]) for rows in columns])
        return self.ranks.all_reduce(own.to(self.ranks.device), 'sum').tolist()


class ExactSums(Sums):
    """The same on any number of ranks, to the bit.

    A global batch is cut into `atoms`, micro-batches that follow from the batch alone, so that a forward sees the same
    tensors in every layout. Sums over atoms follow one perfect binary tree: ((1 + 2) + (3 + 4)) + ((5 + 6) + (7 + 8)).

    Args:
        atoms: a power of two; the most ranks there can be.
        ranks_below: the ranks' sums are the lower levels of the tree: they are added after every atom, which a strategy
            wants that keeps gradients in shards. Otherwise they are the upper ones, added once.
    """

    exact: ClassVar[bool] = True
    deals: ClassVar[bool] = True

    def __init__(self, ranks: Ranks, atoms: int = 8, *, ranks_below: bool = False) -> None:
        super().__init__(ranks)
        check_atoms(atoms, ranks.world_size)
        self.atoms, self.ranks_below = atoms, ranks_below

    def of_rank(self, rank: int) -> range:
        """The atoms that a rank computes, in its order."""
        if self.ranks_below:
            return range(rank, self.atoms, self.ranks.world_size)
        return range(rank * self.per_rank, (rank + 1) * self.per_rank)

    @property
    def per_rank(self) -> int:
        return self.atoms // self.ranks.world_size

    def rounds(self, lengths: SequenceOf[int], max_tokens: int | None) -> list[tuple[int, list[list[int]]]]:
        """An atom is a round of one micro-batch, empty where the list is short.

        Raises:
            ValueError: an atom, of any rank, is larger than `max_tokens`; it is never split.
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

    def share(self, lengths: SequenceOf[int], max_tokens: int | None) -> list[list[int]]:
        cuts = cut_shares(lengths, self.atoms, max_tokens)
        of_ranks = [[cut for i in self.of_rank(r) for cut in cuts[i]] for r in range(self.ranks.world_size)]
        return align(of_ranks)[self.ranks.rank]

    def parts(self, count: int) -> list[list[int]]:
        """Its even share of a list in the order of the ranks, in atoms."""
        ends = [i * count // self.per_rank for i in range(self.per_rank + 1)]
        return [list(range(start, stop)) for start, stop in zip(ends, ends[1:], strict=False) if stop > start]

    def check_counts(self, fewest: int, most: int) -> None:
        if fewest != most:
            raise ValueError(
                f"reproducible='exact': ranks have between {fewest} and {most} samples; give each the same number, a "
                'share in the order of the ranks'
            )

    def dealt(self, count: int) -> range:
        share = -(-count // self.atoms) * self.per_rank
        return range(self.ranks.rank * share, (self.ranks.rank + 1) * share)

    def refuse(self, settings: Any, rules: Iterable[Rule]) -> None:
        check(settings, rules)

    def check_model(self, module: nn.Module) -> None:
        """Also lets every weight and buffer begin where an allocation would: gathered ones do, those read from files do
        not, and a BLAS may choose its kernel by that. Compiled blocks are refused, whose kernels follow from sizes."""
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

    def all_reduced(self, flat: Tensor) -> Tensor:
        return tree_all_reduce(flat)

    def totals(self, columns: SequenceOf[SequenceOf[Tensor]]) -> list[list[float]]:
        """Every rank has as many atoms: their numbers are laid side by side, and the sum of all is rounded once."""
        own = torch.stack([row for rows in columns for row in rows]).to(self.ranks.device)
        everyone = own.new_zeros(self.ranks.world_size, *own.shape)
        everyone[self.ranks.rank] = own
        parts = self.ranks.all_reduce(everyone, 'sum').split([len(rows) for rows in columns], dim=1)
        return [[rounded_sum(numbers.flatten().tolist()) for numbers in part.unbind(-1)] for part in parts]


def check_atoms(atoms: int, world_size: int) -> None:
    """Raises ValueError for a number of atoms or of ranks that makes no perfect binary tree."""
    if atoms < 1 or atoms & (atoms - 1):
        raise ValueError(f'atoms={atoms} must be a power of two: 1, 2, 4, 8, ...')
    if atoms % world_size:
        raise ValueError(
            f"reproducible='exact': {atoms} atoms cannot be dealt to {world_size} processes; start "
            f'{" or ".join(str(2**k) for k in range(atoms.bit_length()))} of them, or give other atoms '
            '(another number has other last bits)'
        )


def rounded_sum(numbers: SequenceOf[float]) -> float:
    """The sum, rounded once, so that no order shows; of numbers that are not finite, whatever they add up to."""
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor  # a DTensor, whose class is slow to import


class TreeSum:
    """Adds the gradients of one atom after the other up in a binary tree: neighbours, then neighbours of those.

    At most log2(atoms) sums wait beside the gradient that a backward makes. A parameter without a gradient counts as
    +0; one that never had any keeps none.

    Args:
        expected: atoms of a step on this rank, a power of two.
    """

    def __init__(self, expected: int) -> None:
        self.expected, self.count = expected, 0
        self._waiting: list[tuple[int, list[Tensor | None]]] = []
        """(atoms in it, a sum for each parameter), larger ones first"""

    def add(self, node: list[Tensor | None]) -> None:
        """Gradients of one atom; their memory is used."""
        size = 1
        while self._waiting and self._waiting[-1][0] == size:
            size, node = 2 * size, _added(self._waiting.pop()[1], node)
        self._waiting.append((size, node))
        self.count += 1

    def finish(self) -> list[Tensor | None]:
        """The sum of all atoms."""
        if self.count != self.expected:
            raise RuntimeError(
                f"reproducible='exact': a step needs the gradients of {self.expected} atoms on this rank, and has "
                f'those of {self.count}; enter strategy.accumulate(model, last=True) for each, as learn_batch does'
            )
        total = self._waiting[0][1]
        self.clear()
        return total

    def take(self, parameters: list[Tensor]) -> None:
        """Add the parameters' gradients as those of one atom, and clear them."""
        self.add([p.grad for p in parameters])
        for parameter in parameters:
            parameter.grad = None

    def give(self, parameters: list[Tensor]) -> None:
        """Set the parameters' gradients to the sum of all atoms."""
        for parameter, gradient in zip(parameters, self.finish(), strict=True):
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
