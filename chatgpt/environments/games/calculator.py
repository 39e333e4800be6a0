"""Arithmetic with a calculator.

    482*37+915       the task
    482*37           a move with an operation calls the calculator, which takes two numbers
    =17834
    17834+915
    =18749
    18749            a number alone is the answer, and ends the game: reward 1 if it is right, else 0

Multiplications come first in the task, so that it can be computed from left to right. With `tape` the calculator prints
that number of other calculations before each result, which makes the observation long. `CalculatorTools` is the same
task with calls in the format of a chat template. `best` is exact.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from chatgpt.environments.games.game import Game, IllegalMove, within

COMPUTE = {'*': operator.mul, '+': operator.add, '-': operator.sub}
_CALL = re.compile(r'(-?[0-9]{1,40})([-+*])(-?[0-9]{1,40})')
_ANSWER = re.compile(r'-?[0-9]{1,40}')


class Calculator(Game):
    """
    Args:
        terms: numbers in the task, 2 to 6.
        digits: of each number, 1 to 6.
        operations: those in the task, of `*+-`; the calculator has all three.
        tape: other calculations that are printed before each result, 0 to 1000.
        max_moves: the game is cut off after this number.
    """

    ALPHABET = '0123456789+-*= ?\n'
    RULES = (
        'Work this out. A calculation of two numbers, such as 12*34, is answered with its result; a number alone is '
        'your answer.'
    )

    def __init__(
        self,
        terms: int = 3,
        digits: int = 3,
        operations: str = '*+-',
        tape: int = 0,
        max_moves: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        within('terms', terms, 2, 6)
        within('digits', digits, 1, 6)
        within('tape', tape, 0, 1000)
        within('max_moves', max_moves, 1)
        if not operations or not isinstance(operations, str) or set(operations) - set(COMPUTE):
            raise ValueError(f'operations={operations!r} must be some of {"".join(COMPUTE)}')
        self.num_terms, self.digits, self.operations, self.tape = terms, digits, operations, tape
        self.max_moves = max_moves

    def deal(self) -> None:
        self.terms = [self.number() for _ in range(self.num_terms)]
        drawn = [self.random.choice(self.operations) for _ in self.terms[1:]]
        self.signs = sorted(drawn, key=lambda operation: operation != '*')
        self.answer = self.terms[0]
        for operation, term in zip(self.signs, self.terms[1:], strict=True):
            self.answer = COMPUTE[operation](self.answer, term)
        self.results: dict[str, int] = {}
        self.shown = str(self.terms[0]) + ''.join(f'{o}{t}' for o, t in zip(self.signs, self.terms[1:], strict=True))

    def number(self) -> int:
        return self.random.randint(10 ** (self.digits - 1) if self.digits > 1 else 2, 10**self.digits - 1)

    def show(self) -> str:
        return self.shown

    def moves(self) -> list[str]:
        """Returns calculations with numbers that were shown, and those numbers as answers."""
        numbers = list(dict.fromkeys([*self.terms, *self.results.values()]))
        calls = [f'{a}{operation}{b}' for operation in COMPUTE for a in numbers for b in numbers]
        return calls + [str(n) for n in numbers]

    def play(self, move: str) -> tuple[float, bool] | None:
        if _ANSWER.fullmatch(move):
            right = int(move) == self.answer
            return float(right), right
        found = _CALL.fullmatch(move)
        if not found:
            raise IllegalMove
        result = self.results[move] = COMPUTE[found[2]](int(found[1]), int(found[3]))
        lines = []
        for _ in range(self.tape):
            a, operation, b = self.number(), self.random.choice(self.operations), self.number()
            lines.append(f'{a}{operation}{b}={COMPUTE[operation](a, b)}')
        self.shown = '\n'.join([*lines, f'={result}'])
        return None

    def best(self) -> str:
        value = self.terms[0]
        for operation, term in zip(self.signs, self.terms[1:], strict=True):
            call = f'{value}{operation}{term}'
            if call not in self.results:
                return call
            value = self.results[call]
        return str(value)


class CalculatorTools:
    """The same task for a model that calls tools: a class for TRL's `environment_factory`.

    Args:
        options: of `Calculator`; rules, max_moves and max_illegal have no effect here.
    """

    def __init__(self, **options: Any) -> None:
        self._game = Calculator(**options)

    def reset(self, seed: int = 0, **columns: Any) -> str:
        """Returns the task, which `seed` determines."""
        task = self._game.reset(seed).strip()
        self._reward = 0.0
        return f'Work out {task} with the calculator, one step at a time, and then give the answer.'

    def calculate(self, expression: str) -> str:
        """Calculate with two whole numbers.

        Args:
            expression: two numbers with +, - or * between them, such as 12*34

        Returns:
            the result
        """
        move = ''.join(str(expression).split())
        if not _CALL.fullmatch(move):
            return 'error: give two whole numbers with +, - or * between them, such as 12*34'
        self._game.play(move)
        return self._game.show()

    def answer(self, number: int) -> str:
        """Give the answer.

        Args:
            number: what the whole comes to

        Returns:
            whether it is right
        """
        self._reward = float(str(number).strip() == str(self._game.answer))
        return 'right' if self._reward else 'wrong'

    def get_reward(self) -> float:
        """Returns 1 if the latest answer is right, else 0."""
        return self._reward
