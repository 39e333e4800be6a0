"""What a sweep's file says of one setting that varies: a list of values, or a range.

    lr: {strategy: loguniform, values: [1.0e-5, 1.0e-3]}       # as in trlX's sweeps
    lr: {min: 1.0e-5, max: 1.0e-3, log: true}                  # the same
    train_batch_size: [8, 16]

Left out: who draws from it (`study`), and whether the run takes such values (`settings`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatgpt.names import hint

KEYS = ('strategy', 'values', 'min', 'max', 'log', 'step')
STRATEGIES = ('choice', 'uniform', 'loguniform', 'quniform', 'int', 'randint')
Value = float | int | str | bool | None


@dataclass(frozen=True)
class Choice:
    """One of these, without an order."""

    values: tuple[Value, ...]

    def points(self) -> list[Value]:
        return list(self.values)

    def extremes(self) -> list[Value]:
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """From `low` to `high`, both included, evenly or by logarithm."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    def points(self) -> list[Value]:
        """Every value of a grid.

        Raises:
            ValueError: there are infinitely many.
        """
        if self.step is None and not self.whole:
            raise ValueError('sampler grid tries every value, and a range without a step has no end of them')
        step = self.step or 1
        return [self.low + i * step for i in range(int(math.floor((self.high - self.low) / step + 1e-9)) + 1)]

    def extremes(self) -> list[Value]:
        return [self.low, self.high]


Space = Choice | Range


def space_of(given: Any, *, whole: bool) -> Space:
    """The space that a sweep's file gives.

    Args:
        whole: the setting takes whole numbers only.

    Raises:
        ValueError: it is no list and has no `values` or `min` and `max`, or they do not fit the strategy.
    """
    if isinstance(given, list):
        given = {'values': given}
    if not isinstance(given, Mapping):
        raise ValueError(f'{given!r} is one value, which does not vary; give a list of values, or min and max')
    for key in given:
        if key not in KEYS:
            raise ValueError(f'{key!r} is not known; there are {", ".join(KEYS)}{hint(str(key), KEYS)}')
    strategy = given.get('strategy', 'choice' if 'values' in given else 'int' if whole else 'uniform')
    if strategy not in STRATEGIES:
        raise ValueError(
            f'strategy={strategy!r} is not known; choose one of {", ".join(STRATEGIES)}'
            + hint(str(strategy), STRATEGIES)
        )
    if strategy == 'choice':
        return _choice(given)
    return _range(strategy, *_bounds(strategy, given), log=given.get('log', False), whole=whole)


def _choice(given: Mapping[str, Any]) -> Choice:
    values = given.get('values')
    if not isinstance(values, list) or not values or {'min', 'max', 'log', 'step'} & set(given):
        raise ValueError('choice takes values, a list of at least one, and nothing else')
    for value in values:
        if not isinstance(value, float | int | str | bool | None):
            raise ValueError(f'{value!r} is no single value')
    if len({repr(value) for value in values}) < len(values):
        raise ValueError(f'values={values} holds one twice')
    return Choice(tuple(values))


def _bounds(strategy: str, given: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Low, high and step, as `min`, `max`, `step` or as trlX's `values`."""
    if 'values' not in given:
        if not {'min', 'max'} <= set(given):
            raise ValueError('a range needs min and max')
        return given['min'], given['max'], given.get('step')
    values = given['values']
    most = 3 if strategy == 'quniform' else 2
    if not isinstance(values, list) or len(values) not in (2, most) or {'min', 'max'} & set(given):
        words = '[low, high, step]' if most == 3 else '[low, high]'
        raise ValueError(f'{strategy} takes values: {words}, or min and max')
    return values[0], values[1], values[2] if len(values) == 3 else given.get('step')


def _range(strategy: str, low: Any, high: Any, step: Any, *, log: Any, whole: bool) -> Range:
    for name, value in (('min', low), ('max', high), ('step', 1 if step is None else step)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f'{name}={value!r} is no number')
    if not isinstance(log, bool):
        raise ValueError(f'log={log!r} is neither true nor false')
    log = log or strategy == 'loguniform'
    whole = whole or strategy in ('int', 'randint')
    if strategy == 'randint':  # as numpy and Ray have it
        high -= 1
    if whole and any(value is not None and value != int(value) for value in (low, high, step)):
        raise ValueError(f'{low}, {high}: whole numbers are needed')
    if strategy == 'quniform' and step is None:
        raise ValueError('quniform needs a step: values: [low, high, step]')
    if step is not None and (step <= 0 or log):
        raise ValueError(f'step={step:g}' + (' does not go with log' if step > 0 else ' must be positive'))
    if not low < high:
        raise ValueError(f'min={low:g} must be less than max={high:g}')
    if log and low <= 0:
        raise ValueError(f'min={low:g} has no logarithm; give one above 0')
    if whole:
        return Range(int(low), int(high), log, int(step) if step else None, True)
    return Range(float(low), float(high), log, float(step) if step else None, False)
