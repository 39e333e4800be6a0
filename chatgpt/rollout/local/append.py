"""Appends tokens to rows of a slot cache: observations of an environment, or prompts after a shared prefix.

The tokens are computed in one forward with a mask per token. Models that take an additive (n, 1, C, K) mask run all
rows together, padded on the right. Others, which derive positions or causality from a mask of slots, run one row at a
time without padding. If neither agrees with a plain forward, sequences are recomputed from their first token.
`find_append_form` tests the forms on a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from chatgpt.rollout.local.masks import MaskForm, decode_mask
from chatgpt.rollout.local.slot_cache import PROMPT_LENGTHS, SlotCache, disagreement, plain_example, prefilled_example

AppendForm = Literal['together', 'apart', 'again']

_COUNTS = (2, 1, 2)  # tokens that the check appends to each of its sequences, before it decodes one more


def append(
    actor: Any,
    cache: SlotCache,
    form: AppendForm,
    mask_form: MaskForm,
    first: int,
    stored: list[int],
    new: Sequence[list[int]],
) -> Tensor:
    """Appends the tokens `new[i]`, at least one, to the `stored[i]` tokens of cache row `first + i`. Returns the hidden
    states of the last ones, (n, D)."""
    if form == 'apart' and len(new) > 1:
        rows = zip(stored, new, strict=True)
        return torch.cat(
            [append(actor, cache, form, mask_form, first + i, [s], [ids]) for i, (s, ids) in enumerate(rows)]
        )
    device = next(actor.parameters()).device
    counts = [len(ids) for ids in new]
    longest, width = max(counts), max(s + c for s, c in zip(stored, counts, strict=True))
    input_ids = torch.tensor([ids + ids[:1] * (longest - len(ids)) for ids in new], device=device)
    start, count = torch.tensor([stored, counts], device=device)
    # padding has its row's last position, so that no position exceeds the model's limit
    positions = start[:, None] + torch.minimum(torch.arange(longest, device=device), count[:, None] - 1)
    cache.append(first, stored, counts, device)
    mask: Tensor | None
    if mask_form == 'boolean':
        mask = decode_mask(positions[:, -1], width, mask_form, torch.bool)
    else:
        seen = decode_mask(positions.flatten(), width, mask_form, cache.dtype)
        mask = seen.view(len(new), 1, longest, width)
    hidden = actor.trunk(input_ids, position_ids=positions, attention_mask=mask, cache=cache)
    return hidden[torch.arange(len(new), device=device), count - 1]


def find_append_form(actor: Any, mask_form: MaskForm) -> AppendForm:
    """Returns the cheapest form for which the states of appended tokens agree with a plain forward."""
    sequences, plain, tolerance = plain_example(actor)
    wanted = [p[[0, c, c + 1]] for p, c in zip(plain, _COUNTS, strict=True)]
    forms: tuple[AppendForm, ...] = ('together', 'apart') if mask_form == 'additive' else ('apart',)
    for form in forms:
        if not disagreement(partial(_appended_states, actor, sequences, form, mask_form), wanted, tolerance):
            return form
    return 'again'


def _appended_states(actor: Any, sequences: list[Tensor], form: AppendForm, mask_form: MaskForm) -> list[Tensor]:
    """Returns the hidden states of each sequence's last prompt token, last appended token and next decoded token."""
    cache, states = prefilled_example(actor, sequences)
    new = [s[p : p + c].tolist() for s, p, c in zip(sequences, PROMPT_LENGTHS, _COUNTS, strict=True)]
    appended = append(actor, cache, form, mask_form, 0, list(PROMPT_LENGTHS), new)
    ends = [p + c for p, c in zip(PROMPT_LENGTHS, _COUNTS, strict=True)]
    lengths = torch.tensor(ends, device=states.device)
    width = max(ends) + 1
    cache.decode(torch.arange(len(ends), device=states.device), lengths, width, same_length=False)
    token = torch.stack([s[end] for s, end in zip(sequences, ends, strict=True)])
    mask = decode_mask(lengths, width, mask_form, states.dtype)
    hidden = actor.trunk(token[:, None], position_ids=lengths[:, None], attention_mask=mask, cache=cache)
    return list(torch.stack([states, appended, hidden[:, 0]], dim=1))
