"""Several rewards as one: a weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chatgpt.rewards.calling import awaited, made, one_each

Reward = Callable[..., Sequence[float]]


@dataclass(frozen=True)
class Combined:
    """Σ weight · reward. See `combine`."""

    parts: tuple[tuple[float, Reward], ...]

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        totals = [0.0] * len(responses)
        for weight, reward in self.parts:
            scores = one_each(awaited(reward(prompts, responses, **columns)), len(responses), str(reward))
            totals = [total + weight * float(score) for total, score in zip(totals, scores, strict=True)]
        return totals


def combine(*parts: tuple[float, Reward]) -> Combined:
    """`combine((1.0, ExactAnswer()), (0.2, Format()))`.

    Raises:
        ValueError: no parts, or a part that is not a weight and a function.
    """
    if not parts:
        raise ValueError('combine needs at least one (weight, reward)')
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], (int, float)) and callable(part[1])):
            raise ValueError(f'combine takes (weight, reward) pairs, not {part!r}')
    return Combined(tuple((float(weight), made(reward)) for weight, reward in parts))
