"""A sample as an engine returns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from chatgpt.types import Sample


def sample(
    index: int = 0,
    response: Sequence[int] = (5, 6),
    *,
    prompt: Sequence[int] = (1, 2),
    mask: Sequence[bool] | None = None,
    ended: bool = True,
    **texts: Any,
) -> Sample:
    n = len(response)
    return Sample(
        index=index,
        group=index // 2,
        prompt_ids=torch.tensor(prompt),
        response_ids=torch.tensor(response),
        response_mask=torch.tensor(mask or [True] * n),
        logprobs=torch.full((n,), -1.0),
        filtered_logprobs=torch.zeros(n),
        edge_distances=torch.ones(n),
        finish_reason='eos' if ended else 'length',
        **texts,
    )
