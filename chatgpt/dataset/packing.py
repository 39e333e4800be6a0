"""Packing: many short documents into blocks of one length, so that no part of a batch is padding."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from chatgpt.types import Sequence


def pack(documents: Iterable[Sequence], block_length: int) -> list[Sequence]:
    """Documents one after the other, cut into blocks of `block_length` tokens; only the last block may be shorter.

    Each document should end with the end token (as `tokenize_demonstration` leaves it), the only thing that tells the model where
    a new one begins: attention is *not* stopped at the border, so a document sees those before it in its block, as in the
    pretraining of most language models. Neighbouring blocks share one token, the first of a block being the last of the one
    before: there it is the state and not a target, so every token but the very first is a target exactly once.

    A block's mask holds what the documents' masks say (prompts are False); a block in which nothing counts is left out.
    Documents are taken in the order given; shuffle before. Raises ValueError for a block_length under 2 or no documents.
    """
    if block_length < 2:
        raise ValueError(f'block_length={block_length}; give at least 2, the state and one token to predict')
    ids, mask = [], []
    for document in documents:
        ids += [document.prompt_ids, document.response_ids]
        mask += [torch.zeros(len(document.prompt_ids), dtype=torch.bool), document.response_mask]
    if not ids:
        raise ValueError('pack: no documents given')
    all_ids, all_mask = torch.cat(ids), torch.cat(mask)
    blocks = []
    for start in range(0, len(all_ids) - 1, block_length - 1):
        block, counts = all_ids[start : start + block_length], all_mask[start + 1 : start + block_length]
        if counts.any():
            blocks.append(Sequence(prompt_ids=block[:1].clone(), response_ids=block[1:].clone(), response_mask=counts.clone()))
    return blocks
