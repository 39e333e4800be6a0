"""Countdown: reach a target with the given numbers, one operation per turn.

    3 5 7 =22        the numbers and the target
    3*5              a move: two of the numbers, and + - * or /; results are whole and above 0
    7 15 =22         the result replaces both
    7+15             reached: reward 1

A single number that is not the target ends the game with 0. `best` is exact: a search of all moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from chatgpt.environments.games.game import Game, IllegalMove, within

OPERATIONS = '+-*/'
_MOVE = re.compile(r'([0-9]{1,9})([-+*/])([0-9]{1,9})')
_TRIES = 10_000
Numbers = tuple[int, ...]


class Countdown(Game):
    """
    Args:
        numbers: number of given numbers, 2 to 6.
        largest: largest given number.
        operations: those allowed, of `+-*/`.
        max_target: largest target. Targets can always be reached, and are not among the given numbers.
    """

    ALPHABET = '0123456789+-*/= ?\n'
    RULES = (
        'Reach the number after = with the numbers before it. Answer with one operation on two of them, such as 3*5; '
        'its result takes their place.'
    )

    def __init__(
        self, numbers: int = 3, largest: int = 10, operations: str = OPERATIONS, max_target: int = 100, **options: Any
    ) -> None:
        super().__init__(**options)
        within('numbers', numbers, 2, 6)
        within('largest', largest, 1)
        within('max_target', max_target, 1)
        if not operations or not isinstance(operations, str) or set(operations) - set(OPERATIONS):
            raise ValueError(f'operations={operations!r} must be some of {OPERATIONS}')
        self.size, self.largest, self.operations, self.max_target = numbers, largest, operations, max_target

    def deal(self) -> None:
        for _ in range(_TRIES):
            given = left = tuple(sorted(self.random.randint(1, self.largest) for _ in range(self.size)))
            while len(left) > 1 and (ways := list(operations_on(left, self.operations))):
                left = self.random.choice(ways)[1]
            if len(left) == 1 and left[0] <= self.max_target and left[0] not in given:
                self.numbers, self.target = given, left[0]
                return
        raise ValueError(
            f'countdown: {self.size} numbers up to {self.largest} and {self.operations} reach no other number up to '
            f'{self.max_target}'
        )

    def show(self) -> str:
        return f'{" ".join(map(str, self.numbers))} ={self.target}'

    def moves(self) -> list[str]:
        return [move for move, _ in operations_on(self.numbers, self.operations)]

    def play(self, move: str) -> tuple[float, bool] | None:
        found = _MOVE.fullmatch(move)
        if not found or found[2] not in self.operations:
            raise IllegalMove
        a, b = int(found[1]), int(found[3])
        rest = list(self.numbers)
        for number in (a, b):
            if number not in rest:
                raise IllegalMove
            rest.remove(number)
        result = value_of(a, found[2], b)
        if result is None:
            raise IllegalMove
        self.numbers = tuple(sorted([*rest, result]))
        if result == self.target:
            return 1.0, True
        return None if self.moves() else (0.0, False)

    def best(self) -> str:
        return way_to(self.numbers, self.target, self.operations) or self.moves()[0]


def value_of(a: int, operation: str, b: int) -> int | None:
    """Returns the result, or None if it is not whole or not above 0."""
    if operation == '+':
        return a + b
    if operation == '*':
        return a * b
    if operation == '-':
        return a - b if a > b else None
    return a // b if a % b == 0 else None


def operations_on(numbers: Numbers, operations: str) -> Iterator[tuple[str, Numbers]]:
    """Yields each operation on two of the numbers once, and the numbers after it, sorted."""
    seen = set()
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i == j or (a, b) in seen:
                continue
            seen.add((a, b))
            rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
            for operation in operations:
                result = value_of(a, operation, b)
                if result is not None and (a <= b or operation in '-/'):  # a + b and b + a are the same
                    yield f'{a}{operation}{b}', tuple(sorted([*rest, result]))


@lru_cache(maxsize=1 << 18)
def way_to(numbers: Numbers, target: int, operations: str) -> str | None:
    """Returns the first operation of a solution, None if there is none. The target is not among the numbers."""
    ways = list(operations_on(numbers, operations))
    for move, after in ways:
        if target in after:
            return move
    return next((move for move, after in ways if way_to(after, target, operations)), None)
