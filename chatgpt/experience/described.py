"""A checksum of a reward function, for telling whether a resumed run goes on with another one.

It covers the function's source, that of the user's functions and classes that it refers to, constants of their modules
(by their capitals), and the values that it holds: arguments of a `partial`, attributes of an object, variables of a
closure. It is taken before the first call, for a function may count its calls. Left out: what it reads elsewhere, such
as a file or a service.
"""

from __future__ import annotations

import functools
import inspect
import re
import sysconfig
import tokenize
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

_INSTALLED = tuple({sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib')})


def checksum(function: Any) -> str:
    """Of what scores alike, as far as can be seen without calling it; '' where nothing can be seen."""
    parts = '\n'.join(_parts(function, set()))
    return f'{zlib.crc32(parts.encode()):08x}' if parts else ''


def _parts(thing: Any, seen: set[int]) -> Iterator[str]:
    """Sources and values behind a callable, each once, in an order that its code decides."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, functools.partial):
        yield from _parts(thing.func, seen)
        yield from _values({'args': thing.args, **thing.keywords}, seen)
    elif inspect.ismethod(thing):
        yield from _parts(thing.__func__, seen)
        yield from _parts(thing.__self__, seen)
    elif inspect.isfunction(thing):
        yield _source(thing)
        yield from _values(_referred(thing), seen)
    elif isinstance(thing, type):
        yield _source(thing)
        for base in thing.__bases__:
            if _is_of_a_user(base):
                yield from _parts(base, seen)
        for member in vars(thing).values():
            if inspect.isfunction(member) and _is_of_a_user(thing):
                yield from _values(_referred(member), seen)
    elif not isinstance(thing, types.BuiltinFunctionType):
        yield from _parts(type(thing), seen)
        yield from _values(getattr(thing, '__dict__', {}), seen)


def _referred(function: types.FunctionType) -> dict[str, Any]:
    """What a function, with the lambdas and comprehensions inside it, takes from its module and its closure."""
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    found = {name: value for name, value in function.__globals__.items() if name in names}
    found = {name: value for name, value in found.items() if callable(value) or name.isupper()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def _values(values: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    for name, value in sorted(values.items()):
        if callable(value) and not inspect.isbuiltin(value):
            if _is_of_a_user(value):
                yield from _parts(value, seen)
        elif (text := _plain(value)) is not None:
            yield f'{name}={text}'


def _plain(value: Any) -> str | None:
    """Of a value whose text says what it is; of any other None, for an address in memory says nothing."""
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return repr(value)
    if isinstance(value, re.Pattern):
        return f'{value.pattern!r}, {value.flags}'
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_plain(v) for v in value]
        return str(sorted(map(str, items)) if isinstance(value, (set, frozenset)) else items)
    if isinstance(value, Mapping):
        return str(sorted((str(k), _plain(v)) for k, v in value.items()))
    return None


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # none, or a file that is not its source
        return str(getattr(thing, '__qualname__', ''))


def _is_of_a_user(thing: Any) -> bool:
    """Whether it comes neither with Python, nor with this package or an installed one."""
    if str(getattr(thing, '__module__', '')).partition('.')[0] == 'chatgpt':
        return False
    try:
        file = inspect.getsourcefile(thing if inspect.isroutine(thing) or isinstance(thing, type) else type(thing))
    except TypeError:
        return False
    return file is not None and not file.startswith(_INSTALLED)
