"""Verifiable rewards: functions `fn(prompts, responses, **columns) -> list[float]`, for any trainer or `--reward_fn`.

    from chatgpt.data.rewards import ExactAnswer, Length, combine
    reward = combine((1.0, ExactAnswer()), (0.1, Length(target=40)))

Each is an object that can be called and pickled. For the command line write a function in a file that calls them.
"""

from chatgpt.data.rewards.calling import call
from chatgpt.data.rewards.checkable import (
    Combined,
    ExactAnswer,
    Format,
    Length,
    NumberAtEnd,
    Pattern,
    Sentiment,
    combine,
    last_number,
)

__all__ = [
    'Combined',
    'ExactAnswer',
    'Format',
    'Length',
    'NumberAtEnd',
    'Pattern',
    'Sentiment',
    'call',
    'combine',
    'last_number',
]
