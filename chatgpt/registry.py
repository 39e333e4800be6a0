"""Things chosen by name: advantage estimators, policy losses, strategies. A user's own are added, or named as
`module:name`.

Left out: the entries themselves, which stand beside what they are.
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
"""names of a module that an error lists"""


class Registry(UserDict[str, T]):
    """Entries by name. `ESTIMATORS['mine'] = Estimator(...)` adds one.

    An entry that is given as 'module:name' is imported when it is asked for, so names can be listed without torch.

    Args:
        what: an entry in the field's words, for error messages.
        kind: the class of an entry.
    """

    def __init__(self, what: str, kind: type[T], entries: Mapping[str, T | str]) -> None:
        super().__init__(entries)  # type: ignore[arg-type]
        self.what, self.kind = what, kind

    def __getitem__(self, name: str) -> T:
        if isinstance(entry := self.data[name], str):
            self[name] = imported(entry)
        return self.data[name]

    def find(self, name: str) -> T:
        """The entry of that name, or the object that `package.module:name` or `path/to/file.py:name` names.

        Raises:
            ValueError: there is none; lists those that there are. Or what is named is not of the kind.
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
        """The registered names, without those of `module:name` objects that were asked for."""
        return [name for name in self if ':' not in name]

    def admit(self, name: str, found: Any) -> T:
        """The entry that an object named `module:name` is."""
        if not isinstance(found, self.kind):
            raise ValueError(f'{name!r} is a {type(found).__name__}, no {self.kind.__name__}, which {self.what} needs')
        return found


def late(spec: str) -> Callable[..., Any]:
    """The function or class that 'module:name' names, imported when it is first called."""
    return lambda *args, **kwargs: imported(spec)(*args, **kwargs)


def imported(spec: str) -> Any:
    """The object of an installed package that 'module:name' names."""
    module, _, name = spec.partition(':')
    return getattr(importlib.import_module(module), name)


def load_object(spec: str) -> Any:
    """What 'package.module:name' or 'path/to/file.py:name' names.

    Raises:
        ValueError: it is not of that form, or there is no such module or name.
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
    """The module of a dotted name, looked for in the working directory too, or of a path that ends in .py.

    Raises:
        ValueError: there is no such file, or importing it raised; begins with `spec`.
    """
    path = Path(name) if name.endswith('.py') else None
    if path is not None and not path.is_file():
        raise ValueError(f'{spec!r}: there is no file {path}')
    folder = str(path.resolve().parent) if path is not None else os.getcwd()
    sys.path.insert(0, folder)  # what stands beside the file can be imported by it
    try:
        if path is None:
            return importlib.import_module(name)
        known = sys.modules.get(path.stem)  # a file called like a module that is loaded must not take its place
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
