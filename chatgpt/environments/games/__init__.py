"""Six small games that need no network, each with a best player: tasks to try a method on, and environments to read."""

from chatgpt.environments.games.blackjack import Blackjack
from chatgpt.environments.games.calculator import Calculator, CalculatorTools
from chatgpt.environments.games.countdown import Countdown
from chatgpt.environments.games.game import Game, IllegalMove
from chatgpt.environments.games.guess_word import GuessWord
from chatgpt.environments.games.sokoban import Sokoban
from chatgpt.environments.games.tictactoe import TicTacToe

GAMES: dict[str, type[Game]] = {
    'countdown': Countdown,
    'calculator': Calculator,
    'guess_word': GuessWord,
    'sokoban': Sokoban,
    'tictactoe': TicTacToe,
    'blackjack': Blackjack,
}
"""by the name after `games:`"""
ALPHABET = ''.join(sorted({character for game in GAMES.values() for character in game.ALPHABET}))
"""every character of all of them"""

__all__ = [
    'ALPHABET',
    'GAMES',
    'Blackjack',
    'Calculator',
    'CalculatorTools',
    'Countdown',
    'Game',
    'GuessWord',
    'IllegalMove',
    'Sokoban',
    'TicTacToe',
]
