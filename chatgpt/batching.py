"""Batches of sequences: padding, micro-batches, and the split over ranks.

`collate` pads just before a model's forward and adds the indices to run without the padding. `micro_batches` splits a
global batch over ranks and into micro-batches. It is a pure function of lengths, so ranks need no communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from chatgpt.types import Batch, PackedGroup, Packing, Sequence

GROUP_RATIO = 0.75
"""a packed group's shortest sequence is at least this share of its longest"""
MIN_PREFIX = 16
"""shorter common prefixes are computed for each sequence"""
MOST_COMPUTED = 7 / 8
"""share of tokens above which computing equal prefixes once is not worth the copies for attention"""


def collate(
    sequences: SequenceOf[Sequence],
    *,
    pad_id: int = 0,
    pack: bool = True,
    columns: Mapping[str, Tensor] | None = None,
    totals: Mapping[str, float] | None = None,
    num_dummies: int = 1,
) -> Batch:
    """Pads sequences on the right into a `Batch`. `pad_id` can be any valid token: padded states are never read.

    An empty list gives a dummy batch, with which a rank without data takes part in a sharded forward: `num_dummies`
    sequences of one prompt and one response token that does not count; every column is 0. A loss that multiplies its
    terms by a mask or a weight is then 0.

    Args:
        pack: also set `Batch.packing`, if the batch has padding or sequences that begin alike.
        columns: see `Batch.columns`.
        totals: see `Batch.totals`.

    Raises:
        ValueError: an empty prompt (no state predicts the first response token) or an empty response.
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
    device = sequences[0].prompt_ids.device  # may be a GPU
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
        packing=packing_of(lengths, width, _equal_states(sequences)) if pack else None,
        columns=columns,
        totals=dict(totals or {}),
    )


def moved_together(batches: Iterable[Batch], device: torch.device) -> list[Batch]:
    """Moves batches to `device`, with one copy for all tensors in host memory: the host waits for every copy from
    memory that is not page-locked."""
    found: dict[int, Tensor] = {}
    batches = list(batches)

    def note(tensor: Tensor) -> Tensor:
        if tensor.device.type == 'cpu':
            found[id(tensor)] = tensor
        return tensor

    for batch in batches:
        batch.changed(note)
    sizes = [t.numel() * t.element_size() for t in found.values()]
    starts = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]  # aligned for any dtype
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
    """Returns per-token fields of several records as (N,) columns for `collate`."""
    return {name: torch.cat([getattr(r, name) for r in records]) if records else torch.zeros(0) for name in names}


def _equal_states(sequences: SequenceOf[Sequence]) -> tuple[Tensor, Tensor] | None:
    """Returns `computed_index` and `state_index` of a `Packing`: tokens after equal prefixes of at least
    `MIN_PREFIX` tokens are computed once. None if that leaves more than `MOST_COMPUTED` of the tokens, or for ids that
    are not in host memory."""
    if len(sequences) < 2 or sequences[0].prompt_ids.device.type != 'cpu':
        return None
    rows = [torch.cat((s.prompt_ids, s.response_ids)).numpy() for s in sequences]
    starts = [0, *itertools.accumulate(len(row) for row in rows)]
    tokens = torch.arange(starts[-1])
    same_as = tokens.clone()
    # In lexicographic order a sequence shares its longest prefix with the one before it.
    order = sorted(range(len(rows)), key=lambda i: rows[i].tobytes())
    for before, i in itertools.pairwise(order):
        shorter = min(len(rows[before]), len(rows[i]))
        differs = (rows[before][:shorter] != rows[i][:shorter]).nonzero()[0]
        common = int(differs[0]) if len(differs) else shorter
        if common >= MIN_PREFIX:
            same_as[starts[i] : starts[i] + common] = same_as[starts[before] : starts[before] + common]
    computed = (same_as == tokens).nonzero()[:, 0]
    if len(computed) > MOST_COMPUTED * len(tokens):
        return None
    return computed, torch.searchsorted(computed, same_as)


def packing_of(
    lengths: SequenceOf[int], width: int, equal_states: tuple[Tensor, Tensor] | None = None, *, always: bool = False
) -> Packing | None:
    """Returns the packing of rows with `lengths` real tokens, padded to `width`, and its `computed_index` and
    `state_index`; None if no row has padding and every token is computed, unless `always`."""
    if min(lengths) == width and equal_states is None and not always:
        return None
    computed, states = equal_states or (None, None)
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
    return Packing(
        token_index=torch.cat(rows),
        cu_seqlens=ends,
        max_length=max(lengths),
        groups=tuple(groups),
        computed_index=computed,
        state_index=states,
    )


def cut_by_tokens(lengths: SequenceOf[int], max_tokens: int | None) -> list[list[int]]:
    """Cuts items into micro-batches of at most `max_tokens` padded tokens, rows x longest row; None means no limit.

    Items are taken longest first, so a micro-batch holds similar lengths; an item longer than the limit gets a
    micro-batch of its own. Returns lists of positions in `lengths`, each item exactly once.
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
    """Splits items over ranks so that counts differ by at most one and token sums are close. Returns positions per
    rank.

    Items are assigned longest first, to the rank with the fewest items, then the fewest tokens, then the lowest number.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    tokens = [0] * world_size
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(world_size), key=lambda r: (len(shares[r]), tokens[r], r))
        shares[rank].append(i)
        tokens[rank] += lengths[i]
    return shares


def cut_shares(lengths: SequenceOf[int], shares: int, max_tokens: int | None) -> list[list[list[int]]]:
    """Splits items into shares (`split_over_ranks`) and returns the micro-batches of each, as positions in
    `lengths`."""
    return [
        [[share[j] for j in cut] for cut in cut_by_tokens([lengths[i] for i in share], max_tokens)]
        for share in split_over_ranks(lengths, shares)
    ]


def micro_batches(lengths: SequenceOf[int], world_size: int, max_tokens: int | None) -> list[list[list[int]]]:
    """Splits items that all ranks hold over the ranks; returns the micro-batches of each rank, the same number for
    all."""
    return align(cut_shares(lengths, world_size, max_tokens))


def align(cuts: list[list[list[int]]]) -> list[list[list[int]]]:
    """Adds empty micro-batches until every rank has as many as the rank with the most.

    A sharded forward is a collective: a rank with less data must still take part. `collate` turns an empty list into a
    dummy batch.
    """
    most = max((len(c) for c in cuts), default=0)
    return [c + [[] for _ in range(most - len(c))] for c in cuts]
