"""TRL's `environment_factory`: a class with public methods as tools that the model may call.

`reset` gets the columns of the data row, the prompt included, and may return a text to add to the prompt's last turn.
The results of tools, or their errors, are the observation after a turn; a turn without calls ends the episode.
`get_reward` is called once at the end of the episode, and `turn_reward` after every turn; all of them may be coroutine
functions. A parameter of `reset` named `seed` gets the group's seed.

Semantics: TRL's GRPOTrainer (`environment_factory`, `_tool_call_loop`), at commit f2cd577. Differences: `close` is not
a tool, images are not shown, a call's arguments may be JSON in a string, and calls in the last allowed turn of an
episode are still executed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chatgpt.environments.base import joined
from chatgpt.environments.host import name_of

RESERVED = ('reset', 'get_reward', 'turn_reward', 'close')


_Reusable = tuple[Any, asyncio.AbstractEventLoop | None]
"""an object with tools, and the event loop to which its connections are bound"""


class ToolFactory:
    """Makes the environments of a class with tools. Objects of the class are reused, as in TRL, so the constructor runs
    only once per concurrent episode.

    Args:
        make: the class, or a function without arguments that makes an object of it.
        rewards: reward functions like TRL's `reward_funcs`, called at the end of an episode with `prompts`,
            `completions` (turns and results, as messages), `environments` (the objects) and the row's columns, all
            lists of length 1. Each result is a reward under the function's name, in addition to `get_reward`.

    Raises:
        ValueError: making an object fails, it has no `reset`, or a tool has no docstring, or lacks a type hint or a
            line under Args.
    """

    def __init__(self, make: Callable[[], Any], rewards: Sequence[Callable[..., Any]] = ()) -> None:
        self.make, self.rewards = make, tuple(rewards)
        self.name = self.__qualname__ = name_of(make)
        for reward in self.rewards:
            if not callable(reward) or not hasattr(reward, '__name__'):
                raise ValueError(f'rewards holds {reward!r:.80}, which is no function')
        try:
            environment = make()
        except Exception as error:
            raise ValueError(f'making {self.name}() raised {type(error).__name__}: {error}') from error
        if not callable(getattr(environment, 'reset', None)):
            raise ValueError(f'{self.name} has no method reset, which an environment needs')
        self.tools = [_schema(self.name, name, tool) for name, tool in tools_of(environment).items()]
        """JSON schemas of its tools"""
        self.messages = True
        self.gives_rewards = bool(self.rewards) or any(
            callable(getattr(environment, name, None)) for name in ('get_reward', 'turn_reward')
        )
        self._free: deque[_Reusable] = deque([(environment, None)])

    def __call__(self) -> ToolEnvironment:
        try:
            environment, loop = self._free.pop()
        except IndexError:
            environment, loop = self.make(), None
        return ToolEnvironment(environment, self.rewards, self._free, loop)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {'_free': deque()}


class ToolEnvironment:
    """An object with tools as an `Environment` over messages."""

    def __init__(
        self,
        environment: Any,
        rewards: Sequence[Callable[..., Any]] = (),
        free: deque[_Reusable] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.environment, self._rewards, self._free, self._loop = environment, rewards, free, loop
        self._tools = tools_of(environment)
        sources = [*rewards, *(n for n in ('get_reward', 'turn_reward') if callable(getattr(environment, n, None)))]
        self._alone = len(sources) == 1
        self._busy = False
        self._columns: dict[str, Any] = {}
        self._prompt: list[dict[str, Any]] = []
        self._turns: list[dict[str, Any]] = []

    def reset(self, seed: int, **columns: Any) -> str:
        self._busy, self._columns, self._turns = True, columns, []
        parameters = inspect.signature(self.environment.reset).parameters
        given = ({'seed': seed} if 'seed' in parameters else {}) | columns
        if 'prompt' not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given.pop('prompt', None)
        observation = self._value(self.environment.reset(**given))
        observation = '' if observation is None else _text(observation)
        self._prompt = joined(columns.get('prompt') or [], observation)
        self._busy = False
        return observation

    def step(self, response: str | Mapping[str, Any]) -> tuple[Any, dict[str, float], bool, bool, dict[str, Any]]:
        """`response`: a message of the assistant, with its 'tool_calls' if it has any, or a text."""
        self._busy = True
        message: dict[str, Any] = {'role': 'assistant', 'content': response}
        if isinstance(response, Mapping):
            message = dict(response)
        self._turns.append(message)
        calls: list[Any] = list(message.get('tool_calls') or ())
        results = self._call(calls)
        self._turns += results
        rewards = self._named('turn_reward') | ({} if calls else self._final())
        self._busy = False
        cut = bool(message.get('truncated'))  # within its text or a call
        return results if calls else '', rewards, not calls and not cut, not calls and cut, {}

    def finish(self) -> dict[str, float]:
        """Returns the rewards of an episode that was cut off."""
        return self._final()

    def close(self) -> None:
        if self._free is not None and not self._busy:  # an object that hangs or has raised is not reused
            self._free.append((self.environment, self._loop))
        elif self._loop is not None:
            self._loop.close()
        self._free = None

    # ------------------------------------------------------------------ tools

    def _call(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Runs calls and returns messages with the results: of functions in the order of the calls, then of coroutine
        functions, which run concurrently."""
        results: list[tuple[str, str, Any]] = []
        waiting: list[tuple[str, str, Any]] = []
        done = sum(message['role'] == 'tool' for message in self._turns)
        for number, call in enumerate(calls, done):
            function = call.get('function') or {}
            name, key = str(function.get('name', call.get('name', 'unknown'))), str(call.get('id') or f'{number:09d}')
            try:
                if call.get('type', 'function') != 'function':
                    raise ValueError(f'Unsupported tool call type: {call["type"]}')
                if name not in self._tools:
                    raise ValueError(f'Tool {name} not found.')
                value = self._tools[name](**function['arguments'])
                (waiting if inspect.isawaitable(value) else results).append((name, key, value))
            except Exception as error:
                results.append((name, key, {'error': str(error)}))
        if waiting:
            outcomes = self._value(_together([value for _, _, value in waiting]))
            for (name, key, _), outcome in zip(waiting, outcomes, strict=True):
                failed = isinstance(outcome, Exception)
                results.append((name, key, {'error': str(outcome)} if failed else outcome))
        return [
            {'role': 'tool', 'name': name, 'tool_call_id': key, 'content': _text(value)} for name, key, value in results
        ]

    def _value(self, value: Any) -> Any:
        """Runs a coroutine and returns its result; returns anything else unchanged. An environment has one event loop,
        because its connections are bound to it."""
        if not inspect.isawaitable(value):
            return value

        async def outcome() -> Any:
            return await value

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(outcome())

    # ------------------------------------------------------------------ rewards

    def _final(self) -> dict[str, float]:
        rewards = self._named('get_reward')
        for function in self._rewards:
            columns = {name: [value] for name, value in self._columns.items() if name != 'prompt'}
            values = self._value(
                function(prompts=[self._prompt], completions=[self._turns], environments=[self.environment], **columns)
            )
            if len(values) != 1:
                raise ValueError(f'{function.__name__} returned {len(values)} rewards for one episode')
            if values[0] is not None:
                rewards['reward' if self._alone else function.__name__] = values[0]
        return rewards

    def _named(self, method: str) -> dict[str, Any]:
        """Returns the rewards of a method by name; none if there is no such method, or it returns None."""
        if not callable(getattr(self.environment, method, None)):
            return {}
        value = self._value(getattr(self.environment, method)())
        if value is None or isinstance(value, Mapping):
            return dict(value or {})
        name = type(self.environment).__name__ if method == 'get_reward' else method
        return {'reward' if self._alone else name: value}


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """Returns the public methods of an object, except those of this interface."""
    methods = inspect.getmembers(environment, predicate=inspect.ismethod)
    return {name: method for name, method in methods if not name.startswith('_') and name not in RESERVED}


def _schema(owner: str, name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:
        reason = ' '.join(str(error).split())
        raise ValueError(
            f'{owner}.{name} is a tool, which needs type hints and a docstring with Args (or a name that begins with '
            f'an underscore): {reason}'
        ) from error


def _text(result: Any) -> str:
    """Returns a result as the text for the model."""
    if not isinstance(result, list) or not all(isinstance(part, Mapping) and 'type' in part for part in result):
        return str(result)
    kinds = sorted({str(part['type']) for part in result} - {'text'})
    if kinds:
        return str({'error': f'a result of type {", ".join(kinds)} cannot be shown'})
    return ''.join(str(part.get('text', '')) for part in result)


async def _together(values: list[Any]) -> list[Any]:
    return await asyncio.gather(*values, return_exceptions=True)
