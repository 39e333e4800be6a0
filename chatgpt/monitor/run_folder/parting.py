"""Where two runs part: the first number of their metrics and of their recorded sequences that is not the same.

Numbers are compared as they were written: a float goes to JSON and to parquet with all its bits. `perf/` measures the
machine and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from chatgpt.monitor.run_folder.reading import RunFolder

MEASURED = 'perf/'
TOKENS = ('prompt_ids', 'token_ids', 'mask')
"""of a row, compared first: other numbers follow from them"""
MISSING = 'nothing'
OF_ONE_START = ('callbacks', 'journal', 'journal_from', 'in_flight_from')
"""of a checkpoint's state, what says how a run was started, watched or cut short, and decides no number of it"""


class Parting(NamedTuple):
    """One place at which two runs differ."""

    phase: int
    kind: str
    """'rollouts', 'metrics', 'weights' or 'state': also the order in which a phase makes them"""
    where: str
    values: tuple[Any, Any]
    more: str = ''
    """how much else differs"""

    def __str__(self) -> str:
        one, other = (MISSING if v is None else repr(v) for v in self.values)
        return f'phase {self.phase}, {self.kind}: {self.where} is {one} and {other}{self.more}'


class Compared(NamedTuple):
    phases: int
    """compared, because both runs have them"""
    parting: Parting | None


def compare_metrics(a: RunFolder, b: RunFolder) -> Compared:
    """metrics.jsonl, phase by phase."""
    rows_a, rows_b = ({int(row['step']): row for row in run.metrics} for run in (a, b))
    common = sorted(rows_a.keys() & rows_b.keys())
    for phase in common:
        names = _different(_counted(rows_a[phase]), _counted(rows_b[phase]))
        if names:
            values = rows_a[phase].get(names[0]), rows_b[phase].get(names[0])
            return Compared(
                len(common), Parting(phase, 'metrics', names[0], values, _and_more(len(names) - 1, 'number'))
            )
    return Compared(len(common), None)


def compare_rollouts(a: RunFolder, b: RunFolder) -> Compared:
    """Recorded sequences, phase by phase, each by its sample index. Runs that record different shares of them are
    compared on what both have; a recording begins with the first samples of its phase, so runs without a sample in
    common are different ones."""
    from chatgpt.monitor.run_folder.rollouts import recorded_phases

    common = sorted(set(recorded_phases(a.path)) & set(recorded_phases(b.path)))
    for phase in common:
        rows_a, rows_b = ({row['index']: row for row in run.rollouts([phase])} for run in (a, b))
        if rows_a.keys().isdisjoint(rows_b):
            first = min(rows_a, default=None), min(rows_b, default=None)
            apart = Parting(phase, 'rollouts', 'the first sample', first, ', and no sample is in both')
            return Compared(len(common), apart)
        found = [
            (index, *parting)
            for index in sorted(rows_a.keys() & rows_b.keys())
            if (parting := _parting_of_rows(rows_a[index], rows_b[index])) is not None
        ]
        if found:
            index, where, one, other = found[0]
            more = _and_more(len(found) - 1, 'sequence')
            return Compared(len(common), Parting(phase, 'rollouts', f'{where} of sample {index}', (one, other), more))
    return Compared(len(common), None)


def parting_of_state(phase: int, one: Mapping[str, Any], other: Mapping[str, Any]) -> Parting | None:
    """Of what a trainer writes into a checkpoint beside tensors: counters, KL controller, running moments."""
    left, right = ({n: v for n, v in _leaves(state) if n.split('.')[0] not in OF_ONE_START} for state in (one, other))
    names = _different(left, right)
    if not names:
        return None
    values = left.get(names[0]), right.get(names[0])
    return Parting(phase, 'state', names[0], values, _and_more(len(names) - 1, 'number'))


def _leaves(state: Mapping[str, Any], above: str = '') -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f'{above}{name}.')
        else:
            yield f'{above}{name}', value


def _counted(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(MEASURED)}


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names whose values are not the same, in the order of the first."""
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if not _same(one.get(name), other.get(name))]


def _parting_of_rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first place in two rows of a recording."""
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
    """Of the same bits, so far as a file tells: NaN is NaN, and 0.0 is not -0.0."""
    if isinstance(one, float) and isinstance(other, float):
        return repr(one) == repr(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


def _and_more(count: int, what: str) -> str:
    return f', and {count} other {what}{"s" * (count != 1)} of this phase' if count else ''
