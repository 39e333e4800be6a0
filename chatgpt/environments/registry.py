"""Environments by name: `games:countdown`, `package.module:Class`, `path/to/file.py:Class`, and those of other systems
by the prefixes of `adapters`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from chatgpt.environments.adapters import ADAPTERS, adapted
from chatgpt.environments.base import EnvironmentFactory
from chatgpt.registry import load_object

ENVIRONMENTS: dict[str, str] = {}
"""short names, and the `module:Class` that each stands for"""


def find_environment(spec: Any, options: Mapping[str, Any] | None = None) -> EnvironmentFactory:
    """What makes the environment of one episode: of a name, a class, or a function without arguments. A class of
    another system is adapted.

    Args:
        options: keyword arguments of the class.

    Raises:
        ValueError: there is no such name; it is nothing that can be called; or a tool of it cannot be shown to a model.
    """
    kind, _, rest = spec.partition(':') if isinstance(spec, str) else ('', '', '')
    if kind in ADAPTERS and spec not in ENVIRONMENTS:
        return ADAPTERS[kind](rest, options or {})
    found = load_object(ENVIRONMENTS.get(spec, spec)) if isinstance(spec, str) else spec
    if not callable(found):
        raise ValueError(
            f'environment={spec!r} cannot be called; give a class, or a function that makes an environment'
        )
    return adapted(partial(found, **options) if options else found)
