"""The base of the games: moves as text, illegal moves, and the end of a game.

A game defines its task (`deal`), the observation (`show`), the legal moves (`moves`), the effect of a move (`play`) and
the best one (`best`, which uses only what was shown). Every observation ends with a line break, and all but the first
begin with one. After an illegal move the state does not change, and the observation has a line with `?` in front.

The seed and the moves determine everything: Python's `random.Random(seed)` draws the task, then the opponent's moves
and the dealer's cards.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import Any, ClassVar

from chatgpt.environments.base import Environment


class Game(Environment):
    """Base of the games.

    Args:
        rules: begin the first observation with the rules in English, with letters that are not in `ALPHABET`.
        max_illegal: the game is lost after this number of illegal moves.
    """

    ALPHABET: ClassVar[str]
    """every character of observations and moves"""
    RULES: ClassVar[str]
    LOST: ClassVar[float] = 0.0
    """reward of a lost game"""
    ILLEGAL: ClassVar[float] = -0.1
    """reward of an illegal move"""
    max_moves: int | None = None
    """the game is cut off after this number; None for no limit"""
    random: random.Random

    def __init__(self, *, rules: bool = False, max_illegal: int = 3) -> None:
        within('max_illegal', max_illegal, 1)
        self.rules, self.max_illegal = rules, max_illegal

    # ------------------------------------------------------------------ a game

    @abstractmethod
    def deal(self) -> None:
        """Draws a task."""

    @abstractmethod
    def show(self) -> str:
        """Returns the observation, without a line break at its end."""

    @abstractmethod
    def moves(self) -> list[str]:
        """Returns the legal moves, in a fixed order; a game may accept other ways to write them."""

    @abstractmethod
    def play(self, move: str) -> tuple[float, bool] | None:
        """Makes a move, written without spaces. Returns (reward, success) if it ends the game, else None.

        Raises:
            IllegalMove: the state has not changed.
        """

    @abstractmethod
    def best(self) -> str:
        """Returns a best move, as far as one is known, given only what has been shown."""

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
    """An illegal move."""


def within(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises ValueError for an option that is not a whole number in the range."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(
            f'{name}={value!r} must be a whole number {f"from {low} to {high}" if high else f"of at least {low}"}'
        )


def one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f'{name}={value!r} is not known; choose one of {", ".join(known)}')
