"""The interface of environments, in which a policy acts turn by turn. Independent of engines and torch.

    class Guess(Environment):
        def reset(self, seed, **columns):
            self.number = random.Random(seed).randint(1, 9)
            return 'guess 1 to 9\\n'

        def step(self, response):
            right = response.strip() == str(self.number)
            return ('' if right else 'no\\n'), float(right), right, False, {'success': right}

There is one object per episode. `step` returns the same as Gymnasium's: observation, reward, terminated, truncated,
info.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Observation = str | list[dict[str, Any]]
"""text, or messages with 'role' and 'content'"""


class Environment(ABC):
    """Base class of environments; any object with `reset` and `step` works too. Both may be coroutine functions."""

    @abstractmethod
    def reset(self, seed: int, **columns: Any) -> Observation:
        """Returns the first observation of a new episode.

        Args:
            seed: determines the task; all samples of a group (responses to one prompt) have the same.
            columns: the other columns of the prompt's data row, and for a conversation `prompt`, its turns.

        Text follows the prompt (in a chat it is added to its last turn); messages are the whole conversation.
        """

    @abstractmethod
    def step(self, response: str) -> tuple[Observation, float | Mapping[str, float], bool, bool, Mapping[str, Any]]:
        """Returns the result of a turn of the policy: (observation, reward, terminated, truncated, info).

        The reward is a number or several by name. terminated: the task has ended; truncated: the environment cuts it
        off. `info` may contain 'success', a bool. If the environment or its factory has `tools` (JSON schemas), the
        response is the turn as a message, with 'tool_calls' if it has any, and 'truncated' if it reached the token
        limit.
        """

    def finish(self) -> float | Mapping[str, float]:
        """Returns a reward to add to the last turn of an episode that was cut off by the limit of turns or tokens."""
        return {}

    def close(self) -> None:
        """Called once after the episode."""


EnvironmentFactory = Callable[[], Any]
"""a class or function that makes the environment of one episode"""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """How long an episode may be, and how environments are run."""

    max_turns: int = 16
    max_turn_tokens: int | None = None
    """most new tokens of one turn; None: what is left of the response's room"""
    step_timeout_s: float = 30.0
    """limit of one `reset` or `step`; one that takes longer ends its episode"""
    workers: Literal['threads', 'processes'] = 'threads'
    """where environments run. Threads start at once and share what the trainer has imported. Processes compute beside
    each other and beside the trainer, and one that hangs or dies is replaced"""
    num_workers: int = 8
    """the most steps that run at the same time"""
    apply_chat_template: bool | None = None
    """None: messages go through the tokenizer's chat template, and text where the model was trained so
    (`chatgpt.data.formats.text_choice`); True: text too, each observation as a turn of the user; False: text is used
    as it is"""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """further arguments of the template, such as enable_thinking"""

    def __post_init__(self) -> None:
        if self.workers not in ('threads', 'processes'):
            raise ValueError(f"workers={self.workers!r} is not known; choose 'threads' or 'processes'")
        for name, value in (('max_turns', self.max_turns), ('num_workers', self.num_workers)):
            if value < 1:
                raise ValueError(f'{name}={value} must be at least 1')
        if self.max_turn_tokens is not None and self.max_turn_tokens < 1:
            raise ValueError(f'max_turn_tokens={self.max_turn_tokens} must be at least 1')
        if not 0 < self.step_timeout_s < math.inf:
            raise ValueError(f'step_timeout_s={self.step_timeout_s} must be a number of seconds above 0')


@dataclass(frozen=True, kw_only=True)
class Step:
    """A checked result of an environment; that of `reset` has no rewards."""

    observation: Observation
    rewards: dict[str, float] = field(default_factory=dict)
    """by name; 'reward' if the environment returns one number"""
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure of an environment, which ends its episode."""

    reason: Literal['error', 'timeout', 'invalid']
    message: str
    """one line that names the environment"""
    seconds: float = 0.0


class InvalidStep(ValueError):
    """An environment returned something invalid."""


def seed_of(run_seed: int, group: int) -> int:
    """Returns the seed of a group's task, below 2**32: a function of the run's seed and the number of the prompt
    draw."""
    digest = hashlib.blake2b(f'environment {run_seed} {group}'.encode(), digest_size=4).digest()
    return int.from_bytes(digest, 'little')


LARGEST_REWARD = 1e37
"""keeps sums of rewards finite in fp32"""
ROLES = ('system', 'developer', 'user', 'assistant', 'tool')


def checked_observation(observation: Any) -> Observation:
    """Returns an observation. Raises InvalidStep if it is neither a text nor messages."""
    if isinstance(observation, str):
        return _checked_text(observation)
    if not isinstance(observation, list) or not all(isinstance(m, Mapping) for m in observation):
        raise InvalidStep(
            f"observation {shown(observation)} is neither a text nor a list of messages {{'role': ..., 'content': ...}}"
        )
    for message in observation:
        if message.get('role') not in ROLES:
            raise InvalidStep(f'message {shown(message)} has none of the roles {", ".join(ROLES)}')
        if not isinstance(message.get('content'), str):
            raise InvalidStep(f'message {shown(message)} has no text as its content')
        _checked_text(message['content'])
    return [dict(m) for m in observation]


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidStep(
            f'{shown(text)} holds half a character (a lone surrogate), which no tokenizer takes'
        ) from None
    return text


def shown(value: Any, length: int = 80) -> str:
    """Returns the beginning of an object's repr in one line, also if its class raises in `__repr__`."""
    try:
        return ' '.join(repr(value).split())[:length]
    except Exception:
        return f'of type {type(value).__name__}'


def joined(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Adds text to a conversation: to its last turn if that is the user's, else as a new turn of the user."""
    if messages and not text:
        return messages
    if not messages or messages[-1]['role'] != 'user':
        return [*messages, {'role': 'user', 'content': text}]
    return [*messages[:-1], {**messages[-1], 'content': messages[-1]['content'] + text}]


def checked_rewards(reward: Any) -> dict[str, float]:
    """Returns rewards by name. Raises InvalidStep if one is not a finite number."""
    numbers = {}
    for name, value in (reward if isinstance(reward, Mapping) else {'reward': reward}).items():
        try:
            numbers[str(name)] = float(value)
        except Exception:
            raise InvalidStep(f'{name}={shown(value)} is not a number') from None
        number = numbers[str(name)]
        if isinstance(value, (str, bytes)) or not math.isfinite(number) or abs(number) > LARGEST_REWARD:
            raise InvalidStep(f'{name}={shown(value)} is not a finite number in fp32')
    return numbers


def checked_step(answer: Any) -> Step:
    """Returns the result of `step` as a `Step`. Raises InvalidStep if it is invalid."""
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise InvalidStep(f'step returned {shown(answer)}; return (observation, reward, terminated, truncated, info)')
    observation, reward, terminated, truncated, info = answer
    numbers = checked_rewards(reward)
    flags = {}
    for name, flag in (('terminated', terminated), ('truncated', truncated)):
        if type(flag).__name__ not in ('bool', 'bool_'):
            raise InvalidStep(f'{name}={shown(flag)} is not a bool')
        flags[name] = bool(flag)
    if not isinstance(info, Mapping):
        raise InvalidStep(f'info is a {type(info).__name__}, not a dict')
    success = info.get('success')
    if success is not None and type(success).__name__ not in ('bool', 'bool_'):
        raise InvalidStep(f"info['success']={shown(success)} is not a bool")
    return Step(
        observation=checked_observation(observation),
        rewards=numbers,
        success=None if success is None else bool(success),
        **flags,
    )
