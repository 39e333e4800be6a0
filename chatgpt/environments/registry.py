"""Environments by name: `games:countdown`, `package.module:Class`, `path/to/file.py:Class`, and those of other systems
with the prefixes of `adapters`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from chatgpt.environments.adapters import ADAPTERS, adapted
from chatgpt.environments.base import EnvironmentFactory
from chatgpt.environments.host import name_of
from chatgpt.names import hint
from chatgpt.registry import load_object

_GAMES = 'chatgpt.environments.games'
ENVIRONMENTS: dict[str, str] = {
    'games:countdown': f'{_GAMES}:Countdown',
    'games:calculator': f'{_GAMES}:Calculator',
    'games:tictactoe': f'{_GAMES}:TicTacToe',
    'games:calculator_tools': f'{_GAMES}:CalculatorTools',
}
"""short names, each with its `module:Class`"""


def find_environment(spec: Any, options: Mapping[str, Any] | None = None) -> EnvironmentFactory:
    """Returns the factory for a name, a class, or a function without arguments. A class of another system is adapted.

    Args:
        options: keyword arguments of the class.

    Raises:
        ValueError: there is no such name, it is not callable, or a tool of it has no valid schema.
    """
    kind, _, rest = spec.partition(':') if isinstance(spec, str) else ('', '', '')
    if kind in ADAPTERS and spec not in ENVIRONMENTS:
        return ADAPTERS[kind](rest, options or {})
    if isinstance(spec, str):
        return adapted(_named(spec, options or {}))
    found = spec
    if not callable(found):
        raise ValueError(
            f'environment={spec!r} cannot be called; give a class, or a function that makes an environment'
        )
    return adapted(partial(found, **options) if options else found)


class Named(partial):  # type: ignore[type-arg]
    """A class with its options and the name it was given by. Another process looks it up by that name, because a class
    of a file cannot be imported there."""

    spec: str

    def __reduce__(self) -> Any:
        return _named, (self.spec, self.keywords)


def _named(spec: str, options: Mapping[str, Any]) -> Named:
    if spec in ENVIRONMENTS:
        found = load_object(ENVIRONMENTS[spec])
    elif ':' not in spec or spec.startswith('games:'):
        near = hint(spec.removeprefix('games:'), [name.removeprefix('games:') for name in ENVIRONMENTS], 'games:')
        raise ValueError(
            f'environment={spec!r} is not known; choose one of {", ".join(ENVIRONMENTS)}, or module:Class, or '
            f'file.py:Class{near}'
        )
    else:
        found = load_object(spec)
    if not callable(found):
        raise ValueError(
            f'environment={spec!r} cannot be called; give a class, or a function that makes an environment'
        )
    made = Named(found, **options)
    path, _, name = spec.rpartition(':')
    made.spec = f'{Path(path).resolve()}:{name}' if path.endswith('.py') else spec
    return made


def described(environment: EnvironmentFactory) -> dict[str, Any]:
    """Describes a factory, so that a resume detects another one."""
    environment = getattr(environment, 'make', environment)  # inside an adapter
    made = getattr(environment, 'func', environment)
    module = getattr(made, '__module__', type(made).__module__)
    given = getattr(environment, 'keywords', {})
    options = {name: v if isinstance(v, (str, int, float, bool)) else repr(v) for name, v in given.items()}
    return {'name': name_of(environment), 'module': module, 'options': options}


def make_environment(factory: EnvironmentFactory) -> Any:
    """Makes one environment.

    Raises:
        ValueError: of one line: the factory does not accept these options, or its result has no `reset` and `step`.
    """
    name, options = name_of(factory), getattr(factory, 'keywords', {})
    try:
        environment = factory()
    except ValueError as error:
        raise ValueError(f'environment {name}: {" ".join(str(error).split())}') from None
    except TypeError as error:
        known = _option_names(getattr(factory, 'func', factory))
        unknown = next((option for option in options if option not in known), None)
        if unknown is None:
            raise ValueError(f'environment {name} cannot be made: {error}') from None
        near = hint(unknown, known) or f'; it has {", ".join(known) or "none"}'
        raise ValueError(f'environment {name} has no option {unknown!r}{near}') from None
    missing = [method for method in ('reset', 'step') if not callable(getattr(environment, method, None))]
    if missing:
        raise ValueError(
            f'environment {name} has no {" and no ".join(missing)}; an environment has reset(seed, **columns) and '
            'step(response)'
        )
    return environment


def _option_names(factory: Any) -> list[str]:
    """Returns keyword arguments of a function, or of a class and the classes that it passes them to."""
    makers = (
        [vars(c)['__init__'] for c in factory.__mro__ if '__init__' in vars(c)]
        if isinstance(factory, type)
        else [factory]
    )
    names: dict[str, None] = {}
    for maker in makers:
        try:
            parameters = list(inspect.signature(maker).parameters.values())
        except (TypeError, ValueError):  # a builtin without a signature
            break
        own = parameters[1:] if isinstance(factory, type) else parameters
        names |= dict.fromkeys(p.name for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return list(names)
