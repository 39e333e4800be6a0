"""Orders and seeds as functions of counters, so that a resume needs counters and no generator's state; and what batches
the items of a pass make."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def seed_for(*key: int) -> int:
    """A 63-bit seed from a tuple of integers, such as (seed, phase, epoch); near keys give unrelated seeds
    (splitmix64)."""
    word = 0xFFFFFFFFFFFFFFFF
    state = 0x9E3779B97F4A7C15
    for part in key:
        state = ((state ^ (part & word)) + 0x9E3779B97F4A7C15) & word
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & word
        state ^= state >> 31
    return state >> 1


def generator_for(*key: int) -> torch.Generator:
    """A CPU generator seeded by `seed_for(*key)`."""
    return torch.Generator().manual_seed(seed_for(*key))


def permutation(num_items: int, *key: int) -> list[int]:
    """A permutation that is a function of `key`, the same on every rank and device."""
    return torch.randperm(num_items, generator=generator_for(*key)).tolist()


def train_batches(num_items: int, batch_size: int, *, key: tuple[int, ...]) -> Iterator[list[int]]:
    """Positions of each global train batch of one epoch; the last may be short. The order is a function of `key`
    alone."""
    order = permutation(num_items, *key)
    for start in range(0, num_items, batch_size):
        yield order[start : start + batch_size]


MANY_STEPS = 50
"""of one pass, among which a short one matters little"""


def uneven_steps(count: int, what: str, batch_size: int) -> str | None:
    """The warning about passes over `count` items where no batch is ever full, or where the last step of a pass learns
    from a quarter of a batch or less: it weighs as much as a whole one's."""
    rest = count % batch_size
    if count < batch_size:
        return (
            f'train_batch_size={batch_size} is more than the {count} {what}: no batch is ever full, and each pass is '
            f'one step on all {count}'
        )
    if count > MANY_STEPS * batch_size or not 0 < rest <= batch_size / 4:
        return None
    return (
        f'{count} {what} in batches of train_batch_size={batch_size}: the last step of each pass learns from {rest} '
        f'alone, and counts as much as one of {batch_size}'
    )
