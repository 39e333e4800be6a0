"""Reads values from flags, config files and `key=value` words. No code in a file is run."""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Literal

from chatgpt.names import hint as hint_of
from chatgpt.names import ours

SECTIONS = ('general', 'dataset', 'training')
OVERRIDE = re.compile(r'[A-Za-z_][A-Za-z_0-9.]*=.*', re.DOTALL)

# ---------------------------------------------------------------------- files


def yaml_loader() -> type[Any]:
    """Returns PyYAML's safe loader, changed so that 1e-5 is a number, None is null, and a repeated name is an error."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            check_once((str(key.value), key.start_mark.line + 1) for key, _ in node.value)
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    number = re.compile(r'[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+')
    Loader.add_implicit_resolver('tag:yaml.org,2002:float', number, list('-+0123456789.'))
    Loader.add_implicit_resolver('tag:yaml.org,2002:null', re.compile('None'), ['N'])
    return Loader


def parse_yaml(text: str) -> Any:
    import yaml

    return yaml.load(text, Loader=yaml_loader())  # a safe loader


def parse_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check_once((name, None) for name, _ in pairs)
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


def parse_literal(text: str) -> Any:
    """Parses one Python literal, the format of llm-on-ray's .conf files."""
    try:
        tree = ast.parse(text.strip() or '{}', mode='eval')
        content = ast.literal_eval(tree)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f'a .conf file is one Python literal, {{"General": {{...}}, ...}} ({error})') from None
    for node in ast.walk(tree):
        keys = node.keys if isinstance(node, ast.Dict) else ()
        check_once((str(key.value), key.lineno) for key in keys if isinstance(key, ast.Constant))
    return content


FORMATS = {'.yaml': parse_yaml, '.yml': parse_yaml, '.json': parse_json, '.conf': parse_literal}


def read_file(path: str | Path) -> dict[str, Any]:
    """Returns the content of a config file.

    Raises:
        ValueError: if it does not exist, does not have the format of its suffix, is no mapping, or repeats a name.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f'config_file {path}: there is no such file')
    if path.suffix not in FORMATS:
        raise ValueError(f'config_file {path}: the ending {path.suffix!r} is not known; use .yaml, .json or .conf')
    try:
        content = FORMATS[path.suffix](path.read_text())
    except Exception as error:
        raise ValueError(f'config_file {path}: {" ".join(str(error).split())}') from None
    if not isinstance(content or {}, dict):
        raise ValueError(f'config_file {path}: it holds a {type(content).__name__}, not names with values')
    return content or {}


def check_once(names: Iterable[tuple[str, int | None]]) -> None:
    """Raises ValueError for a repeated name; gives its lines where they are known."""
    lines: dict[str, int | None] = {}
    for name, line in names:
        if name in lines:
            where = f', on line {lines[name]} and on line {line}' if line else ''
            raise ValueError(f'{name} is given twice{where}; give it once')
        lines[name] = line


def flat(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields (place, key, value) of every entry, also of those in sections."""
    for key, value in content.items():
        if str(key).lower() in SECTIONS and (isinstance(value, Mapping) or str(key)[0].isupper()):
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f'section {key}: names with values are expected, not {value!r}')
            yield from ((f'{key}.{inner}', str(inner), inner_value) for inner, inner_value in (value or {}).items())
        else:
            yield str(key), str(key), value


def overrides(words: SequenceOf[str]) -> Iterator[tuple[str, str, Any]]:
    """Yields (place, key, value) of words such as `Training.learning_rate=1e-4`; the section is optional."""
    for word in filter(OVERRIDE.fullmatch, words):
        where, _, text = word.partition('=')
        *sections, key = where.split('.')
        if any(s.lower() not in SECTIONS for s in sections):
            raise ValueError(
                f'command line: {where}: {".".join(sections)} is no section; there are General, Dataset and Training'
            )
        yield where, key, parse_yaml(text)


# ---------------------------------------------------------------------- values by type


def parse_bool(text: str) -> bool:
    if text.lower() in ('true', '1', 'yes'):
        return True
    if text.lower() in ('false', '0', 'no'):
        return False
    raise argparse.ArgumentTypeError(f'{text!r} is not a boolean; use true or false')


def number(text: Any) -> float:
    """Reads a flag's value as a float; 'nan' is an error."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f'{text!r} is not a number')
    return value


def whole_number(text: str) -> int:
    """Reads a flag's value as an int; '2.0' is 2."""
    try:
        return int(text)
    except ValueError:
        if not (value := float(text)).is_integer():
            raise
        return int(value)


PARSERS: dict[Any, Any] = {bool: parse_bool, int: whole_number, float: number}


def options_of(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or a tuple of the single type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def typed(value: Any, hint: Any) -> Any:
    """Converts a value of a file, a flag or a keyword to the annotated type; 'none' is None if the type allows it.

    Raises:
        ValueError, argparse.ArgumentTypeError: if it fits none of the types.
    """
    options = options_of(hint)
    for option in options:
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if origin is list and isinstance(value, (list, tuple, str)):
            return [value] if isinstance(value, str) else [str(v) for v in value]
        if origin is dict and isinstance(value, Mapping):
            return {str(k): number(v) if arguments[1] is float else v for k, v in value.items()}
    if isinstance(value, (list, tuple, Mapping)):
        raise ValueError(f'{value!r} is not expected here')
    text = 'none' if value is None else str(value)
    if type(None) in options and text.lower() in ('none', 'null'):
        return None
    literals = [v for o in options if typing.get_origin(o) is Literal for v in typing.get_args(o)]
    for literal in literals:
        if text.lower() == str(literal).lower():
            return literal
    if value is None:
        raise argparse.ArgumentTypeError('an empty value is not expected here; leave the line out')
    plain = [o for o in options if o is not type(None) and typing.get_origin(o) is not Literal]
    for kind in plain:
        try:
            return PARSERS.get(kind, kind)(text)
        except (ValueError, TypeError, OverflowError, argparse.ArgumentTypeError):
            continue
    if not literals and bool in plain:
        parse_bool(text)
    if not literals and {int, float}.issuperset(plain):
        raise argparse.ArgumentTypeError(f'{text!r} is no {"whole " if float not in plain else ""}number')
    expected = ', '.join([str(v) for v in literals] + [getattr(o, '__name__', str(o)) for o in plain])
    close = hint_of(text, [str(v) for v in literals])
    raise argparse.ArgumentTypeError(f'{text!r} is none of: {expected}{close}')


def typed_text(text: str, hint: Any) -> Any:
    """Converts a flag's text to the annotated type; a dict is given as YAML."""
    return typed(parse_yaml(text) if 'dict[' in str(hint) else text, hint)


def collected(
    entries: Iterable[tuple[str, str, Any]],
    hints: Mapping[str, Any],
    source: str,
    unknown: Callable[[str, str], object],
    read: Callable[[Any, Any], Any] = typed,
) -> dict[str, Any]:
    """Converts entries (place, key, value) to values of the settings with these types, by our names.

    Args:
        source: start of the error messages.
        unknown: called with place and key of an entry that is no setting; it raises, or the entry is ignored.

    Raises:
        ValueError: for two entries of one setting, or a value of another type.
    """
    found, places = dict[str, Any](), dict[str, str]()
    for where, key, value in entries:
        name = ours(key, hints)
        if name not in hints:
            unknown(where, key)
            continue
        if name in found:
            raise ValueError(f'{source}{places[name]} and {where} both set {name}; give one')
        try:
            found[name] = read(value, hints[name])
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f'{source}{where}: {error}') from None
        places[name] = where
    return found


def metavar_of(hint: Any, choices: Iterable[str] = ()) -> str:
    """Returns the value of a flag in --help: {dpo,kto}, true|false, N (whole number), X, TEXT, {KEY:X}, or choices."""
    if choices := [name for name in choices if ':' not in name]:  # a registry also keeps what module:name has loaded
        return '{' + ','.join(choices) + '}|module:name'
    words = []
    for option in options_of(hint):
        if typing.get_origin(option) is Literal:
            words.append('{' + ','.join(map(str, typing.get_args(option))) + '}')
        elif typing.get_origin(option) is dict:
            words.append('{KEY:X}' if typing.get_args(option)[1] is float else '{KEY:VALUE}')
        elif option is not type(None):
            words.append({bool: 'true|false', int: 'N', float: 'X'}.get(option, 'TEXT'))
    return '|'.join(words)
