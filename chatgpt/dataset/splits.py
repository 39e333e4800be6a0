"""Keeping a part of the data back for validation: the same part whenever the seed and the number of examples are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar('T')


def split_examples(examples: Sequence[T], percentage: float, *, seed: int = 0) -> tuple[list[T], list[T]]:
    """Training and validation examples, each in the order given; `percentage` of them (rounded, at least one) are kept back.

    Which ones is decided by a hash of (seed, position), so no library version can change it. 0 keeps nothing back. Raises ValueError
    for a percentage outside 0 to 100, or when nothing would be left to train on.

    >>> train, validation = split_examples(list(range(10)), 20, seed=1)
    >>> len(train), len(validation), sorted(train + validation) == list(range(10))
    (8, 2, True)
    """
    if not 0 <= percentage < 100:
        raise ValueError(f'validation percentage {percentage}; give a number from 0 to below 100')
    if percentage == 0:
        return list(examples), []
    count = max(1, round(len(examples) * percentage / 100))
    if count >= len(examples):
        raise ValueError(f'{len(examples)} examples cannot be split: keeping {percentage} % back would leave none to train on')
    ranked = sorted(range(len(examples)), key=lambda i: hashlib.blake2b(f'{seed} {i}'.encode(), digest_size=16).digest())
    kept = set(ranked[:count])
    return [e for i, e in enumerate(examples) if i not in kept], [e for i, e in enumerate(examples) if i in kept]
