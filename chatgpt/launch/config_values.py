"""Values out of flags, config files and `key=value` words, before it is known what run they are for.

Nothing in a file is ever evaluated. Imports neither torch nor the settings of runs, so that a launcher can look here
first (`peek`). Left out: which keys a run has (`config_file`).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Literal

from chatgpt.names import ours

SECTIONS = ('general', 'dataset', 'training')
OVERRIDE = re.compile(r'[A-Za-z_][A-Za-z_0-9.]*=.*', re.DOTALL)


def yaml_loader() -> type[Any]:
    """PyYAML's safe loader, for which 1e-5 is a number and None is null."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    number = re.compile(r'[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+')
    Loader.add_implicit_resolver('tag:yaml.org,2002:float', number, list('-+0123456789.'))
    Loader.add_implicit_resolver('tag:yaml.org,2002:null', re.compile('None'), ['N'])
    return Loader


def read_file(path: str | Path) -> dict[str, Any]:
    """A config file's content.

    Raises:
        ValueError: it is not there, is not what its ending says, or is no mapping.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f'config_file {path}: there is no such file')
    text = path.read_text()
    try:
        content = _parsed(text, path.suffix)
    except Exception as error:
        raise ValueError(f'config_file {path}: {" ".join(str(error).split())}') from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ValueError(f'config_file {path}: it holds a {type(content).__name__}, not names with values')
    return content


def _parsed(text: str, suffix: str) -> Any:
    if suffix == '.json':
        return json.loads(text)
    if suffix == '.conf':
        try:
            return ast.literal_eval(text.strip() or '{}')
        except (ValueError, SyntaxError) as error:
            raise ValueError(f'a .conf file is one Python literal, {{"General": {{...}}, ...}} ({error})') from None
    if suffix in ('.yaml', '.yml'):
        import yaml

        return yaml.load(text, Loader=yaml_loader())  # a safe loader
    raise ValueError(f'the ending {suffix!r} is not known; use .yaml, .json or .conf')


def flat(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(where it stands, key, value) of every entry; sections are opened."""
    for key, value in content.items():
        if str(key).lower() in SECTIONS and (isinstance(value, Mapping) or str(key)[0].isupper()):
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f'section {key}: names with values are expected, not {value!r}')
            for inner, inner_value in (value or {}).items():
                yield f'{key}.{inner}', str(inner), inner_value
        else:
            yield str(key), str(key), value


def parse_bool(text: str) -> bool:
    if text.lower() in ('true', '1', 'yes'):
        return True
    if text.lower() in ('false', '0', 'no'):
        return False
    raise argparse.ArgumentTypeError(f'{text!r} is not a boolean; use true or false')


def number(text: str) -> float:
    """A flag's value as a float; 'nan' is none."""
    value = float(text)
    if value != value:
        raise argparse.ArgumentTypeError(f'{text!r} is not a number')
    return value


def whole_number(text: str) -> int:
    """A flag's value as an int; '0.0' is one."""
    try:
        return int(text)
    except ValueError:
        if not float(text).is_integer():
            raise
        return int(float(text))


def value_parser(hint: Any) -> Callable[[str], Any]:
    """A function from the text of a flag to a value of the annotated type; 'none' is None where the type allows it."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    literals = [v for o in options if typing.get_origin(o) is Literal for v in typing.get_args(o)]
    plain = [o for o in options if o is not type(None) and typing.get_origin(o) is not Literal]

    def parse(text: str) -> Any:
        if type(None) in options and text.lower() in ('none', 'null'):
            return None
        for literal in literals:
            if text == str(literal) or (isinstance(literal, bool) and text.lower() == str(literal).lower()):
                return literal
        for kind in plain:
            try:
                return {bool: parse_bool, int: whole_number, float: number}.get(kind, kind)(text)
            except (ValueError, TypeError, OverflowError, argparse.ArgumentTypeError):
                continue
        if not literals and bool in plain:
            parse_bool(text)
        if not literals and all(o in (int, float, type(None)) for o in plain):
            raise argparse.ArgumentTypeError(f'{text!r} is no {"whole " if float not in plain else ""}number')
        expected = ', '.join([str(v) for v in literals] + [getattr(o, '__name__', str(o)) for o in plain])
        raise argparse.ArgumentTypeError(f'{text!r} is none of: {expected}')

    return parse


def metavar_of(hint: Any, choices: Iterable[str] = ()) -> str:
    """What stands for a flag's value in --help: {dpo,kto}, true|false, N (a whole number), X, TEXT, {KEY:X}.

    Of a field whose metadata has a registry as `choices`, its names.
    """
    if choices := [name for name in choices if ':' not in name]:  # what module:name named is found there too
        return '{' + ','.join(choices) + '}|module:name'
    options = [o for o in typing.get_args(hint) or (hint,) if o is not type(None)] if _is_union(hint) else [hint]
    words = []
    for option in options:
        if typing.get_origin(option) is Literal:
            words.append('{' + ','.join(map(str, typing.get_args(option))) + '}')
        elif typing.get_origin(option) is dict:
            words.append('{KEY:X}' if typing.get_args(option)[1] is float else '{KEY:VALUE}')
        else:
            words.append({bool: 'true|false', int: 'N', float: 'X'}.get(option, 'TEXT'))
    return '|'.join(words)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def typed(value: Any, hint: Any) -> Any:
    """A file's value as the annotated type."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    for option in options:
        origin = typing.get_origin(option)
        if origin is list and isinstance(value, (list, tuple)):
            return [str(v) for v in value]
        if origin is list and isinstance(value, str):
            return [value]
        if origin is dict and isinstance(value, Mapping):
            of_numbers = typing.get_args(option)[1] is float
            return {str(k): float(v) if of_numbers else v for k, v in value.items()}
    if isinstance(value, (list, tuple, Mapping)):
        raise ValueError(f'{value!r} is not expected here')
    if isinstance(value, float) and int in options and float not in options and value == int(value):
        value = int(value)
    return value_parser(hint)('none' if value is None else str(value))


def typed_text(text: str, hint: Any) -> Any:
    return typed(_parsed(text, '.yaml'), hint)


def overrides(words: SequenceOf[str]) -> Iterator[tuple[str, str, Any]]:
    """`Training.learning_rate=1e-4`, or without the section; values are YAML."""
    import yaml

    for word in words:
        if OVERRIDE.fullmatch(word):
            where, _, text = word.partition('=')
            *sections, key = where.split('.')
            if any(s.lower() not in SECTIONS for s in sections):
                raise ValueError(
                    f'command line: {where}: {".".join(sections)} is no section; there are General, Dataset and '
                    'Training'
                )
            yield where, key, yaml.load(text, Loader=yaml_loader())


LAUNCH_SETTINGS: dict[str, Any] = {
    'num_training_workers': int | None,
    'resources_per_worker': dict[str, float] | None,
    'save_path': str,
}
"""settings of every run that concern its launcher too"""


def peek(argv: SequenceOf[str]) -> dict[str, Any]:
    """The `LAUNCH_SETTINGS` that a script called with `argv` will have, where its command line or config file names
    them.

    Raises:
        ValueError: the config file cannot be read, or a value is of another type.
    """
    texts: dict[str, str] = {}
    words: list[str] = []
    for word, following in zip(argv, [*argv[1:], ''], strict=False):
        name, equals, value = word.removeprefix('--').partition('=')
        if word.startswith('--') and _own(name) in (*LAUNCH_SETTINGS, 'config_file'):
            texts[_own(name)] = value if equals else following
        elif OVERRIDE.fullmatch(word) and _own(name.split('.')[-1]) in LAUNCH_SETTINGS:
            words.append(word)
    path = texts.pop('config_file', None)
    found: dict[str, Any] = {}
    for source, entries in (
        (f'config_file {path}', flat(read_file(path)) if path else ()),
        ('command line', overrides(words)),
    ):
        for where, key, value in entries:
            if _own(key) in LAUNCH_SETTINGS:
                try:
                    found[_own(key)] = typed(value, LAUNCH_SETTINGS[_own(key)])
                except (ValueError, argparse.ArgumentTypeError) as error:
                    raise ValueError(f'{source}: {where}: {error}') from None
    for name, text in texts.items():
        try:
            found[name] = typed_text(text, LAUNCH_SETTINGS[name])
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f'--{name}: {error}') from None
    return found


def _own(key: str) -> str:
    """Our name of a key that may be another system's."""
    return ours(key, LAUNCH_SETTINGS)
