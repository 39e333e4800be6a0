"""Blackjack against a dealer, by the rules of Sutton and Barto (2018), example 5.1.

    A7 6             the player's cards, and the dealer's open card; T is a card that counts 10
    h                a move: hit (another card) or s, stick
    A75 6
    s                the dealer draws to 17 and sticks there, with an ace as 11 too

Nearest to 21 wins: reward 1, 0 or -1. Cards come from an infinite deck, so counting does not help. Two cards that make
21 win `natural`, unless the dealer has such a pair too, which shows after the first stick. There is no doubling,
splitting or insurance. The best player is exact: dynamic programming over sums.

    python examples/environments/blackjack.py          # returns of a random and the best player
    chatgpt-rlhf ppo --environment examples/environments/blackjack.py:Blackjack ...
"""

from __future__ import annotations

from functools import cache
from typing import Any

from chatgpt.environments.games.game import Game, IllegalMove
from chatgpt.environments.games.scores import best, random_player, score

CARDS = 'A23456789T'
VALUE = {'A': 1, 'T': 10} | {str(n): n for n in range(2, 10)}
CHANCE = {card: 4 / 13 if card == 'T' else 1 / 13 for card in CARDS}
"""probability of drawing a card"""


class Blackjack(Game):
    """
    Args:
        natural: reward of winning with the first two cards; casinos pay 1.5.
    """

    ALPHABET = 'A23456789Ths ?\n'
    RULES = (
        "Blackjack: your cards, then the dealer's open card; A is 1 or 11, T is 10. Answer h to take a card or s to "
        'stop. Nearest to 21 wins.'
    )
    LOST = -1.0

    def __init__(self, natural: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        if isinstance(natural, bool) or not isinstance(natural, (int, float)) or not 0 < natural < 100:
            raise ValueError(f'natural={natural!r} must be a number above 0')
        self.natural = float(natural)

    def draw(self) -> str:
        return self.random.choice('A23456789TTTT')

    def deal(self) -> None:
        self.hand, self.dealer = self.draw() + self.draw(), self.draw() + self.draw()

    def show(self) -> str:
        return f'{self.hand} {self.dealer[0]}'

    def moves(self) -> list[str]:
        return ['h', 's']

    def play(self, move: str) -> tuple[float, bool] | None:
        if move == 'h':
            self.hand += self.draw()
            return None if total(self.hand)[0] <= 21 else (self.LOST, False)
        if move != 's':
            raise IllegalMove
        while total(self.dealer)[0] < 17:
            self.dealer += self.draw()
        own, other = (points(hand) for hand in (self.hand, self.dealer))
        reward = (own > other) - (own < other) if other[0] <= 21 else 1
        return (self.natural if reward > 0 and own[1] else float(reward)), reward > 0

    def best(self) -> str:
        sum_, soft = total(self.hand)
        hit, stick = values(sum_, soft, self.dealer[0], len(self.hand) == 2, self.natural)
        return 'h' if hit > stick else 's'


def total(cards: str) -> tuple[int, bool]:
    """Returns the sum, and True if an ace counts 11 in it."""
    hard = sum(VALUE[card] for card in cards)
    soft = 'A' in cards and hard <= 11
    return hard + 10 * soft, soft


def points(cards: str) -> tuple[int, bool]:
    """Returns the sum, and True if it is 21 of two cards, which beats other 21s."""
    sum_ = total(cards)[0]
    return sum_, sum_ == 21 and len(cards) == 2


def with_card(sum_: int, soft: bool, card: str) -> tuple[int, bool]:
    """Returns the sum after another card."""
    hard = sum_ - 10 * soft + VALUE[card]
    soft = (soft or card == 'A') and hard <= 11
    return hard + 10 * soft, soft


@cache
def dealer_ends(sum_: int, soft: bool, num_cards: int) -> dict[tuple[int, bool], float]:
    """Returns the probability of each final (sum, natural) of the dealer; sums above 21 are 22."""
    if sum_ >= 17:
        return {(min(sum_, 22), sum_ == 21 and num_cards == 2): 1.0}
    ends: dict[tuple[int, bool], float] = {}
    for card, chance in CHANCE.items():
        for end, share in dealer_ends(*with_card(sum_, soft, card), num_cards + 1).items():
            ends[end] = ends.get(end, 0.0) + chance * share
    return ends


@cache
def values(sum_: int, soft: bool, dealer: str, two_cards: bool, natural: float) -> tuple[float, float]:
    """Returns the values of hitting and sticking against the dealer's open card, under optimal play."""
    own = (sum_, sum_ == 21 and two_cards)
    stick = 0.0
    for end, chance in dealer_ends(*total(dealer), 1).items():
        if end[0] > 21 or own > end:
            stick += chance * (natural if own[1] else 1.0)
        elif own < end:
            stick -= chance
    hit = 0.0
    for card, chance in CHANCE.items():
        after, soft_after = with_card(sum_, soft, card)
        hit += chance * (-1.0 if after > 21 else max(values(after, soft_after, dealer, False, natural)))
    return hit, stick


def best_value(natural: float = 1.0) -> float:
    """Returns the mean return of optimal play over all deals."""
    return sum(
        CHANCE[a] * CHANCE[b] * CHANCE[dealer] * max(values(*total(a + b), dealer, True, natural))
        for a in CARDS
        for b in CARDS
        for dealer in CARDS
    )


if __name__ == '__main__':
    print(score(Blackjack, random_player()), score(Blackjack, best), sep='\n')
