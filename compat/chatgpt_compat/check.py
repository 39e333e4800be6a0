"""Finds what a script needs without running it: names of other systems, imports, attributes of imported modules and of
objects that it makes, and keywords of calls.

Imports are resolved in the current environment, with the tables of dropped names. Names that a script composes at run
time are not followed. Imports under a condition are listed, but do not count as missing.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import textwrap
import tokenize
import warnings
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from chatgpt.names import hint
from chatgpt_compat import dropped
from chatgpt_compat.modules import installed
from chatgpt_compat.tables import SYSTEMS, System, load, system_of


@dataclass(frozen=True)
class Use:
    """A name in a script; `name` is without the system's package, '' for the package itself."""

    line: int
    system: System
    name: str
    keywords: tuple[tuple[int, str], ...] = ()
    """(line, keyword) of a call of the name"""

    @property
    def full(self) -> str:
        return f'{self.system.package}.{self.name}' if self.name else self.system.package


@dataclass(frozen=True)
class Finding:
    """One line of the checker's output."""

    line: int
    name: str
    served: bool
    what: str


def read_script(path: str | Path) -> ast.Module:
    """Returns the syntax tree of a script. Raises ValueError if the file does not exist or is not Python."""
    try:
        with tokenize.open(path) as file:
            return ast.parse(file.read(), str(path))
    except OSError as error:
        raise ValueError(f'{path}: {error.strerror}') from None
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = f', line {error.lineno}' if isinstance(error, SyntaxError) and error.lineno else ''
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f'{path}{line}: this is no Python: {" ".join(reason.split())}') from None


# ---------------------------------------------------------------------- names in a script


def uses(tree: ast.Module) -> list[Use]:
    """Returns every use of a name of another system, ordered by line."""
    aliases = dict[str, str]()
    found = list[Use]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if system_of(alias.name) is not None:
                    found.append(_use(node.lineno, alias.name))
                    bound = alias.asname or alias.name.partition('.')[0]
                    aliases[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and not node.level and system_of(node.module or '') is not None:
            for alias in node.names:
                if alias.name == '*':
                    found.append(_use(node.lineno, node.module or ''))
                    package, _, inner = (node.module or '').partition('.')
                    aliases |= {name: f'{node.module}.{name}' for name in SYSTEMS[package].names_in(inner)}
                    continue
                aliases[alias.asname or alias.name] = f'{node.module}.{alias.name}'
                found.append(_use(node.lineno, f'{node.module}.{alias.name}'))
    seen = {(use.line, use.name) for use in found}
    for use in _through_aliases(tree, aliases):
        if use.keywords or (use.line, use.name) not in seen:
            found.append(use)
            seen.add((use.line, use.name))
    return sorted(found, key=lambda use: (use.line, use.full))


def _use(line: int, dotted: str, keywords: tuple[tuple[int, str], ...] = ()) -> Use:
    system = SYSTEMS[dotted.partition('.')[0]]
    parts = dotted.split('.')[1:]
    end = next((i + 1 for i in range(len(parts)) if not system.has_module('.'.join(parts[: i + 1]))), len(parts))
    return Use(line, system, '.'.join(parts[:end]), keywords)  # the rest are attributes of a name that is no module


def _through_aliases(tree: ast.Module, aliases: dict[str, str]) -> Iterator[Use]:
    """Yields chains of attributes that begin with an imported module, and calls of imported names."""
    for node, chain, call in _chains(tree, aliases):
        dotted = '.'.join((aliases[chain[0]], *chain[1:]))
        use = _use(node.lineno, dotted)
        if call is not None and use.full == dotted:
            use = _use(node.lineno, dotted, tuple((k.value.lineno, k.arg) for k in call.keywords if k.arg))
        if use.keywords or (len(chain) > 1 and use.system.has_module(aliases[chain[0]].partition('.')[2])):
            yield use


def _chains(
    tree: ast.Module, names: Container[str]
) -> Iterator[tuple[ast.Name | ast.Attribute, tuple[str, ...], ast.Call | None]]:
    """Yields each whole chain `name.attribute...` that begins with one of `names`: its node, its parts, and the call of
    it, if any."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inner:
            chain = _chain(node)
            if chain is not None and chain[0] in names:
                yield node, chain, called.get(id(node))


def _chain(node: ast.expr) -> tuple[str, ...] | None:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _chain(node.value)) is not None:
        return (*before, node.attr)
    return None


# ---------------------------------------------------------------------- what the tables say


def findings(script_uses: Sequence[Use]) -> Iterator[Finding]:
    """Yields findings for each use: for a call about its keywords, else about the name."""
    for use in script_uses:
        system, name, target = use.system, use.name, use.system.served.get(use.name)
        module, _, attribute = name.rpartition('.')
        if not system.replaces and installed(system.package) is not None and _has(system.package, name):
            target, what = None, f'the installed {system.package} has it'
        elif target is not None:
            what = f'served by {target}'
        elif system.has_module(name):
            what = 'served, a module'
        elif system.is_own(name):
            target, what = f'chatgpt.{module}:{attribute}'.replace('.:', ':'), 'served by itself'
        else:
            other = system.replaces and system.package != 'chatgpt' and installed(system.package) is not None
            there = f' (run takes it from the installed {system.package} if it is there)' if other else ''
            what = f'not served{there}; {system.instead(name)}'
        if not use.keywords:
            yield Finding(use.line, use.full, not what.startswith('not served'), what)
        elif target is not None:
            yield from _keywords(use, target)


def _has(package: str, name: str) -> bool:
    """Returns True if an installed package has a name, or for '' if it can be imported."""
    module, _, attribute = f'{package}.{name}'.rstrip('.').rpartition('.')
    return resolve(module, attribute)[0] is not None if module else _module(attribute)[0] is not None


def _keywords(use: Use, target: str) -> Iterator[Finding]:
    """Yields a finding for each keyword that the target does not take; nothing if it takes any or has no signature."""
    found = _chosen(load(target), [keyword for _, keyword in use.keywords])
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return
    known = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        if not inspect.isclass(found) or not hasattr(found, 'keywords'):
            return
        known = sorted(found.keywords())
    for line, keyword in use.keywords:
        if keyword not in known:
            yield Finding(line, f'{use.full}({keyword}=)', False, f'not a parameter{hint(keyword, known)}')


# ---------------------------------------------------------------------- every other import


def _chosen(found: Any, keywords: Sequence[str]) -> Any:
    """Returns the class that an object which chooses by the keywords of a call would make, else `found` itself."""
    return found.chosen(keywords) if hasattr(found, 'chosen') and not inspect.isclass(found) else found


@dataclass(frozen=True)
class Import:
    """An import of a package outside the served systems: `name` of `module`, or the module itself for ''."""

    line: int
    module: str
    name: str
    bound: str
    """the name that it gets in the script"""
    optional: bool
    """True under a condition, or in a `try` that handles ImportError without raising"""


def imports(tree: ast.Module) -> Iterator[Import]:
    """Yields every absolute import of a script except those of served systems and those under TYPE_CHECKING."""
    yield from _imports(tree.body, optional=False)


def _imports(body: Sequence[ast.stmt], optional: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition('.')[0]
                yield Import(
                    node.lineno, alias.name, '', bound if alias.asname or '.' not in alias.name else '', optional
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield Import(node.lineno, node.module or '', alias.name, alias.asname or alias.name, optional)
        elif isinstance(node, ast.If):
            test = ast.unparse(node.test)
            if 'TYPE_CHECKING' not in test:
                yield from _imports(node.body, optional or '__name__' not in test)
            yield from _imports(node.orelse, True)
        elif isinstance(node, ast.Try):
            caught = {n for h in node.handlers for n in _names_of(h.type)}
            raises = any(isinstance(n, ast.Raise) for h in node.handlers for line in h.body for n in ast.walk(line))
            any_of = {'', 'ImportError', 'ModuleNotFoundError', 'Exception', 'BaseException'}
            is_caught = not raises and not caught.isdisjoint(any_of)
            yield from _imports(node.body, optional or is_caught)
            for handler in node.handlers:
                yield from _imports(handler.body, True)
            yield from _imports([*node.orelse, *node.finalbody], optional)
        else:
            for inner in ('body', 'orelse'):
                if isinstance(below := getattr(node, inner, None), list):
                    yield from _imports(below, optional)


def _names_of(node: ast.expr | None) -> list[str]:
    """Returns the names of a handler's exceptions; [''] for a bare `except`."""
    if node is None:
        return ['']
    return [ast.unparse(item) for item in (node.elts if isinstance(node, ast.Tuple) else [node])]


@cache
def _module(name: str) -> tuple[Any, str]:
    """Returns (module, ''), or (None, reason) if it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return importlib.import_module(name), ''
    except ImportError as error:
        root = name.partition('.')[0]
        if isinstance(error, ModuleNotFoundError) and error.name == root:
            return None, f'{root} is not installed'
        return None, f'importing it raises {type(error).__name__}: {" ".join(str(error).split())}'
    except Exception as error:
        return None, f'importing it raises {type(error).__name__}: {" ".join(str(error).split())}'


def resolve(module: str, name: str) -> tuple[Any, str]:
    """Returns (object, '') for an import, or (None, reason) if it is missing. A dropped name gives its replacement."""
    full = f'{module}.{name}'.rstrip('.')
    found, why = _module(module)
    if found is None:
        row = dropped.dropped(module)
        if row is None:
            return None, why
        found = row.get() if isinstance(row.get(), type(sys)) else row.get()()
    if not name or name == '*':
        return found, ''
    if hasattr(found, name):
        return getattr(found, name), ''
    if (row := dropped.dropped(full)) is not None:
        return row.get(), ''
    below, _ = _module(full) if hasattr(found, '__path__') else (None, '')
    version = getattr(_module(module.partition('.')[0])[0], '__version__', '')
    package = f'{module.partition(".")[0]} {version}'.strip()
    return (below, '') if below is not None else (None, f'not in the installed {package}')


def beside(path: str | Path, module: str, level: int = 0) -> Path | None:
    """Returns the file of a module in the script's folder or in the working directory, or None."""
    folder = Path(path).resolve().parent
    roots = [folder, Path.cwd()] if not level else [folder.joinpath(*['..'] * (level - 1))]
    for root in roots:
        place = root.joinpath(*module.split('.')) if module else root
        for file in (place.with_suffix('.py'), place / '__init__.py'):
            if file.is_file():
                return file
    return None


def _files(path: str) -> list[Path]:
    """Returns a script and the modules beside it that it imports, each once."""
    found = [Path(path)]
    for file in found:
        for node in ast.walk(read_script(file)):
            names = list[tuple[str, int]]()
            if isinstance(node, ast.Import):
                names = [(alias.name, 0) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or '', node.level)]
                names += [(f'{node.module or ""}.{alias.name}'.lstrip('.'), node.level) for alias in node.names]
            for name, level in names:
                other = beside(file if level else path, name, level) if level or system_of(name) is None else None
                if other is not None and other.resolve() not in [f.resolve() for f in found]:
                    found.append(other)
    return found


def environment(path: Path, script: str) -> Iterator[Finding]:
    """Yields the missing imports of a file, attributes of modules and keywords of calls, and the dropped names that are
    available only while a script runs."""
    tree = read_script(path)
    objects = dict[str, tuple[str, Any]]()
    for entry in imports(tree):
        if system_of(entry.module) is not None or beside(script, entry.module.partition('.')[0]) is not None:
            continue
        full = f'{entry.module}.{entry.name}'.rstrip('.')
        found, why = resolve(entry.module, entry.name)
        if why and entry.optional:
            yield Finding(entry.line, full, True, f'{why}; only needed where that line is reached')
        elif why:
            yield Finding(entry.line, full, False, why if 'installed' in why else f'cannot be imported: {why}')
        elif (row := dropped.dropped(full) or dropped.dropped(entry.module)) and not _is_there(entry):
            yield Finding(entry.line, full, True, row.sentence)
        if found is not None and entry.bound:
            objects[entry.bound] = (full, found)
    yield from _attributes(tree, objects)


def _is_there(entry: Import) -> bool:
    found, _ = _module(entry.module)
    return found is not None and (not entry.name or hasattr(found, entry.name))


def _attributes(tree: ast.Module, objects: dict[str, tuple[str, Any]]) -> Iterator[Finding]:
    """Yields missing attributes of modules, and keywords that a call does not take."""
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    stored |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    for node, chain, call in _chains(tree, objects.keys() - stored):
        name, found = objects[chain[0]]
        for part in chain[1:]:
            full = f'{name}.{part}'
            if inspect.ismodule(found) and not hasattr(found, part):
                row = dropped.dropped(full)
                if row is None and _module(full)[0] is None:
                    yield Finding(node.lineno, full, False, f'not in the installed {name.partition(".")[0]}')
                elif row is not None:
                    yield Finding(node.lineno, full, True, row.sentence)
                found = None
            else:
                found = getattr(found, part, None) if inspect.ismodule(found) or inspect.isclass(found) else None
            name = full
            if found is None:
                break
        if found is not None and call is not None:
            yield from _foreign_keywords(name, found, call)


def _foreign_keywords(name: str, found: Any, call: ast.Call) -> Iterator[Finding]:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return
    known = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for keyword in call.keywords:
        row = dropped.argument(_public(name, found), keyword.arg or '')
        if row is not None:
            yield Finding(keyword.value.lineno, f'{name}({keyword.arg}=)', True, row.sentence)
        elif keyword.arg and not takes_any and keyword.arg not in known:
            what = f'not a parameter here{hint(keyword.arg, known)}'
            yield Finding(keyword.value.lineno, f'{name}({keyword.arg}=)', False, what)


def _public(name: str, found: Any) -> str:
    """Returns the name of a callable in the table of arguments: its own, or that of a base class's method."""
    owner = getattr(found, '__self__', None)
    for known in dropped.ARGUMENTS:
        base, _, attribute = known.rpartition('.')
        if dropped._resolve(known) is found:
            return known
        if inspect.isclass(owner) and attribute == name.rpartition('.')[2]:
            of = dropped._resolve(base)
            if inspect.isclass(of) and issubclass(owner, of):
                return known
    return name


# ---------------------------------------------------------------------- objects that a script makes


def methods(tree: ast.Module) -> Iterator[Finding]:
    """Yields missing attributes of objects of served classes, and keywords that their methods do not take. An object is
    followed if every assignment of its name makes the same class."""
    classes = _classes(tree)
    assigned = dict[str, set[Any]]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    made = _made(node.value, classes) if node.value is not None else None
                    assigned.setdefault(target.id, set()).add(made)
                else:
                    for inner in ast.walk(target):
                        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                            assigned.setdefault(inner.id, set()).add(None)
        elif isinstance(node, ast.arg):
            assigned.setdefault(node.arg, set()).add(None)
        elif isinstance(node, (ast.For, ast.comprehension, ast.withitem)):
            bound = node.optional_vars if isinstance(node, ast.withitem) else node.target
            for inner in ast.walk(bound) if bound is not None else ():
                if isinstance(inner, ast.Name):
                    assigned.setdefault(inner.id, set()).add(None)
    known = {name: next(iter(made)) for name, made in assigned.items() if len(made) == 1 and None not in made}
    set_here = {
        (n.value.id, n.attr)
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name)
    }
    called = {id(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known):
            continue
        full, kind = known[node.value.id]
        if (node.value.id, node.attr) in set_here:
            continue
        if not has_attribute(kind, node.attr):
            yield Finding(
                node.lineno, f'{full}().{node.attr}', False, f'not served; {kind.__name__} has no such attribute'
            )
        elif (call := called.get(id(node))) is not None:
            method = inspect.getattr_static(kind, node.attr, None)
            if inspect.isfunction(method):
                yield from _foreign_keywords(f'{full}().{node.attr}', method, call)


def _classes(tree: ast.Module) -> dict[str, tuple[str, Any]]:
    """Returns the served classes that a script imports by name, and objects that choose one by a call."""
    found = dict[str, tuple[str, Any]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and system_of(node.module or '') is not None:
            system = SYSTEMS[(node.module or '').partition('.')[0]]
            for alias in node.names:
                key = f'{node.module}.{alias.name}'.partition('.')[2]
                kind = load(system.served[key]) if key in system.served else None
                if inspect.isclass(kind) or hasattr(kind, 'chosen'):
                    found[alias.asname or alias.name] = (f'{node.module}.{alias.name}', kind)
    return found


def _made(value: ast.expr, classes: dict[str, tuple[str, Any]]) -> tuple[str, Any] | None:
    """Returns the class of `Class(...)` or `Class.from_pretrained(...)`; None for any other expression."""
    if not isinstance(value, ast.Call):
        return None
    function = value.func
    if isinstance(function, ast.Attribute) and function.attr == 'from_pretrained':
        function = function.value
    full, kind = classes.get(function.id, ('', None)) if isinstance(function, ast.Name) else ('', None)
    kind = _chosen(kind, [keyword.arg for keyword in value.keywords if keyword.arg])
    return (full, kind) if inspect.isclass(kind) else None


def has_attribute(kind: type, name: str) -> bool:
    """Returns True if objects of a class have an attribute: of the class, annotated, or set on `self` in its source.
    Also True if the class has its own `__getattr__` or its source is not readable."""
    if hasattr(kind, name):
        return True
    if any(name in inspect.get_annotations(c) for c in kind.__mro__):
        return True
    return name in _set_on_self(kind) or _answers(kind, name)


@cache
def _set_on_self(kind: type) -> frozenset[str]:
    names = set[str]()
    for base in kind.__mro__:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                names |= {node.attr} if node.value.id == 'self' else set()
    return frozenset(names)


def _answers(kind: type, name: str) -> bool:
    """Returns True if `__getattr__` of a class may return the name; that of `nn.Module` does not count, and one that
    only raises neither."""
    own = [c for c in kind.__mro__ if '__getattr__' in vars(c) and not c.__module__.startswith('torch.')]
    return any(not _only_raises(vars(c)['__getattr__']) for c in own)


def _only_raises(function: Any) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    (definition,) = tree.body
    return all(isinstance(line, (ast.Raise, ast.Expr)) for line in getattr(definition, 'body', [None]))


# ---------------------------------------------------------------------- the command


def check(paths: Sequence[str]) -> int:
    """Prints the findings of each script and of the modules beside it. Returns 0 if nothing is missing, else 1.

    Raises:
        ValueError: a file does not exist or is not Python.
    """
    files = {path: _files(path) for path in paths}
    total = missing = 0
    for path, modules in files.items():
        for file in modules:
            shown = path if file == Path(path) else str(file)
            tree = read_script(file)
            of_systems = [*findings(uses(tree)), *methods(tree)]
            others = list(environment(file, path))
            total += len(of_systems)
            for finding in sorted({*of_systems, *others}, key=lambda f: (f.line, f.name, f.what)):
                total += finding.served is False and finding in others
                missing += not finding.served
                print(f'{shown}:{finding.line}: {finding.name}: {finding.what}')
    if not total:
        print(f'no name of {", ".join(name for name in SYSTEMS if system_of(name))} is used')
    else:
        print(f'{total} uses, {missing} not served' if missing else f'{total} uses, all served')
    return 1 if missing else 0
