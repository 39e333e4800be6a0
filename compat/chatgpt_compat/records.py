"""Records of this library that several systems' samples become."""

from __future__ import annotations

import torch
from torch import Tensor

from chatgpt.types import Sequence


def all_but_first(ids: Tensor, mask: Tensor | None = None) -> Sequence:
    """Returns the record of a text (S,) in which tokens with a mask (S,) bool of True are learned, without a mask all;
    the first never is."""
    mask = torch.ones(len(ids), dtype=torch.bool) if mask is None else mask
    return Sequence(prompt_ids=ids[:1], response_ids=ids[1:], response_mask=mask[1:].clone())
