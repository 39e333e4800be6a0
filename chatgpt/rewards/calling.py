"""Calling a reward: a class is made first, a coroutine is awaited, and what comes back is one value per response.

Left out: what a value may be (`chatgpt.experience.scorers`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_loops: list[asyncio.AbstractEventLoop] = []
"""the loop of all calls: a client that a reward function keeps open belongs to the loop that it was first used in"""


def made(reward: Any) -> Any:
    """An object of a class whose objects are rewards; anything else as it is.

    Raises:
        ValueError: the class has no `__call__` and no `score`, needs arguments, or raised.
    """
    if not isinstance(reward, type):
        return reward
    # A class is callable itself, so what counts is what its body and bases define.
    if not any(name in vars(base) for base in reward.__mro__ for name in ('__call__', 'score')):
        raise ValueError(f'{reward.__qualname__} is a class whose objects cannot be called as fn(prompts, responses)')
    try:
        inspect.signature(reward).bind()
    except TypeError as error:
        raise ValueError(
            f'{reward.__qualname__} is a class with arguments of its own ({error}); give an object made of it'
        ) from None
    except ValueError:  # a class without a signature
        pass
    try:
        return reward()
    except Exception as error:
        raise ValueError(f'making {reward.__qualname__}() raised {type(error).__name__}: {error}') from error


def awaited(value: Any) -> Any:
    """What a coroutine comes to; anything else as it is."""
    if not inspect.isawaitable(value):
        return value

    async def outcome() -> Any:
        return await value

    def run() -> Any:
        if not _loops or _loops[-1].is_running():  # of a call that was given up
            _loops.append(asyncio.new_event_loop())
        return _loops[-1].run_until_complete(outcome())

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1) as other_thread:  # a notebook's thread runs a loop of its own
        return other_thread.submit(run).result()


def one_each(values: Any, count: int, source: str, error: Callable[[str], Exception] = ValueError) -> list[Any]:
    """The list that a reward function returned, one value per response. A text, a dict or a set is none: it raises
    `error`."""
    if hasattr(values, 'tolist'):  # tensors and arrays
        values = values.tolist()
    kind = type(values).__name__
    if isinstance(values, (str, bytes, Mapping, Set)):
        raise error(f'{source} returned a {kind}; return a list with one score per response')
    try:
        values = list(values)
    except TypeError:
        raise error(f'{source} returned {kind}; return a list with one score per response') from None
    if len(values) != count:
        raise error(f'{source} returned {len(values)} scores for {count} responses; return one per response')
    return values


def told(error: BaseException) -> str:
    """'KeyError: 'x', at rewards.py:12': an exception and the innermost line of the user's own code that it came
    through."""
    text = f'{type(error).__name__}: {error}' if str(error) else type(error).__name__
    installed = (sysconfig.get_path(name) for name in ('stdlib', 'platstdlib', 'purelib', 'platlib'))
    not_theirs = (*(f'{folder}{os.sep}' for folder in (Path(__file__).parents[1], *installed)), '<frozen')
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(not_theirs):
            return f'{text}, at {frame.filename}:{frame.lineno}'
    return text


def place_of(function: Any) -> str:
    """'at rewards.py:12', where a function or the class of an object is defined."""
    function = function.func if isinstance(function, functools.partial) else function
    thing = inspect.unwrap(function) if inspect.isroutine(function) else type(function)
    try:
        return f'at {inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}'
    except (OSError, TypeError):
        return f'in {getattr(thing, "__module__", "an unknown place")}'
