"""Scores of players in a game: the random one, the best one, or your own.

    print(score('tictactoe', best, opponent='perfect'))

docs/environments.md has a table.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chatgpt.environments.games import GAMES, Game

Player = Callable[[Game], str]
"""a function that returns the next move in a game"""
Z = 1.959964
"""95 % of a normal distribution lie within this number of standard deviations"""


def best(game: Game) -> str:
    return game.best()


def random_player(seed: int = 0) -> Player:
    """Returns a player that chooses legal moves with equal probability."""
    draws = random.Random(seed)
    return lambda game: draws.choice(game.moves())


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a player over episodes."""

    episodes: int
    return_mean: float
    return_error: float
    """half the width of the 95 % interval of the mean"""
    success: float
    turns_mean: float


def play(game: Game, player: Player, seed: int) -> tuple[float, bool, int]:
    """Plays one episode. Returns its return, success and number of turns."""
    game.reset(seed)
    total, turns = 0.0, 0
    while True:
        _, reward, terminated, truncated, info = game.step(player(game))
        total, turns = total + reward, turns + 1
        if terminated or truncated:
            return total, info['success'], turns


def score(
    game: str | Callable[..., Game], player: Player, *, episodes: int = 1000, first_seed: int = 0, **options: Any
) -> Score:
    """Returns a player's score over `episodes` consecutive seeds. `game`: a class, or a name in `GAMES`."""
    made = (GAMES[game] if isinstance(game, str) else game)(**options)
    returns, successes, turns = zip(*(play(made, player, first_seed + i) for i in range(episodes)), strict=True)
    mean = sum(returns) / episodes
    variance = sum((r - mean) ** 2 for r in returns) / max(episodes - 1, 1)
    return Score(
        episodes=episodes,
        return_mean=mean,
        return_error=Z * math.sqrt(variance / episodes),
        success=sum(successes) / episodes,
        turns_mean=sum(turns) / episodes,
    )
