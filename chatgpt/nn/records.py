"""Records that stay on their rank.

    samples of a rank ── score ──▶ its records ──┬─ outlines to all ranks ──▶ the list of the phase, the same everywhere
                                                 └─ tensors, when a train batch gives them to another rank (`moved`)

Every rank has the records of all ranks in one order. The tensors of a record are on `record.rank` alone. On other ranks
its *outline* has them on the meta device, with lengths and dtypes but no numbers, so that reading one is an error. The
mask, scores, groups and episodes are on every rank, and texts and columns of data only with the tensors. What spans
sequences is computed from `numbers` of each, in the order of the list, so it does not depend on where records are.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from chatgpt.nn.sweep import Communicator, gathered
from chatgpt.types import Experience, Sample, with_tensors

R = TypeVar('R')


def is_here(record: Any) -> bool:
    """Returns True if this rank has the record's tensors."""
    return not record.response_ids.is_meta


def lengths_only(sample: Sample) -> Any:
    """Returns a copy of a sample with tensors on the meta device, and the mask only where a token does not count."""
    made: dict[tuple[int, torch.dtype], Tensor] = {}

    def empty(tensor: Tensor) -> Tensor:
        key = len(tensor), tensor.dtype
        if key not in made:  # fields share it, in memory and when it is sent
            made[key] = torch.empty(len(tensor), dtype=tensor.dtype, device='meta')
        return made[key]

    mask = sample.response_mask
    return replace(
        with_tensors(sample, empty), response_mask=mask.new_ones(1).expand(len(mask)) if bool(mask.all()) else mask
    )


def of_all_ranks(strategy: Communicator, own: list[Experience]) -> list[Experience]:
    """Returns the records of all ranks, ordered by sample index: this rank's `own`, and outlines of the others. A
    collective."""
    own = strategy.from_leader(own)
    for record in own:
        record.rank = strategy.rank
    if strategy.world_size == 1:
        return sorted(own, key=lambda e: e.index)
    outlines = [replace(lengths_only(e), prompt_text='', response_text='', last_turn='', columns={}) for e in own]
    by_index = {record.index: record for record in own}
    return [by_index.get(e.index, e) for e in gathered(strategy, outlines, lambda e: e.index)]


def numbers(
    records: SequenceOf[R], row: Callable[[R], Tensor], width: int, strategy: Communicator | None = None
) -> Tensor:
    """Returns `row(record)`, (width,), of all records on every rank, (M, width) fp64 on the CPU. A collective; without
    a strategy this rank has all records."""
    table = torch.zeros(len(records), width, dtype=torch.float64)
    at = [i for i, record in enumerate(records) if is_here(record)]
    if at:
        table[at] = torch.stack([row(records[i]).double() for i in at]).cpu()
    return table if strategy is None or strategy.world_size == 1 else strategy.all_reduce(table, 'sum')


def moved(strategy: Communicator, records: SequenceOf[Any], ranks: SequenceOf[int]) -> list[Any]:
    """Returns the records, with the tensors of those for which `ranks` names this rank. Tensors are sent once, from the
    rank that holds them. A collective."""
    if strategy.world_size == 1:
        return list(records)
    sent: list[list[Tensor]] = [[] for _ in range(strategy.world_size)]
    for record, rank in zip(records, ranks, strict=True):
        if rank != record.rank == strategy.rank:
            sent[rank] += [_bytes(tensor) for tensor in _tensors(record).values()]
    device = records[0].response_mask.device if records else 'cpu'
    nothing = torch.zeros(0, dtype=torch.uint8, device=device)
    received = [(flat, 0) for flat in strategy.exchange([torch.cat([nothing, *parts]) for parts in sent])]
    found = list(records)
    for i, (record, rank) in enumerate(zip(records, ranks, strict=True)):
        if not rank == strategy.rank != record.rank:
            continue
        flat, start = received[record.rank]
        tensors = {}
        for name, empty in _tensors(record).items():
            stop = start + len(empty) * empty.element_size()
            tensors[name], start = flat[start:stop].clone().view(empty.dtype), stop
        received[record.rank] = flat, start
        found[i] = replace(record, **tensors)
    if any(start != len(flat) for flat, start in received):
        raise RuntimeError('a rank has sent records of other lengths or dtypes than their outlines say')
    return found


def _tensors(record: Any) -> dict[str, Tensor]:
    """Returns the tensors that only the holder of a record has."""
    named = {f.name: getattr(record, f.name) for f in fields(record) if f.name != 'response_mask'}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().as_strided((len(tensor),), (1,))  # one element may have any stride
    return flat.view(torch.uint8)


def fetched(strategy: Communicator, records: SequenceOf[R]) -> list[R]:
    """Returns the records whole, with texts, on every rank. For few of them, since they are pickled. A collective."""
    if strategy.world_size == 1:
        return list(records)
    mine = {i: record for i, record in enumerate(records) if record.rank == strategy.rank}  # type: ignore[attr-defined]
    found = {i: record for part in strategy.all_gather_object(mine) for i, record in part.items()}
    return [record if is_here(record) else found[i] for i, record in enumerate(records)]
