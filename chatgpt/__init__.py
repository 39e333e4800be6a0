"""`chatgpt`: RLHF on Hugging Face models. Algorithms do not depend on hardware; a strategy adapts them to it.

Importing it loads nothing heavy: `chatgpt.nn`, `chatgpt.trainer` and the other packages are loaded on first use.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any

__version__ = '0.1.0'

_PACKAGES = (
    'batching',
    'data',
    'environments',
    'functional',
    'launch',
    'monitor',
    'nn',
    'plan',
    'rollout',
    'strategies',
    'testing',
    'trainer',
    'types',
)

__all__ = ['__version__', 'train', *_PACKAGES]


def on_demand(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` (PEP 562) for a package that imports its names on first use, and sets its
    `__all__` to the names imported as themselves (`from x import A as A`), which type checkers take as public.

    Names and modules are read from the imports under `if TYPE_CHECKING:` of the package's `__init__.py`, so there is
    one list for type checkers and the running program.
    """
    module = sys.modules[package]
    body = ast.parse(module.__loader__.get_source(package)).body  # type: ignore[union-attr]
    imports = [each for node in body if isinstance(node, ast.If) for each in node.body]
    found = [(node.module, alias) for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names]
    homes = {alias.name: place for place, alias in found}
    if public := sorted(alias.name for _, alias in found if alias.asname):
        module.__all__ = public  # type: ignore[attr-defined]

    def getattribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f'module {package!r} has no attribute {name!r}')
        return getattr(importlib.import_module(str(homes[name])), name)

    return getattribute, lambda: sorted({*vars(module), *homes})


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f'chatgpt.{name}')
    if name == 'train':
        return importlib.import_module('chatgpt.launch.quickstart').train
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return sorted(__all__)
