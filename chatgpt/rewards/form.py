"""Rewards for the form of a response: a regular expression, tags in order, length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pattern:
    """`hit` where the regular expression is found (with `whole`: matches all of the response), else `miss`.

    Raises:
        ValueError: not a regular expression.
    """

    pattern: str
    whole: bool = False
    hit: float = 1.0
    miss: float = 0.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f'{self.pattern!r} is not a regular expression: {error}') from None

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        compiled = re.compile(self.pattern, re.DOTALL)
        find = compiled.fullmatch if self.whole else compiled.search
        return [self.hit if find(r) else self.miss for r in responses]


@dataclass(frozen=True)
class Format:
    """Share of sections that stand in the response as <tag>...</tag>, each once, not empty, and in this order.

    `Format(('think', 'answer'))` is DeepSeek-R1's format reward (Guo et al. 2025); with `only` nothing may stand
    outside of them.
    """

    tags: tuple[str, ...] = ('think', 'answer')
    only: bool = False

    def __post_init__(self) -> None:
        if not self.tags:
            raise ValueError('Format needs at least one tag')

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        return [self._score(r) for r in responses]

    def _score(self, response: str) -> float:
        good, position, outside = 0, 0, response
        for tag in self.tags:
            found = re.search(rf'<{re.escape(tag)}>(.*?)</{re.escape(tag)}>', response[position:], re.DOTALL)
            if (
                found is None
                or not found[1].strip()
                or response.count(f'<{tag}>') != 1
                or response.count(f'</{tag}>') != 1
            ):
                continue
            good += 1
            position += found.end()
            outside = outside.replace(found[0], '')
        if self.only and outside.strip():
            return 0.0
        return good / len(self.tags)


@dataclass(frozen=True)
class Length:
    """1 at `target` words and less by the relative distance to it, at least 0; characters with `unit='characters'`."""

    target: int
    unit: str = 'words'

    def __post_init__(self) -> None:
        if self.target < 1:
            raise ValueError(f'target={self.target} must be at least 1')
        if self.unit not in ('words', 'characters'):
            raise ValueError(f"unit={self.unit!r} must be 'words' or 'characters'")

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        sizes = [len(r.split()) if self.unit == 'words' else len(r) for r in responses]
        return [max(0.0, 1.0 - abs(size - self.target) / self.target) for size in sizes]
