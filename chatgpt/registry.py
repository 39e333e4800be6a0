"""Registries of what a setting chooses by name, such as advantage estimators, policy losses and strategies. Users add
their own entries, or name them as `module:name`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections import UserDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from chatgpt.names import hint

T = TypeVar('T')
NAMED = 12
"""most names of a module that an error lists"""


class Registry(UserDict[str, T]):
    """Entries by name. `ESTIMATORS['mine'] = Estimator(...)` adds one.

    An entry given as 'module:name' is imported on first use, so that names can be listed without importing torch.

    Args:
        what: the setting that chooses an entry, for error messages.
        kind: the class of the entries.
    """

    def __init__(self, what: str, kind: type[T], entries: Mapping[str, T | str]) -> None:
        super().__init__(entries)  # type: ignore[arg-type]
        self.what, self.kind = what, kind

    def __getitem__(self, name: str) -> T:
        if isinstance(entry := self.data[name], str):
            self[name] = imported(entry)
        return self.data[name]

    def find(self, name: str) -> T:
        """Returns the entry of that name, or the object at `package.module:name` or `path/to/file.py:name`.

        Raises:
            ValueError: no such entry, or an object of another class.
        """
        if name in self:
            return self[name]
        if not isinstance(name, str) or ':' not in name:
            raise ValueError(
                f'{self.what}={name!r} is not known; choose one of {", ".join(self.registered())}, or '
                f'module:name{hint(str(name), self)}'
            )
        self[name] = self.admit(name, load_object(name))
        return self[name]

    def registered(self) -> list[str]:
        """Returns the registered names, without `module:name` objects that `find` has loaded."""
        return [name for name in self if ':' not in name]

    def admit(self, name: str, found: Any) -> T:
        """Returns the entry for an object loaded from `module:name`. Raises ValueError if it is of another class."""
        if not isinstance(found, self.kind):
            raise ValueError(f'{name!r} is a {type(found).__name__}, no {self.kind.__name__}, which {self.what} needs')
        return found


def late(spec: str) -> Callable[..., Any]:
    """Returns a function that imports the function or class at 'module:name' when it is first called."""
    return lambda *args, **kwargs: imported(spec)(*args, **kwargs)


def imported(spec: str) -> Any:
    """Imports and returns the object at 'module:name' of an installed package."""
    module, _, name = spec.partition(':')
    return getattr(importlib.import_module(module), name)


def load_object(spec: str) -> Any:
    """Returns the object at 'package.module:name' or 'path/to/file.py:name'.

    Raises:
        ValueError: `spec` is not of that form, or there is no such module or name.
    """
    module_name, _, name = spec.rpartition(':')
    if not module_name or not name:
        raise ValueError(f'{spec!r} names nothing; write module:name or path/to/file.py:name')
    module = load_module(module_name, spec)
    if not hasattr(module, name):
        there = [n for n, value in vars(module).items() if not n.startswith('_') and not inspect.ismodule(value)]
        listed = ', '.join(there[:NAMED]) or 'nothing'
        raise ValueError(f'{spec!r}: {module_name} has no {name!r}{hint(name, there)}; there is {listed}')
    return getattr(module, name)


def load_module(name: str, spec: str) -> types.ModuleType:
    """Imports a module by its dotted name, also from the working directory, or by a path that ends in .py.

    Raises:
        ValueError: there is no such file, or importing it raised; the message begins with `spec`.
    """
    path = Path(name) if name.endswith('.py') else None
    if path is not None and not path.is_file():
        raise ValueError(f'{spec!r}: there is no file {path}')
    folder = str(path.resolve().parent) if path is not None else os.getcwd()
    sys.path.insert(0, folder)  # the file may import its neighbours
    try:
        if path is None:
            return importlib.import_module(name)
        known = sys.modules.get(path.stem)  # a file named like a loaded module must not replace it
        taken = known is not None and getattr(known, '__file__', None) != str(path)
        module_spec = importlib.util.spec_from_file_location(f'_user_{path.stem}' if taken else path.stem, path)
        assert module_spec is not None and module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module
        module_spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        raise ValueError(
            f'{spec!r}: importing it raised {type(error).__name__}: {" ".join(str(error).split())}'
        ) from error
    finally:
        sys.path.remove(folder)
