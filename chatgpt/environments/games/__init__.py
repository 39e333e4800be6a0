"""Three games that need no network, each with a best player: tasks for tests of methods, and example environments."""

from chatgpt.environments.games.calculator import Calculator, CalculatorTools
from chatgpt.environments.games.countdown import Countdown
from chatgpt.environments.games.game import Game, IllegalMove
from chatgpt.environments.games.tictactoe import TicTacToe

GAMES: dict[str, type[Game]] = {'countdown': Countdown, 'calculator': Calculator, 'tictactoe': TicTacToe}
"""games by the name after `games:`"""

__all__ = ['GAMES', 'Calculator', 'CalculatorTools', 'Countdown', 'Game', 'IllegalMove', 'TicTacToe']
