"""The other systems and look-ups in their tables.

The module of each system has two tables: `SERVED` maps a name in the system's package to 'module:attribute', `INSTEAD`
maps a name that is not served to what to write instead. The runner and the checker read nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from chatgpt.names import near


def at(places: str, module: str, names: str) -> dict[str, str]:
    """Returns rows of `SERVED`: the names of our module at each place where versions of a system have them. The place
    '.' is the system's package."""
    return {f'{place}.{name}'.lstrip('.'): f'{module}:{name}' for place in places.split() for name in names.split()}


def lookup(
    package: str, served: Mapping[str, str], instead: Mapping[str, str], otherwise: str = ''
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module with both tables of a package. `otherwise`: what to write instead of other
    names."""

    def find(name: str) -> Any:
        if name in served:
            return load(served[name])
        if name in instead:  # `from ... import` hides the text of an AttributeError
            raise ImportError(f'{package}.{name} is not served; instead: {instead[name]}')
        if otherwise and not name.startswith('__'):
            raise ImportError(f'{package}.{name} is not served; instead: {otherwise}')
        raise AttributeError(f'chatgpt_compat.{package} has no attribute {name!r}')

    return find


def as_modules(package: str, served: Mapping[str, str], instead: Mapping[str, str]) -> None:
    """Makes the modules of a table importable within our package, such as `chatgpt_compat.trlx.data.configs`, except
    where we have a file."""
    inner = {name.rpartition('.')[0] for name in served}
    inner = {'.'.join(name.split('.')[:end]) for name in inner for end in range(1, name.count('.') + 2) if name}
    inner |= {name for name in instead if name.rpartition('.')[0] in inner and name.rpartition('.')[2].islower()}
    folder = Path(__file__).parent / package
    for name in sorted(inner):
        place, full = folder.joinpath(*name.split('.')), f'chatgpt_compat.{package}.{name}'
        if place.with_suffix('.py').exists() or place.is_dir():
            continue
        module = ModuleType(full, f'What is served of {package}.{name}.')
        below = {
            table: {key.removeprefix(f'{name}.'): value for key, value in rows.items() if key.startswith(f'{name}.')}
            for table, rows in (('served', served), ('instead', instead))
        }
        find = lookup(f'{package}.{name}', below['served'], below['instead'], instead.get(name, ''))
        module.__dict__.update(__path__=[], __getattr__=find)
        sys.modules[full] = module
        parent = sys.modules.get(full.rpartition('.')[0])
        if parent is not None and name.rpartition('.')[2] not in vars(parent):
            setattr(parent, name.rpartition('.')[2], module)


@dataclass(frozen=True)
class System:
    """Another system.

    Args:
        package: the package that its scripts import.
        tables: our module with `SERVED` and `INSTEAD`.
        replaces: served names precede those of the installed package; if False, they are used only without one.
        before: 'our.module:function' to call before a script that uses the installed package; '' for none.
    """

    package: str
    tables: str
    replaces: bool = True
    before: str = ''

    @property
    def root(self) -> str:
        """The name of its package in `sys.modules`; ColossalAI's `chatgpt` has one apart from the library's."""
        return COLOSSALAI_CHATGPT if self.package == 'chatgpt' else self.package

    @cached_property
    def module(self) -> ModuleType:
        return importlib.import_module(self.tables)

    @property
    def served(self) -> Mapping[str, str]:
        return self.module.SERVED

    def has_module(self, name: str) -> bool:
        """Returns True if `name` is a module by the table; '' is the package itself."""
        if not name or any(key.startswith(f'{name}.') for key in self.served):
            return True
        return self.package == 'chatgpt' and name not in self.served and own_module(name) is not None

    def is_own(self, name: str) -> bool:
        """Returns True if a name of `chatgpt` is the library's own and not in `INSTEAD`."""
        module, _, attribute = name.rpartition('.')
        is_refused = name in self.module.INSTEAD
        return self.package == 'chatgpt' and not is_refused and hasattr(own_module(module), attribute)

    def names_in(self, module: str) -> list[str]:
        """Returns the names that are served directly in a module."""
        start = f'{module}.' if module else ''
        rest = (key.removeprefix(start) for key in self.served if key.startswith(start))
        return sorted({name for name in rest if '.' not in name})

    def instead(self, name: str) -> str:
        """Returns what to write instead of a name that is not served: the entry for it, for its module, or for the
        same name in another module; else the nearest served names."""
        parts = name.split('.')
        last = parts[-1]
        for key in [*('.'.join(parts[:end]) for end in range(len(parts), 0, -1)), last]:
            if (found := self.module.INSTEAD.get(key)) is not None:
                return f'instead: {found}'
        there = sorted(f'{self.package}.{key}' for key in self.served if key.rpartition('.')[2] == last)
        close = there or [f'{self.package}.{key}' for key in near(name, self.served)]
        return f'served are {", ".join(close[:3])}' if close else f'see `{self.tables}` for the names that are served'


COLOSSALAI_CHATGPT = 'colossalai_chatgpt'
SYSTEMS: dict[str, System] = {
    system.package: system
    for system in (
        System('trl', 'chatgpt_compat.trl'),
        System('trlx', 'chatgpt_compat.trlx'),
        System('chatgpt', 'chatgpt_compat.colossalai'),
        System('coati', 'chatgpt_compat.coati'),
        System(
            'colossalai',
            'chatgpt_compat.colossalai.package',
            replaces=False,
            before='chatgpt_compat.colossalai.package:use_without_gpu',
        ),
    )
}


def system_of(name: str) -> System | None:
    """Returns the system of a dotted name by its first part, or None; None also if the system's tables are missing."""
    system = SYSTEMS.get(name.partition('.')[0])
    return system if system is not None and importlib.util.find_spec(system.tables) is not None else None


def load(target: str) -> Any:
    """Returns the object of 'our.module:attribute', or the module of 'our.module'."""
    module, _, attribute = target.partition(':')
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def own_module(name: str) -> ModuleType | None:
    """Imports and returns the library's own module `chatgpt.<name>`, or None if there is none."""
    full = f'chatgpt.{name}' if name else 'chatgpt'
    try:
        found = importlib.util.find_spec(full)
    except ImportError:
        return None
    return None if found is None else importlib.import_module(full)
