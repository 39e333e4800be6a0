"""Guess a hidden word of four letters by hints per letter.

    ____ 6           nothing is known yet; 6 guesses are left
    lake             a guess: any four letters
    -+.. 5           + the letter is here, - it is elsewhere in the word, . it is not in it
    mail

A letter that occurs more often in the guess than in the word gets as many hints as it occurs in the word, exact places
first. Guessed: reward 1; no guesses left: 0. The best player is greedy: it makes the guess after which the fewest words
remain on average, and finds all of the default words.

    python examples/environments/guess_word.py          # returns of a random and the best player
    chatgpt-rlhf ppo --environment examples/environments/guess_word.py:GuessWord ...
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

from chatgpt.environments.games.game import Game, IllegalMove, within
from chatgpt.environments.games.scores import best, random_player, score

WORDS = (
    'lake mail tree wind fire rain snow ship fish bird road door lamp book hand milk '
    'salt gold iron wood rose leaf seed farm corn bell drum song game ball king moon '
    'star hill cave rock sand wave boat sail rope nest wolf bear deer frog duck crow '
    'ring coat shoe belt desk wall roof yard town park gate path coin soap bowl fork'
).split()
LETTERS = 4


class GuessWord(Game):
    """
    Args:
        words: number of words, from the start of the list, 2 to 64.
        guesses: number of guesses, 1 to 9.
    """

    ALPHABET = 'abcdefghijklmnopqrstuvwxyz0123456789_+-. ?\n'
    RULES = (
        'Guess a word of four letters. After each guess: + the letter is here, - it is elsewhere in the word, . it is '
        'not in it; then the guesses that are left.'
    )

    def __init__(self, words: int = 32, guesses: int = 4, **options: Any) -> None:
        super().__init__(**options)
        within('words', words, 2, len(WORDS))
        within('guesses', guesses, 1, 9)
        self.words, self.guesses = tuple(WORDS[:words]), guesses

    def deal(self) -> None:
        self.word = self.random.choice(self.words)
        self.hints: list[tuple[str, str]] = []

    def show(self) -> str:
        return f'{self.hints[-1][1] if self.hints else "_" * LETTERS} {self.guesses - len(self.hints)}'

    def moves(self) -> list[str]:
        """Returns the words not guessed yet."""
        guessed = {guess for guess, _ in self.hints}
        return [word for word in self.words if word not in guessed]

    def play(self, move: str) -> tuple[float, bool] | None:
        guess = move.lower()
        if len(guess) != LETTERS or not (guess.isascii() and guess.isalpha()):
            raise IllegalMove
        self.hints.append((guess, hint(guess, self.word)))
        if guess == self.word:
            return 1.0, True
        return (0.0, False) if len(self.hints) == self.guesses else None

    def best(self) -> str:
        left = tuple(w for w in self.words if all(hint(guess, w) == seen for guess, seen in self.hints))
        return best_guess(left, self.words)


@lru_cache(maxsize=1 << 14)
def hint(guess: str, word: str) -> str:
    """Returns a sign per letter of the guess."""
    left = Counter(letter for letter, other in zip(word, guess, strict=True) if letter != other)
    signs = []
    for letter, other in zip(guess, word, strict=True):
        if letter == other:
            signs.append('+')
        elif left[letter]:
            left[letter] -= 1
            signs.append('-')
        else:
            signs.append('.')
    return ''.join(signs)


@lru_cache(maxsize=1 << 12)
def best_guess(left: tuple[str, ...], words: tuple[str, ...]) -> str:
    """Returns the guess after which the fewest words of `left` remain on average; on a tie, one of `left`."""
    if len(left) <= 2:
        return left[0]

    def remaining(guess: str) -> tuple[int, bool]:
        return sum(n * n for n in Counter(hint(guess, word) for word in left).values()), guess not in left

    return min(words, key=remaining)


if __name__ == '__main__':
    print(score(GuessWord, random_player()), score(GuessWord, best), sep='\n')
