"""What several tests of models need: drawn sequences, a comparison, and the two ways to load a folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chatgpt.nn import initial_tensors
from chatgpt.types import Sequence


def sequences(lengths: Any = ((1, 1), (3, 2), (2, 7)), seed: int = 0, high: int = 60) -> list[Sequence]:
    """Of (prompt, response) lengths, ids drawn from [4, high); every token of a response counts."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        return torch.randint(4, high, (n,), generator=generator)

    return [
        Sequence(prompt_ids=draw(p), response_ids=draw(a), response_mask=torch.ones(a, dtype=torch.bool))
        for p, a in lengths
    ]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance)


def at_once(load: Any, folder: Any) -> dict[str, Tensor]:
    module = load(folder)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def on_meta(load: Any, folder: Any) -> dict[str, Tensor]:
    with torch.device('meta'):
        module = load(folder)
    return dict(initial_tensors(module))


WAYS = pytest.mark.parametrize('load', [at_once, on_meta])
