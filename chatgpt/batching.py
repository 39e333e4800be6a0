"""From single sequences to batches: the one place where padding exists.

`collate` pads just before a model's forward, and says how to leave the padding out again. `micro_batches` splits a
global batch over ranks and cuts it, a pure function of lengths, so every rank computes the whole assignment alone;
`Exact` cuts by a rule that knows nothing of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chatgpt.types import Batch, PackedGroup, Packing, Sequence

GROUP_RATIO = 0.75
"""a packed group's shortest sequence is at least this share of its longest"""


def collate(
    sequences: SequenceOf[Sequence],
    *,
    pad_id: int = 0,
    pack: bool = True,
    columns: Mapping[str, Tensor] | None = None,
    totals: Mapping[str, float] | None = None,
    num_dummies: int = 1,
) -> Batch:
    """Pad sequences on the right into a `Batch`. `pad_id` can be any valid token: padded states are never read.

    An empty list gives a dummy batch, with which a rank without data takes part in a sharded forward: `num_dummies`
    sequences of a prompt and a response token, of which none counts, and every column is 0. So a loss whose terms carry
    a mask or a weight is 0 there.

    Args:
        pack: also say how to run the batch without its padding, where it has some.
        columns: what a loss needs beside the tokens; see `Batch.columns`.
        totals: what a loss divides by; see `Batch.totals`.

    Raises:
        ValueError: an empty prompt (its first response token would have no state to be predicted from) or an empty
            response.
    """
    columns = dict(columns or {})
    sequence_mask = torch.ones(len(sequences), dtype=torch.bool)
    if not sequences:
        one = torch.zeros(1, dtype=torch.int64)
        sequences = [Sequence(prompt_ids=one, response_ids=one, response_mask=one.bool())] * num_dummies
        sequence_mask = torch.zeros(num_dummies, dtype=torch.bool)
        columns = {name: column.new_zeros(num_dummies) for name, column in columns.items()}
    for i, s in enumerate(sequences):
        if not len(s.prompt_ids) or not len(s.response_ids):
            what = 'response; it needs at least one token' if len(s.prompt_ids) else 'prompt; give it a begin token'
            raise ValueError(f'collate: sequence {i} has an empty {what}')
    lengths = [s.num_tokens for s in sequences]
    rows, width = len(sequences), max(lengths)
    device = sequences[0].prompt_ids.device  # where they wait, which may be a GPU
    input_ids = torch.full((rows, width), pad_id, dtype=torch.int64, device=device)
    attention_mask = torch.zeros(rows, width, dtype=torch.bool)
    action_index, action_rows = [], []
    for i, s in enumerate(sequences):
        prompt_len, length = len(s.prompt_ids), lengths[i]
        input_ids[i, :prompt_len] = s.prompt_ids
        input_ids[i, prompt_len:length] = s.response_ids
        attention_mask[i, :length] = True
        action_index.append(torch.arange(i * width + prompt_len - 1, i * width + length - 1))
        action_rows.append(torch.full((length - prompt_len,), i, dtype=torch.int64))
    return Batch(
        input_ids=input_ids,
        position_ids=torch.arange(width).expand(rows, width).contiguous(),
        attention_mask=attention_mask,
        action_index=torch.cat(action_index),
        action_ids=torch.cat([s.response_ids for s in sequences]),
        action_mask=torch.cat([s.response_mask for s in sequences]),
        action_rows=torch.cat(action_rows),
        last_index=torch.tensor([i * width + n - 1 for i, n in enumerate(lengths)]),
        sequence_mask=sequence_mask,
        packing=packing_of(lengths, width) if pack else None,
        columns=columns,
        totals=dict(totals or {}),
    )


def moved_together(batches: Iterable[Batch], device: torch.device) -> list[Batch]:
    """Batches on `device` by one copy of all their tensors that are in host memory: of memory that is not page-locked
    the host waits for each."""
    found: dict[int, Tensor] = {}
    batches = list(batches)

    def note(tensor: Tensor) -> Tensor:
        if tensor.device.type == 'cpu':
            found[id(tensor)] = tensor
        return tensor

    for batch in batches:
        batch.changed(note)
    sizes = [t.numel() * t.element_size() for t in found.values()]
    starts = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]  # each where any dtype may begin
    host = torch.empty(starts[-1], dtype=torch.uint8)
    for tensor, start, size in zip(found.values(), starts, sizes, strict=False):
        host[start : start + size].view(tensor.dtype).copy_(tensor.reshape(-1))
    whole = host.to(device)
    places = dict(zip(found, zip(starts, sizes, strict=False), strict=True))

    def arrived(tensor: Tensor) -> Tensor:
        if id(tensor) not in places:
            return tensor.to(device)
        start, size = places[id(tensor)]
        return whole[start : start + size].view(tensor.dtype).view(tensor.shape)

    return [batch.changed(arrived) for batch in batches]


def token_columns(records: SequenceOf[Any], names: Iterable[str]) -> dict[str, Tensor]:
    """Per-token fields of several records as (N,) columns for `collate`."""
    return {name: torch.cat([getattr(r, name) for r in records]) if records else torch.zeros(0) for name in names}


def packing_of(lengths: SequenceOf[int], width: int) -> Packing | None:
    """How rows of `lengths` real tokens, padded to `width`, are run without padding; None where all are equally
    long."""
    if min(lengths) == width:
        return None
    rows = [torch.arange(i * width, i * width + n) for i, n in enumerate(lengths)]
    groups: list[PackedGroup] = []
    first, start = 0, 0
    for i in range(1, len(lengths) + 1):
        run = lengths[first:i]
        if i < len(lengths) and min(*run, lengths[i]) >= GROUP_RATIO * max(*run, lengths[i]):
            continue
        longest = max(run)
        index = None
        if min(run) < longest:
            index = torch.cat([torch.arange(j * longest, j * longest + n) for j, n in enumerate(run)])
        groups.append(PackedGroup(start=start, stop=start + sum(run), rows=len(run), width=longest, index=index))
        first, start = i, start + sum(run)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return Packing(token_index=torch.cat(rows), cu_seqlens=ends, max_length=max(lengths), groups=tuple(groups))


def cut_by_tokens(lengths: SequenceOf[int], max_tokens: int | None) -> list[list[int]]:
    """Cut items into micro-batches whose padded size, rows x longest row, stays within `max_tokens`.

    Items are taken longest first, so a micro-batch holds similar lengths; one item longer than the budget gets a
    micro-batch of its own. `None` means no limit. Returns lists of positions in `lengths`, each item exactly once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for i in order:
        if batches:
            current = batches[-1]
            if max_tokens is None or lengths[current[0]] * (len(current) + 1) <= max_tokens:
                current.append(i)
                continue
        batches.append([i])
    return batches


def split_over_ranks(lengths: SequenceOf[int], world_size: int) -> list[list[int]]:
    """Split items over ranks so that counts differ by at most one and token sums are close. Returns positions per rank.

    Longest first, each to the rank with the fewest items, then the fewest tokens, then the lowest number.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    tokens = [0] * world_size
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(world_size), key=lambda r: (len(shares[r]), tokens[r], r))
        shares[rank].append(i)
        tokens[rank] += lengths[i]
    return shares


def micro_batches(
    lengths: SequenceOf[int], world_size: int, max_tokens: int | None, exact: Exact | None = None
) -> list[list[list[int]]]:
    """A list that all ranks hold, split over them and cut: for each rank its micro-batches, equally many, as positions
    in `lengths`."""
    shares = split_over_ranks(lengths, world_size if exact is None else exact.atoms)
    cuts = [
        [[share[j] for j in cut] for cut in cut_by_tokens([lengths[i] for i in share], max_tokens)] for share in shares
    ]
    if exact is not None:
        cuts = [[cut for i in exact.of_rank(rank, world_size) for cut in cuts[i]] for rank in range(world_size)]
    most = max(map(len, cuts))  # a sharded forward is a collective: a rank with less data takes part with dummies
    return [c + [[] for _ in range(most - len(c))] for c in cuts]


@dataclass(frozen=True)
class Exact:
    """A run that is the same to the bit on any number of ranks: what it is cut into, and who computes which part.

    A global batch is cut into `atoms`, micro-batches that follow from the batch alone, so that a forward sees the same
    tensors in every layout. Sums over atoms follow one perfect binary tree: ((1 + 2) + (3 + 4)) + ((5 + 6) + (7 + 8)).
    """

    atoms: int = 8
    """a power of two; the most ranks there can be"""
    ranks_below: bool = False
    """The ranks' sums are the lower levels of the tree: they are added after every atom, which a strategy wants that
    keeps gradients in shards. Otherwise they are the upper ones, added once."""

    def check(self, world_size: int) -> None:
        """Raises ValueError for a number of atoms or of ranks that makes no such tree."""
        if self.atoms < 1 or self.atoms & (self.atoms - 1):
            raise ValueError(f'atoms={self.atoms} must be a power of two: 1, 2, 4, 8, ...')
        if self.atoms % world_size:
            raise ValueError(
                f"reproducible='exact': {self.atoms} atoms cannot be dealt to {world_size} processes; start "
                f'{" or ".join(str(2**k) for k in range(self.atoms.bit_length()))} of them, or give other atoms '
                '(another number has other last bits)'
            )

    def of_rank(self, rank: int, world_size: int) -> range:
        """The atoms that a rank computes, in its order."""
        if self.ranks_below:
            return range(rank, self.atoms, world_size)
        share = self.atoms // world_size
        return range(rank * share, (rank + 1) * share)

    def share(
        self, lengths: SequenceOf[int], rank: int, world_size: int, max_tokens: int | None = None
    ) -> list[list[int]]:
        """A rank's atoms of a list that all ranks hold, as positions; empty ones where the list is short.

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
        return [atoms[i] for i in self.of_rank(rank, world_size)]

    def own(self, count: int, world_size: int) -> list[list[int]]:
        """Atoms of `count` items that are a rank's alone: its even share of a list in the order of the ranks."""
        share = self.atoms // world_size
        ends = [i * count // share for i in range(share + 1)]
        return [list(range(start, stop)) for start, stop in zip(ends, ends[1:], strict=False) if stop > start]
