"""A checksum of a reward function, for telling whether a resumed run goes on with another one.

It covers the source of the function or class, and the values that it holds: arguments of a `partial`, attributes of an
object, variables of a closure. It is taken before the first call, for a function may count its calls. What the function
calls is not covered.
"""

from __future__ import annotations

import functools
import inspect
import re
import tokenize
import zlib
from collections.abc import Mapping
from typing import Any


def checksum(function: Any) -> str:
    """Of what scores alike, as far as can be seen without calling it; '' where nothing can be seen."""
    values: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        values |= {'args': function.args, **function.keywords}
        function = function.func
    if inspect.isfunction(function):
        values |= inspect.getclosurevars(function).nonlocals
        thing: Any = function
    else:
        owner = getattr(function, '__self__', function)
        values |= getattr(owner, '__dict__', {})
        thing = owner if isinstance(owner, type) else type(owner)
    parts = [_source(thing), *(f'{name}={text}' for name, value in sorted(values.items()) if (text := _plain(value)))]
    text = '\n'.join(parts)
    return f'{zlib.crc32(text.encode()):08x}' if text else ''


def _source(thing: Any) -> str:
    """Of a function or class; its name where there is none."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # none, or a file that is not its source
        return str(getattr(thing, '__qualname__', ''))


def _plain(value: Any) -> str:
    """Of a value whose text says what it is; of any other '', for an address in memory says nothing."""
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return repr(value)
    if isinstance(value, re.Pattern):
        return f'{value.pattern!r}, {value.flags}'
    if isinstance(value, (list, tuple)):
        return str([_plain(v) for v in value])
    if isinstance(value, (set, frozenset)):
        return str(sorted(map(_plain, value)))
    if isinstance(value, Mapping):
        return str(sorted((str(k), _plain(v)) for k, v in value.items()))
    return _source(value) if inspect.isfunction(value) or isinstance(value, type) else ''
