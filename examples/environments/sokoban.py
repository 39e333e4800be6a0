"""Sokoban on small boards: push every box onto a goal.

    ---.             # wall  - floor  . goal  $ box  * box on a goal  @ the player  + the player on a goal
    @$--             as in the files of the game (XSB), with - for floor; beyond the edge is wall
    ---#
    rd               moves: u, d, l or r, at most `moves_per_turn` a turn

A move into a wall, or one that pushes a box into a wall or another box, makes the whole turn illegal. All boxes on
goals: reward 1. After `max_moves` turns the game is truncated; every board can be solved in fewer. The best player is
exact: breadth-first search for the fewest moves.

    python examples/environments/sokoban.py          # returns of a random and the best player
    chatgpt-rlhf ppo --environment examples/environments/sokoban.py:Sokoban ...
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any

from chatgpt.environments.games.game import Game, IllegalMove, within
from chatgpt.environments.games.scores import best, random_player, score

DIRECTIONS = {'u': (-1, 0), 'd': (1, 0), 'l': (0, -1), 'r': (0, 1)}
_TRIES = 10_000
Cell = tuple[int, int]
Boxes = frozenset[Cell]


class Sokoban(Game):
    """
    Args:
        width, height: size of the board, 3 to 6.
        boxes: number of boxes and of goals, 1 or 2.
        walls: number of wall cells inside the board.
        max_moves: maximum number of turns.
        moves_per_turn: maximum number of letters of a turn.
        min_solution: minimum length of the shortest solution, in moves.
    """

    ALPHABET = '#-.$*@+udlr?\n'
    RULES = (
        'Sokoban: # wall, - floor, . goal, $ box, * box on a goal, @ you, + you on a goal. Push every box onto a goal. '
        'Answer u, d, l or r.'
    )

    def __init__(
        self,
        width: int = 4,
        height: int = 4,
        boxes: int = 1,
        walls: int = 2,
        max_moves: int = 16,
        moves_per_turn: int = 1,
        min_solution: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        within('width', width, 3, 6)
        within('height', height, 3, 6)
        within('boxes', boxes, 1, 2)
        within('max_moves', max_moves, 1)
        within('moves_per_turn', moves_per_turn, 1)
        within('walls', walls, 0)
        within('min_solution', min_solution, 1, max_moves * moves_per_turn)
        if walls + 2 * boxes + 1 > width * height:
            raise ValueError(f'walls={walls} and boxes={boxes} do not fit on a board of {width} by {height}')
        self.width, self.height, self.num_boxes, self.num_walls = width, height, boxes, walls
        self.max_moves, self.moves_per_turn, self.min_solution = max_moves, moves_per_turn, min_solution

    def deal(self) -> None:
        cells = [(y, x) for y in range(self.height) for x in range(self.width)]
        assert self.max_moves is not None
        longest = self.max_moves * self.moves_per_turn
        for _ in range(_TRIES):
            self.random.shuffle(cells)
            n, m = self.num_boxes, self.num_walls
            self.player, self.boxes, self.goals = (
                cells[0],
                frozenset(cells[1 : n + 1]),
                frozenset(cells[n + 1 : 2 * n + 1]),
            )
            floor = frozenset(cells) - frozenset(cells[2 * n + 1 : 2 * n + 1 + m])
            self.floor = floor
            way = solution(floor, self.goals, self.player, self.boxes)
            if way is not None and self.min_solution <= len(way) <= longest:
                return
        raise ValueError(
            f'sokoban: found no board of {self.width} by {self.height} with boxes={self.num_boxes} and '
            f'walls={self.num_walls} that is solved in {self.min_solution} to {longest} moves'
        )

    def show(self) -> str:
        return '\n'.join(''.join(self.sign((y, x)) for x in range(self.width)) for y in range(self.height))

    def sign(self, cell: Cell) -> str:
        if cell not in self.floor:
            return '#'
        goal = cell in self.goals
        if cell == self.player:
            return '+' if goal else '@'
        if cell in self.boxes:
            return '*' if goal else '$'
        return '.' if goal else '-'

    def moves(self) -> list[str]:
        return [letter for letter in DIRECTIONS if moved(self.floor, self.player, self.boxes, letter)]

    def play(self, move: str) -> tuple[float, bool] | None:
        if not 0 < len(move) <= self.moves_per_turn:
            raise IllegalMove
        player, boxes = self.player, self.boxes
        for letter in move:
            after = moved(self.floor, player, boxes, letter) if letter in DIRECTIONS else None
            if after is None:
                raise IllegalMove
            player, boxes = after
            if boxes == self.goals:
                break
        self.player, self.boxes = player, boxes
        return (1.0, True) if boxes == self.goals else None

    def best(self) -> str:
        way = solution(self.floor, self.goals, self.player, self.boxes)
        return way[: self.moves_per_turn] if way else self.moves()[0]


def moved(floor: Boxes, player: Cell, boxes: Boxes, letter: str) -> tuple[Cell, Boxes] | None:
    """Returns player and boxes after a move; None if it is illegal."""
    dy, dx = DIRECTIONS[letter]
    to, beyond = (player[0] + dy, player[1] + dx), (player[0] + 2 * dy, player[1] + 2 * dx)
    if to not in floor:
        return None
    if to not in boxes:
        return to, boxes
    return (to, boxes - {to} | {beyond}) if beyond in floor and beyond not in boxes else None


@lru_cache(maxsize=1 << 12)
def solution(floor: Boxes, goals: Boxes, player: Cell, boxes: Boxes) -> str | None:
    """Returns a shortest solution; None if there is none."""
    before: dict[tuple[Cell, Boxes], tuple[Any, str]] = {(player, boxes): (None, '')}
    waiting = deque([(player, boxes)])
    while waiting:
        state = waiting.popleft()
        if state[1] == goals:
            letters = []
            while before[state][0] is not None:
                state, letter = before[state]
                letters.append(letter)
            return ''.join(reversed(letters))
        for letter in DIRECTIONS:
            after = moved(floor, *state, letter)
            if after is not None and after not in before:
                before[after] = (state, letter)
                waiting.append(after)
    return None


if __name__ == '__main__':
    print(score(Sokoban, random_player()), score(Sokoban, best), sep='\n')
