"""Finds the first difference between two runs, in metrics and recorded sequences.

Numbers are compared bit by bit: JSON and parquet keep all bits of a float. `perf/` metrics are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from chatgpt.monitor.run_folder.reading import RunFolder

MEASURED = 'perf/'
TOKENS = ('prompt_ids', 'token_ids', 'mask')
"""columns that are compared first, since the others follow from them"""
MISSING = 'nothing'
START_STATE = ('callbacks', 'journal', 'journal_from', 'in_flight_from')
"""parts of a checkpoint's state that depend on how a run was started and stopped, and change no number of it"""


class Difference(NamedTuple):
    """The first difference of a kind between two runs."""

    phase: int
    kind: str
    """'rollouts', 'metrics', 'weights' or 'state', in the order in which a phase writes them"""
    where: str
    values: tuple[Any, Any]
    more: str = ''
    """number of further differences, as text"""

    def __str__(self) -> str:
        one, other = (MISSING if v is None else repr(v) for v in self.values)
        return f'phase {self.phase}, {self.kind}: {self.where} is {one} and {other}{self.more}'


class Compared(NamedTuple):
    phases: int
    """number of phases that both runs have"""
    difference: Difference | None


def compare_metrics(a: RunFolder, b: RunFolder) -> Compared:
    """Compares metrics.jsonl, phase by phase."""
    rows_a, rows_b = ({int(row['step']): row for row in run.metrics} for run in (a, b))
    common = sorted(rows_a.keys() & rows_b.keys())
    for phase in common:
        names = _different(_counted(rows_a[phase]), _counted(rows_b[phase]))
        if names:
            values = rows_a[phase].get(names[0]), rows_b[phase].get(names[0])
            return Compared(
                len(common), Difference(phase, 'metrics', names[0], values, _and_more(len(names) - 1, 'number'))
            )
    return Compared(len(common), None)


def compare_rollouts(a: RunFolder, b: RunFolder) -> Compared:
    """Compares recorded sequences, phase by phase, by sample index. If the runs record different shares, the samples in
    both are compared; a recording starts with the first samples of its phase: runs without a common sample differ."""
    from chatgpt.monitor.run_folder.rollouts import recorded_phases

    common = sorted(set(recorded_phases(a.path)) & set(recorded_phases(b.path)))
    for phase in common:
        rows_a, rows_b = ({row['index']: row for row in run.rollouts([phase])} for run in (a, b))
        for run, rows in ((a, rows_a), (b, rows_b)):
            if not rows:
                raise ValueError(f'{run.path}: the recorded rollouts of phase {phase} cannot be read')
        if rows_a.keys().isdisjoint(rows_b):
            first = min(rows_a, default=None), min(rows_b, default=None)
            none = Difference(phase, 'rollouts', 'the first sample', first, ', and no sample is in both')
            return Compared(len(common), none)
        found = [
            (index, *difference)
            for index in sorted(rows_a.keys() & rows_b.keys())
            if (difference := _compare_rows(rows_a[index], rows_b[index])) is not None
        ]
        if found:
            index, where, one, other = found[0]
            more = _and_more(len(found) - 1, 'sequence')
            return Compared(
                len(common), Difference(phase, 'rollouts', f'{where} of sample {index}', (one, other), more)
            )
    return Compared(len(common), None)


def compare_states(phase: int, one: Mapping[str, Any], other: Mapping[str, Any]) -> Difference | None:
    """Compares the trainer's state in checkpoints, without tensors: counters, KL controller, running moments."""
    left, right = ({n: v for n, v in leaves(state) if n.split('.')[0] not in START_STATE} for state in (one, other))
    names = _different(left, right)
    if not names:
        return None
    values = left.get(names[0]), right.get(names[0])
    return Difference(phase, 'state', names[0], values, _and_more(len(names) - 1, 'number'))


def leaves(state: Mapping[str, Any], above: str = '') -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings, with their names joined by dots."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f'{above}{name}.')
        else:
            yield f'{above}{name}', value


def _counted(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(MEASURED)}


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names with different values, in the order of `one`."""
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if not _same(one.get(name), other.get(name))]


def _compare_rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Returns place and values of the first difference between two rows of a recording; None if they are equal."""
    names = _different(one, other)
    if not names:
        return None
    name = next((n for n in TOKENS if n in names), names[0])
    left, right = one.get(name), other.get(name)
    if isinstance(left, list) and isinstance(right, list):
        for i, (x, y) in enumerate(zip_longest(left, right)):
            if not _same(x, y):
                return f'{name}[{i}]', x, y
    return name, left, right


def _same(one: Any, other: Any) -> bool:
    """Returns True for values of equal bits: NaN equals NaN, and 0.0 differs from -0.0."""
    if isinstance(one, float) and isinstance(other, float):
        return repr(one) == repr(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


def _and_more(count: int, what: str) -> str:
    return f', and {count} other {what}{"s" * (count != 1)} of this phase' if count else ''
