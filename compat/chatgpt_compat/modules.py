"""Modules with the names of other systems' packages: served names come from the tables, others from the installed
package.

`Finder` is first in `sys.meta_path`. The installed package is imported only when a name is requested that is not
served, so a package that cannot be imported here does no harm.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from chatgpt_compat.tables import COLOSSALAI_CHATGPT, SYSTEMS, System, load, own_module, system_of


class NotServed(ImportError):
    """A name that is neither served nor installed; the message says what to write instead."""


def not_served(system: System, name: str, why: str = '') -> str:
    full = f'{system.package}.{name}'
    if system.package == 'chatgpt':
        return f'{full} is not served; {system.instead(name)}'
    missing = why or (
        f'the installed {system.package} has no such name'
        if installed(system.package) is not None
        else f'no {system.package} is installed'
    )
    return f'{full} is not served, and {missing}; {system.instead(name)}'


def installed(name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """Returns the spec of a module that the other finders give, or None."""
    for finder in sys.meta_path:
        if not isinstance(finder, Finder) and (spec := finder.find_spec(name, path, None)) is not None:
            return spec
    return None


class ServedModule(ModuleType):
    """A module of another system, which looks up a name on access: in the table, then in the installed package.

    The installed module is executed in this object, so that its submodules, which import one another by name, find
    the names that they expect.
    """

    def __init__(self, name: str, system: System, spec: ModuleSpec | None) -> None:
        super().__init__(name, f'What chatgpt serves of {name}.')
        inner = name.partition('.')[2]
        self.__dict__.update(
            _system=system,
            _prefix=f'{inner}.' if inner else '',
            _spec=spec,
            _others=[],
            __all__=system.names_in(inner),
            __path__=list(spec.submodule_search_locations or ()) if spec is not None else [],
        )

    def __getattr__(self, name: str) -> Any:
        system, key = self.__dict__['_system'], self.__dict__['_prefix'] + name
        if key in system.served:
            value = self.__dict__[name] = load(system.served[key])
            return value
        if name.startswith('__') and name != '__version__':  # inspecting all modules must not load a package
            raise AttributeError(f'module {self.__name__!r} has no attribute {name!r}')
        if system.has_module(key):
            return importlib.import_module(f'{self.__name__}.{name}')
        if system.is_own(key):
            return getattr(own_module(self._prefix.rstrip('.')), name)
        self._load_installed(key)
        if name in self.__dict__:
            return self.__dict__[name]
        for other in self._others:
            try:
                return other(name)
            except AttributeError:
                pass
        if name.startswith('_'):
            raise AttributeError(f'module {self.__name__!r} has no attribute {name!r}')
        raise AttributeError(not_served(system, key))

    def _load_installed(self, asked: str) -> None:
        """Executes the installed module once; served names stay."""
        spec, own = self.__dict__['_spec'], dict(self.__dict__)
        if spec is None or spec.loader is None:
            return
        self.__dict__.update(_spec=None, __file__=spec.origin, __spec__=spec, __package__=spec.parent)
        try:
            spec.loader.exec_module(self)
        except Exception as error:
            why = f'importing the installed {self.__name__} raised {type(error).__name__}: {error}'
            raise NotServed(not_served(own['_system'], asked, ' '.join(why.split()))) from error
        finally:
            found = sys.modules.get(self.__name__, self)
            sys.modules[self.__name__] = self
            lazy = self.__dict__.pop('__getattr__', None)  # the module's own must not precede the table
            for name in own['__all__']:
                self.__dict__.pop(name, None)
            own['_others'] += [lazy] if lazy is not None else []
            own['_others'] += [partial(getattr, found)] if found is not self else []  # it replaced itself
            self.__dict__.update({k: own[k] for k in ('__path__', '__all__')})


class Finder(MetaPathFinder, Loader):
    """Finds the modules in the tables of the systems; its error for other modules names what to write instead."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        root, _, inner = fullname.partition('.')
        system = next((s for s in SYSTEMS.values() if s.root == root and system_of(s.package) is not None), None)
        if system is None:
            return None
        there = installed(fullname, path)
        if system.has_module(inner) and (system.replaces or there is None):
            spec = ModuleSpec(fullname, self, is_package=True)
            spec.loader_state = (system, there)
            return spec
        if there is None and inner:
            raise NotServed(not_served(system, inner), name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ServedModule(spec.name, *spec.loader_state)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: a served module looks up its names on access."""


@contextmanager
def serving() -> Iterator[None]:
    """Makes imports of other systems' packages give their served modules inside the block, except imports of `chatgpt`
    by the library itself. Removes the imported modules at the end."""
    finder, original = Finder(), builtins.__import__

    def import_(name: str, importer: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if not level and name.partition('.')[0] == 'chatgpt' and not _is_ours(importer):
            name = COLOSSALAI_CHATGPT + name.removeprefix('chatgpt')
        return original(name, importer, local, fromlist, level)

    roots = [system.root for system in SYSTEMS.values() if system.replaces and system_of(system.package) is not None]
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition('.')[0] in roots}
    sys.meta_path.insert(0, finder)
    builtins.__import__ = import_  # type: ignore[assignment]  # its arguments are positional
    try:
        yield
    finally:
        builtins.__import__ = original
        sys.meta_path.remove(finder)
        for name in list(sys.modules):
            if name.partition('.')[0] in roots or isinstance(sys.modules[name], ServedModule):
                del sys.modules[name]
        sys.modules.update(hidden)


def _is_ours(importer: Any) -> bool:
    return importer is None or (importer.get('__name__') or '').partition('.')[0] in ('chatgpt', 'chatgpt_compat')
