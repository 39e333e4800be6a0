"""What the games have in common: moves in text, an answer to those that are not allowed, and an end.

A game says what its task is (`deal`), what is seen (`show`), which moves there are (`moves`), what a move does (`play`)
and which is best (`best`, which looks at nothing that was not shown). Every observation after the first begins with a
line break and every one ends with it; after a move that is not allowed a line with `?` stands before it, and nothing
has changed.

Seeds: Python's own `random.Random(seed)` draws the task, and after it the opponent's moves and the dealer's cards, so
the seed and the moves decide everything.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import Any, ClassVar

from chatgpt.environments.base import Environment


class Game(Environment):
    """Base of the games.

    Args:
        rules: begin the first observation with the rules in a sentence, for a model that reads English. Its letters are
            not of `ALPHABET`.
        max_illegal: the game is lost with so many moves that are not allowed.
    """

    ALPHABET: ClassVar[str]
    """every character of observations and moves"""
    RULES: ClassVar[str]
    LOST: ClassVar[float] = 0.0
    """reward of a lost game"""
    ILLEGAL: ClassVar[float] = -0.1
    """reward of a move that is not allowed"""
    max_moves: int | None = None
    """the game is cut off after so many; None: its rules end it"""
    random: random.Random

    def __init__(self, *, rules: bool = False, max_illegal: int = 3) -> None:
        within('max_illegal', max_illegal, 1)
        self.rules, self.max_illegal = rules, max_illegal

    # ------------------------------------------------------------------ what a game is

    @abstractmethod
    def deal(self) -> None:
        """Draw a task."""

    @abstractmethod
    def show(self) -> str:
        """What is seen, without a line break at its end."""

    @abstractmethod
    def moves(self) -> list[str]:
        """The moves that are allowed, in a fixed order; a game may allow other ways to write one."""

    @abstractmethod
    def play(self, move: str) -> tuple[float, bool] | None:
        """Make a move, written without spaces: (reward, success) where it ends the game, else None.

        Raises:
            IllegalMove: it is not allowed; nothing has changed.
        """

    @abstractmethod
    def best(self) -> str:
        """A best move, as far as one is known, by what has been shown alone."""

    # ------------------------------------------------------------------ an environment

    def reset(self, seed: int, **columns: Any) -> str:
        self.random = random.Random(seed)
        self.num_moves = self.num_illegal = 0
        self.deal()
        return f'{self.RULES}\n{self.show()}\n' if self.rules else f'{self.show()}\n'

    def step(self, response: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.num_moves += 1
        truncated = self.num_moves == self.max_moves
        try:
            end = self.play(''.join(response.split()))
        except IllegalMove:
            self.num_illegal += 1
            if self.num_illegal == self.max_illegal:
                return f'\n?\n{self.show()}\n', self.ILLEGAL + self.LOST, True, False, {'success': False}
            return f'\n?\n{self.show()}\n', self.ILLEGAL, False, truncated, {'success': False}
        if end is None:
            return f'\n{self.show()}\n', 0.0, False, truncated, {'success': False}
        reward, success = end
        return f'\n{self.show()}\n', reward, True, False, {'success': success}


class IllegalMove(Exception):
    """A move that is not allowed."""


def within(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises ValueError for an option that is no whole number of the range."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(
            f'{name}={value!r} must be a whole number {f"from {low} to {high}" if high else f"of at least {low}"}'
        )


def one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f'{name}={value!r} is not known; choose one of {", ".join(known)}')
