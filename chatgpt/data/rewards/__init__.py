"""Rewards that can be checked: functions `fn(prompts, responses, **columns) -> list[float]`, for any trainer or
`--reward_fn`.

    from chatgpt.data.rewards import ExactAnswer, Length, combine
    reward = combine((1.0, ExactAnswer()), (0.1, Length(target=40)))

Each is a plain object that can be pickled and called by hand. From the command line give a function of one's own file
that calls them.
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
