"""From single sequences to batches: the one place where padding exists.

`collate` pads at a model's door, and says how to leave the padding out again (`packing_of`); `cut_by_tokens` makes micro-batches under a
token budget; `split_over_ranks` deals a global batch out by cost; `align` gives every rank the same number of micro-batches, filled with
zero-weight ones. All are pure functions of lengths, so every rank computes the whole assignment alone.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from chatgpt.types import Batch, PackedGroup, Packing, Sequence

GROUP_RATIO = 0.75
"""a packed group's shortest sequence is at least this share of its longest"""


def collate(sequences: SequenceOf[Sequence], *, pad_id: int = 0, pack: bool = True) -> Batch:
    """Pad sequences on the right into a `Batch`. `pad_id` can be any valid token: padded states are never read.

    With `pack`, the batch also says how to run it without its padding, where it has some.

    Raises ValueError for an empty list, an empty prompt (its first response token would have no state to be predicted
    from) or an empty response.
    """
    if not sequences:
        raise ValueError('collate: no sequences given')
    lengths = []
    for i, s in enumerate(sequences):
        if len(s.prompt_ids) == 0:
            raise ValueError(f'collate: sequence {i} has an empty prompt; give it at least a begin token')
        if len(s.response_ids) == 0:
            raise ValueError(f'collate: sequence {i} has an empty response; it needs at least one token')
        lengths.append(s.num_tokens)
    rows, width = len(sequences), max(lengths)
    input_ids = torch.full((rows, width), pad_id, dtype=torch.int64)
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
        packing=packing_of(lengths, width) if pack else None,
    )


def packing_of(lengths: SequenceOf[int], width: int) -> Packing | None:
    """How rows of `lengths` real tokens, padded to `width`, are run without padding; None where all are equally long."""
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


def cut_by_tokens(lengths: SequenceOf[int], max_tokens: int | None, *, max_sequences: int | None = None) -> list[list[int]]:
    """Cut items into micro-batches whose padded size, rows x longest row, stays within `max_tokens`.

    Items are taken longest first, so a micro-batch holds similar lengths; one item longer than the budget gets a
    micro-batch of its own. `None` means no limit. Returns lists of positions in `lengths`, each item exactly once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for i in order:
        if batches:
            current = batches[-1]
            padded = lengths[current[0]] * (len(current) + 1)
            fits_tokens = max_tokens is None or padded <= max_tokens
            fits_rows = max_sequences is None or len(current) < max_sequences
            if fits_tokens and fits_rows:
                current.append(i)
                continue
        batches.append([i])
    return batches


def split_over_ranks(lengths: SequenceOf[int], world_size: int) -> list[list[int]]:
    """Deal items to ranks so that counts differ by at most one and token sums are close. Returns positions per rank.

    Longest first, each to the rank with the fewest items, then the fewest tokens, then the lowest number.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    tokens = [0] * world_size
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(world_size), key=lambda r: (len(shares[r]), tokens[r], r))
        shares[rank].append(i)
        tokens[rank] += lengths[i]
    return shares


def align(cuts: list[list[list[int]]]) -> list[list[list[int]]]:
    """Give every rank as many micro-batches as the rank with most, by adding empty ones.

    A sharded forward is a collective: a rank with less data must still take part. An empty micro-batch is run as
    one zero-weight sequence (see `filler`).
    """
    most = max((len(c) for c in cuts), default=0)
    return [c + [[] for _ in range(most - len(c))] for c in cuts]


def filler(token_id: int = 0) -> Sequence:
    """A sequence of two tokens of which none counts."""
    one = torch.full((1,), token_id, dtype=torch.int64)
    return Sequence(prompt_ids=one, response_ids=one.clone(), response_mask=torch.zeros(1, dtype=torch.bool))


def collate_or_filler(sequences: SequenceOf[Sequence]) -> Batch:
    """A batch of the sequences; a zero-weight one when there are none."""
    return collate(sequences or [filler()])
