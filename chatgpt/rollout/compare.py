"""Compares two sets of samples that should be equal: which differ, at which position, and whether rounding explains it.

Floating-point sums depend on batch shape and device, so two runs may disagree on a token if its uniform number lies
next to an edge of the cumulative distribution. From there on the two sequences differ, so the comparison of that sample
ends there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chatgpt.types import Sample


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first position at which two samples of the same index differ.

    >>> difference = Difference(index=3, position=7, tokens=(11, 12), edge_distance=2e-7, explained=True)
    """

    index: int
    position: int
    """response position, from 0"""
    tokens: tuple[int | None, int | None]
    """None for a sample that ended before this position"""
    edge_distance: float
    """the smaller of the two recorded edge distances at this position"""
    explained: bool
    """True if the edge distance is within the tolerance"""

    def __str__(self) -> str:
        why = 'explained by' if self.explained else 'not explained by'
        where = f'sample {self.index}, position {self.position}'
        return f'{where}: {self.tokens[0]} or {self.tokens[1]}, {why} edge distance {self.edge_distance:.1e}'


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `compare_samples`."""

    num_samples: int
    num_tokens: int
    """number of equal tokens before the first differences"""
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """True if all samples have the same tokens."""
        return not self.differences

    @property
    def explained(self) -> bool:
        """True if all differences are within the tolerance of an edge, or there are none."""
        return all(d.explained for d in self.differences)

    def __str__(self) -> str:
        head = f'{self.num_samples} samples, {self.num_tokens} equal tokens, {len(self.differences)} differences'
        return '\n'.join([head, *map(str, self.differences)])


def _first_difference(a: Sample, b: Sample, tolerance: float) -> tuple[int, Difference | None]:
    ids_a, ids_b = a.response_ids.tolist(), b.response_ids.tolist()
    common = min(len(ids_a), len(ids_b))
    position = next((t for t in range(common) if ids_a[t] != ids_b[t]), common)
    if position == len(ids_a) == len(ids_b):
        return position, None
    # rounding cannot explain a difference in length alone, such as from other limits or end tokens
    both = position < common
    edge = min(float(a.edge_distances[position]), float(b.edge_distances[position])) if both else 1.0
    token_a = ids_a[position] if position < len(ids_a) else None
    token_b = ids_b[position] if position < len(ids_b) else None
    return position, Difference(
        index=a.index,
        position=position,
        tokens=(token_a, token_b),
        edge_distance=edge,
        explained=both and edge <= tolerance,
    )


def compare_samples(a: Iterable[Sample], b: Iterable[Sample], tolerance: float = 1e-5) -> Comparison:
    """Compares samples by index, in any order. Raises ValueError if indices or prompts differ."""
    left, right = {s.index: s for s in a}, {s.index: s for s in b}
    if left.keys() != right.keys():
        odd = sorted(left.keys() ^ right.keys())
        raise ValueError(f'compare_samples: sample indices {odd[:5]} are on one side only; compare the same samples')
    differences, num_tokens = [], 0
    for index in sorted(left):
        if left[index].prompt_ids.tolist() != right[index].prompt_ids.tolist():
            raise ValueError(f'compare_samples: sample {index} has two different prompts; compare the same samples')
        equal, difference = _first_difference(left[index], right[index], tolerance)
        num_tokens += equal
        if difference is not None:
            differences.append(difference)
    return Comparison(num_samples=len(left), num_tokens=num_tokens, differences=tuple(differences))
