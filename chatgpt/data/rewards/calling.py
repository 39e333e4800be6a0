"""Calls reward and metric functions of texts: instantiates a class, passes arguments by name, awaits a coroutine, and
checks that there is one value per response.

`call` passes arguments by the names of the function's parameters:

- `prompts`; `responses`, `completions` or `outputs` (all three are the responses); `samples`, each a prompt joined with
  its response; and any column of the data.
- If none of responses, completions, outputs and samples is a parameter, the first two get prompts and responses.
- `**columns` gets the other columns, and the prompts if no parameter does; with `samples` or `outputs` everything that
  trlX passes; all texts if no parameter takes the responses.

`chatgpt.trainer.experience.scorers` lists the allowed values.
"""

from __future__ import annotations

import functools
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatgpt.names import TEXTS, hint

if TYPE_CHECKING:
    import asyncio

_loops: list[asyncio.AbstractEventLoop] = []
"""the event loop of all calls: a client that a reward function keeps open is bound to the loop of its first use"""


def made(reward: Any) -> Any:
    """Instantiates a class of rewards; returns anything else unchanged.

    Raises:
        ValueError: the class has no `__call__` and no `score`, needs arguments, or raised.
    """
    if not isinstance(reward, type):
        return reward
    # A class itself is callable, so `callable` does not tell whether its objects are.
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


def call(
    function: Callable[..., Any],
    prompts: Sequence[str],
    responses: Sequence[str],
    columns: Mapping[str, Any],
    *,
    separator: str = '',
) -> Any:
    """Calls `function` with texts and columns by the rules above, and awaits a coroutine. `separator` joins prompt and
    response in `samples`."""
    joined = [prompt + separator + response for prompt, response in zip(prompts, responses, strict=True)]
    texts = {'prompts': prompts, 'responses': responses, 'completions': responses, 'outputs': responses}
    positional, named = _arranged(function, texts | {'samples': joined}, columns)
    return awaited(function(*positional, **named))


def check_call(function: Callable[..., Any], columns: Collection[str], source: str) -> None:
    """Checks without a call whether `function` accepts data of these columns. An object may add its own checks in
    `check_columns(columns, source)`.

    Raises:
        ValueError: it needs an argument that is not a column, takes no texts, or a text argument has the name of a
            column; the message begins with `source`.
    """
    if (of_its_own := getattr(function, 'check_columns', None)) is not None:
        of_its_own(columns, source)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    positional, named = _arranged(function, dict.fromkeys(TEXTS), dict.fromkeys(columns))
    parameters = signature.parameters.values()
    for parameter, what in zip(parameters, ('prompts', 'responses')[: len(positional)], strict=False):
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in columns:
            raise ValueError(
                f'{source}: its argument {parameter.name!r} gets the {what} by its place, and the data have a column '
                f'{parameter.name!r} too; call the argument {what}'
            )
    missing = [
        p.name
        for p in list(parameters)[len(positional) :]
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in named
    ]
    if missing:
        check_column(missing[0], columns, source)
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        name = getattr(function, '__name__', 'fn')
        raise ValueError(
            f'{source}: {error}; it is called as {name}(prompts, responses), with the other columns by name'
        ) from None


def check_column(name: str, columns: Collection[str], source: str) -> None:
    """Raises ValueError if the data has no such column."""
    if name not in columns:
        there = f'there are {", ".join(sorted(columns))}' if columns else 'there are none'
        raise ValueError(f'{source} needs a column {name!r} beside the prompts; {there}{hint(name, columns)}')


def _arranged(
    function: Callable[..., Any], texts: Mapping[str, Any], columns: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns positional and keyword arguments of a call."""
    first_two = [texts['prompts'], texts['responses']]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return first_two, dict(columns)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    spreads = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given = dict(columns) | {name: text for name, text in texts.items() if name in names}
    spread: Collection[str] = ()
    by_place: list[Any] = []
    if names & {'samples', 'outputs'} and 'responses' not in names:  # trlX's
        spread = ('samples', 'prompts', 'outputs')
    elif names & {'responses', 'completions'}:
        spread = ('prompts',)
        if places[1:2] == ['responses'] and places[0] not in given:  # fn(texts, responses)
            by_place, spread = first_two[:1], ()
    elif spreads and len(places) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        spread = TEXTS
    else:
        by_place = first_two
        given = {name: value for name, value in columns.items() if name not in places[:2]}
    given |= {name: texts[name] for name in spread if spreads}
    return by_place, given if spreads else {name: value for name, value in given.items() if name in names}


def awaited(value: Any) -> Any:
    """Runs a coroutine and returns its result; returns anything else unchanged."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def outcome() -> Any:
        return await value

    def run() -> Any:
        if not _loops or _loops[-1].is_running():  # still running an abandoned call
            _loops.append(asyncio.new_event_loop())
        return _loops[-1].run_until_complete(outcome())

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1) as other_thread:  # a notebook's thread already runs a loop
        return other_thread.submit(run).result()


def one_each(values: Any, count: int, source: str, error: Callable[[str], Exception] = ValueError) -> list[Any]:
    """Returns the result of a reward function as a list with one value per response. Raises `error` for a text, a dict,
    a set, or another length."""
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


def describe_error(error: BaseException) -> str:
    """Describes an exception with the innermost line of the user's own code in its traceback: 'KeyError: 'x', at
    rewards.py:12'."""
    text = f'{type(error).__name__}: {error}' if str(error) else type(error).__name__
    installed = (sysconfig.get_path(name) for name in ('stdlib', 'platstdlib', 'purelib', 'platlib'))
    not_theirs = (*(f'{folder}{os.sep}' for folder in (Path(__file__).parents[2], *installed)), '<frozen')
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(not_theirs):
            return f'{text}, at {frame.filename}:{frame.lineno}'
    return text


def place_of(function: Any) -> str:
    """Returns 'at rewards.py:12' for the definition of a function or of an object's class."""
    function = function.func if isinstance(function, functools.partial) else function
    thing = inspect.unwrap(function) if inspect.isroutine(function) else type(function)
    try:
        return f'at {inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}'
    except (OSError, TypeError):
        return f'in {getattr(thing, "__module__", "an unknown place")}'
