"""Rewards that can be checked: functions `fn(prompts, responses, **columns) -> list[float]`, for any trainer or
`--reward_fn`.

    from chatgpt.rewards import ExactAnswer, Length, combine
    reward = combine((1.0, ExactAnswer()), (0.1, Length(target=40)))

Each is a plain object that can be pickled and called by hand. From the command line give a function of one's own file
that calls them. Left out: executing code, and rewards that are models (`chatgpt.nn.RewardModel`).
"""

from chatgpt.rewards.answers import ExactAnswer, NumberAtEnd, last_number
from chatgpt.rewards.combine import Combined, combine
from chatgpt.rewards.form import Format, Length, Pattern
from chatgpt.rewards.sentiment import Sentiment

__all__ = [
    'Combined',
    'ExactAnswer',
    'Format',
    'Length',
    'NumberAtEnd',
    'Pattern',
    'Sentiment',
    'combine',
    'last_number',
]
