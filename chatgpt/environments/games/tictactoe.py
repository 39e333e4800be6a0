"""Tic-tac-toe against a random or a perfect player.

    x.o              the board, as three lines; x is the policy, o the opponent
    ...
    ..o
    6                a move: the number of an empty cell, 1 to 9, line by line

Reward 1 for a won game, 0 for a drawn and -1 for a lost one. Success is a win; against the perfect player, a draw.
`best` is exact against either: a search of all games, with the mean over the moves of a random opponent.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from chatgpt.environments.games.game import Game, IllegalMove, one_of

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToe(Game):
    """
    Args:
        opponent: random: any empty cell; perfect: a best cell, drawn among those that are equally good.
        first: the player of the first move: policy, opponent, or either, by the seed.
    """

    ALPHABET = '.xo123456789?\n'
    RULES = 'Tic-tac-toe: you are x. Answer with the number of an empty cell, 1 to 9, line by line.'
    LOST = -1.0

    def __init__(self, opponent: str = 'random', first: str = 'either', **options: Any) -> None:
        super().__init__(**options)
        one_of('opponent', opponent, ('random', 'perfect'))
        one_of('first', first, ('policy', 'opponent', 'either'))
        self.opponent, self.first = opponent, first

    def deal(self) -> None:
        self.board = '.' * 9
        if self.first == 'opponent' or (self.first == 'either' and self.random.random() < 0.5):
            self.answer()

    def show(self) -> str:
        return '\n'.join(self.board[i : i + 3] for i in (0, 3, 6))

    def moves(self) -> list[str]:
        return [str(cell + 1) for cell in empty(self.board)]

    def play(self, move: str) -> tuple[float, bool] | None:
        if move not in self.moves():
            raise IllegalMove
        self.board = put(self.board, int(move) - 1, 'x')
        if outcome(self.board) is None:
            self.answer()
        end = outcome(self.board)
        return None if end is None else (end, end > 0 or (end == 0 and self.opponent == 'perfect'))

    def answer(self) -> None:
        """Makes the opponent's move."""
        cells = empty(self.board) if self.opponent == 'random' else best_cells(self.board, 'o', 'perfect')
        self.board = put(self.board, self.random.choice(cells), 'o')

    def best(self) -> str:
        return str(best_cells(self.board, 'x', self.opponent)[0] + 1)


def empty(board: str) -> list[int]:
    return [cell for cell, mark in enumerate(board) if mark == '.']


def put(board: str, cell: int, mark: str) -> str:
    return board[:cell] + mark + board[cell + 1 :]


def outcome(board: str) -> float | None:
    """Returns 1 if x has a line, -1 if o has one, 0 for a full board, else None."""
    for a, b, c in LINES:
        if board[a] != '.' and board[a] == board[b] == board[c]:
            return 1.0 if board[a] == 'x' else -1.0
    return None if '.' in board else 0.0


@cache
def value(board: str, mark: str, opponent: str) -> float:
    """Returns the mean outcome for an optimal x if `mark` is next."""
    end = outcome(board)
    if end is not None:
        return end
    after = [value(put(board, cell, mark), 'o' if mark == 'x' else 'x', opponent) for cell in empty(board)]
    if mark == 'x':
        return max(after)
    return min(after) if opponent == 'perfect' else sum(after) / len(after)


def best_cells(board: str, mark: str, opponent: str) -> list[int]:
    """Returns the best cells for `mark`; if any wins at once, only those that do."""
    sign, other = (1, 'o') if mark == 'x' else (-1, 'x')
    worth = {cell: sign * value(put(board, cell, mark), other, opponent) for cell in empty(board)}
    at_once = [cell for cell in worth if outcome(put(board, cell, mark)) == sign]
    return at_once or [cell for cell in worth if worth[cell] == max(worth.values())]
