"""What a script uses of other systems, found without running it: imports, attributes through aliases, and the keywords
of calls.

Left out: methods of objects, and names that are put together while the script runs.
"""

from __future__ import annotations

import ast
import inspect
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chatgpt.names import hint
from chatgpt_compat.modules import installed
from chatgpt_compat.tables import SYSTEMS, System, load, system_of


@dataclass(frozen=True)
class Use:
    """A name in a script; `name` is without the system's package, '' for the package itself."""

    line: int
    system: System
    name: str
    keywords: tuple[tuple[int, str], ...] = ()
    """with the line of each, where the name is called"""

    @property
    def full(self) -> str:
        return f'{self.system.package}.{self.name}' if self.name else self.system.package


@dataclass(frozen=True)
class Finding:
    """One line of the checker."""

    line: int
    name: str
    served: bool
    what: str


def read_script(path: str | Path) -> ast.Module:
    """Raises ValueError for a file that is not there or no Python."""
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
    """Every use of a system's name, by line."""
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
    return Use(line, system, '.'.join(parts[:end]), keywords)  # what follows a name that is no module is its attribute


def _through_aliases(tree: ast.Module, aliases: dict[str, str]) -> Iterator[Use]:
    """Chains of attributes that begin with an imported module, and calls of imported names."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Name, ast.Attribute)) or id(node) in inner:
            continue
        chain = _chain(node)
        if chain is None or chain[0] not in aliases:
            continue
        dotted = '.'.join((aliases[chain[0]], *chain[1:]))
        use = _use(node.lineno, dotted)
        call = called.get(id(node))
        if call is not None and use.full == dotted:
            use = _use(node.lineno, dotted, tuple((k.value.lineno, k.arg) for k in call.keywords if k.arg))
        if use.keywords or (len(chain) > 1 and use.system.has_module(aliases[chain[0]].partition('.')[2])):
            yield use


def _chain(node: ast.expr) -> tuple[str, ...] | None:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _chain(node.value)) is not None:
        return (*before, node.attr)
    return None


# ---------------------------------------------------------------------- what the tables say


def findings(script_uses: Sequence[Use]) -> Iterator[Finding]:
    """What becomes of each use: of a call its keywords, of another use the name."""
    for use in script_uses:
        system, name, target = use.system, use.name, use.system.served.get(use.name)
        module, _, attribute = name.rpartition('.')
        if not system.replaces and (target is not None or not name) and installed(system.package) is not None:
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


def _keywords(use: Use, target: str) -> Iterator[Finding]:
    """Keywords that what is called does not take; none where it takes any, or does not say."""
    try:
        parameters = inspect.signature(load(target)).parameters.values()
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    for line, keyword in use.keywords:
        if keyword not in known:
            yield Finding(line, f'{use.full}({keyword}=)', False, f'not a parameter{hint(keyword, known)}')


def check(paths: Sequence[str]) -> int:
    """Print what each script uses; 0 if everything is served, 1 if not.

    Raises:
        ValueError: a file that is not there or no Python.
    """
    trees = {path: read_script(path) for path in paths}
    total = missing = 0
    for path, tree in trees.items():
        for finding in findings(uses(tree)):
            total, missing = total + 1, missing + (not finding.served)
            print(f'{path}:{finding.line}: {finding.name}: {finding.what}')
    if not total:
        print(f'no name of {", ".join(name for name in SYSTEMS if system_of(name))} is used')
    else:
        print(f'{total} uses, {missing} not served' if missing else f'{total} uses, all served')
    return 1 if missing else 0
