"""Runs from config files: YAML, JSON, or a `.conf` that holds one Python literal; with overrides and flags on top.

Precedence: the dataclass's defaults, the file, `key=value` words, flags. A file may be flat, or have the sections
General, Dataset and Training; keys are the run's own names or those of llm-on-ray. Nothing in a file is ever evaluated.
"""

from __future__ import annotations

import argparse
import os
import sys
import typing
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from chatgpt.launch.arguments import Parser, add_flag, field_docs
from chatgpt.launch.config_values import OVERRIDE, flat, overrides, read_file, typed
from chatgpt.launch.runs import PPORun, Run
from chatgpt.launch.theirs import in_our_words, meet, their_settings
from chatgpt.names import THEIRS, hint, ours

R = TypeVar('R', bound=Run)


BOOLEANS = ('true', 'false', 'yes', 'no', '1', '0')
PAIRS = {'pretrain': ('model_name', 'model_pretrain'), 'reward_model': ('rm_name', 'rm_pretrain')}
"""llm-on-ray's two keys for one PPO model, by our field: the name, and trained weights that take its place"""


def values_of(
    entries: Iterable[tuple[str, str, Any]], cls: type[Run], source: str, below: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Entries as values of a run's fields.

    Args:
        below: what the source that these entries override says, by its own keys.

    Raises:
        ValueError: an unknown key (with the nearest), two keys for one field, a value of another type, a key that
            cannot be honoured.
    """
    hints, found, places = typing.get_type_hints(cls) | their_settings(cls), dict[str, Any](), dict[str, str]()
    entries = list(entries)
    known = {key: value for _, key, value in entries}
    for where, key, value in entries:
        name, value = _translated(key, value, cls, known, below or {})
        if name is None:
            continue
        if name not in hints:
            raise ValueError(f'{source}: {where} is not a setting of this run{hint(key, [*_names(cls), *THEIRS])}')
        if name in found:
            raise ValueError(f'{source}: {places[name]} and {where} both set {name}; give one')
        try:
            found[name] = typed(value, hints[name])
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f'{source}: {where}: {error}') from None
        places[name] = where
    return found


def _names(cls: type[Run]) -> list[str]:
    return [*cls.field_names(), *their_settings(cls)]


def _translated(
    key: str, value: Any, cls: type[Run], known: Mapping[str, Any], below: Mapping[str, Any]
) -> tuple[str | None, Any]:
    """Another system's key as one of ours; None for one that is taken up by another."""
    ppo = issubclass(cls, PPORun)
    names = set(_names(cls))
    if key in ('optimizer', 'lr_scheduler', 'lr_scheduler_type'):
        return ours(key, names), str(value).lower()
    if key in names:
        return key, value
    for field, (name, weights) in PAIRS.items() if ppo else ():
        # No weights given: take the model name beside this key, or the one in the file that this overrides.
        if key == weights and value is None:
            stands_by_itself = known.keys().isdisjoint((name, field))
            return (field, below.get(name)) if stands_by_itself else (None, None)
        if key == name and known.get(weights) is not None:  # whose folder says the family itself
            return None, None
        if key in (name, weights):
            return field, value
    return ours(key, names), value


# ---------------------------------------------------------------------- command lines


def parse_run(
    cls: type[R], *, description: str | None, positional: str | None = None, argv: SequenceOf[str] | None = None
) -> R:
    """A run from the command line: a positional source of data, flags, `--config_file`, `key=value` words.

    Args:
        positional: the field that a word without `=` sets.

    Raises:
        ValueError: what `values_of` raises. `SystemExit` after --print_config, which writes the resolved config as
            YAML.
    """
    parser = _parser(cls, description, positional)
    flags, words = _sorted(list(sys.argv[1:] if argv is None else argv), cls)
    given = vars(parser.parse_args(flags))
    plain = given.pop('words', [])
    if len(plain) > (positional is not None):
        parser.error(f'{plain[-1]!r} is one word too many')
    values, below = dict[str, Any](), dict[str, Any]()
    path = given.pop('config_file', None)
    if path is not None:
        entries = list(flat(read_file(path)))
        below = {key: value for _, key, value in entries}
        values |= values_of(entries, cls, f'config_file {path}')
    values |= values_of(overrides(words), cls, 'command line', below)
    if plain and positional is not None:
        values[positional] = plain[0]
    show = given.pop('print_config', False)
    values, of_processes = in_our_words(values | given, cls)
    if not show:
        meet(**of_processes)
    before = said_before(cls, values)
    run = cls.from_dict(before | values)
    run.said = before | values
    if before and os.environ.get('RANK', '0') == '0' and not show:
        report_said(before, values)
    if show:
        print(to_yaml(run), end='')
        raise SystemExit(0)
    return run


def _parser(cls: type[Run], description: str | None, positional: str | None) -> Parser:
    parser = Parser(description=description)
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    what = f'{docs[positional]}; ' if positional else ''
    parser.add_argument(
        'words',
        nargs='*',
        metavar=positional or 'key=value',
        default=argparse.SUPPRESS,
        help=f'{what}key=value words override the file',
    )
    parser.add_argument(
        '--config_file', help='YAML, JSON or .conf; flags and key=value words win over it', default=argparse.SUPPRESS
    )
    parser.add_argument(
        '--print_config', action='store_true', default=argparse.SUPPRESS, help='write the full resolved config and stop'
    )
    for base in (b for b in cls.__mro__ if '__annotations__' in vars(b)):
        group = parser.add_argument_group(base.__name__)
        for f in fields(cls):
            if f.name in base.__annotations__ and f.name not in {a.dest for a in parser._actions}:
                default = cls.shown_default(f.name, f.default) if f.default is not MISSING else ''
                text = f'{docs.get(f.name, "")} (default: {default})'
                add_flag(group, f.name, hints[f.name], text, choices=f.metadata.get('choices', ()))
    for name, kind in their_settings(cls).items():
        add_flag(parser, name, kind, argparse.SUPPRESS)
    return parser


def _sorted(argv: list[str], cls: type[Run]) -> tuple[list[str], list[str]]:
    """Flags and plain words as argparse takes them, and the `key=value` words, which may stand anywhere.

    `--tensorboard` alone becomes `--tensorboard=true`, `--no_packing` `--packing=false`, and `--learning_rate` `--lr`.
    What follows `--tensorboard` and looks neither like a file nor like a data set is taken for its value, and refused.
    """
    argv = [_renamed(word, cls) for word in argv]
    hints = typing.get_type_hints(cls)
    switches = {f'--{name}' for name, hint in hints.items() if hint is bool}
    flags: list[str] = []
    words: list[str] = []
    for i, word in enumerate(argv):
        following = argv[i + 1] if i + 1 < len(argv) else ''
        before = argv[i - 1] if i else ''
        is_value = (
            before.startswith('--') and '=' not in before and before not in switches and before != '--print_config'
        )
        if word in switches and _is_a_value(following):
            flags.append(f'{word}={argv.pop(i + 1)}')
        elif word in switches and following.lower() not in BOOLEANS:
            flags.append(f'{word}=true')
        elif word.startswith('--no_') and f'--{word[5:]}' in switches:
            flags.append(f'--{word[5:]}=false')
        elif OVERRIDE.fullmatch(word) and not is_value:
            words.append(word)
        else:
            flags.append(word)
    return flags, words


def _renamed(word: str, cls: type[Run]) -> str:
    """A flag of another system's as ours."""
    name, equals, value = word.removeprefix('--').partition('=')
    return f'--{ours(name, _names(cls))}{equals}{value}' if word.startswith('--') and word != '--' else word


def _is_a_value(word: str) -> bool:
    return bool(word) and word.isalpha() and word.lower() not in BOOLEANS and not Path(word).exists()


def to_yaml(run: Run) -> str:
    """Every field of a run, which `read_file` reads back as the same run."""
    import yaml

    return yaml.safe_dump(run.to_dict(), sort_keys=False, allow_unicode=True)


def write_resolved(run: Run, folder: str | Path) -> None:
    """In the run's folder: `config.yaml`, every setting; and `said.yaml`, those that the user gave, in this start or an
    earlier one."""
    import yaml

    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, 'config.yaml').write_text(to_yaml(run))
    said = {name: value for name, value in run.said.items() if name not in OF_ONE_START}
    Path(folder, SAID).write_text(yaml.safe_dump(said, sort_keys=False, allow_unicode=True))


# ---------------------------------------------------------------------- a run that goes on

SAID = 'said.yaml'
OF_ONE_START = ('resume', 'save_path', 'plan', 'strategy')
"""settings that say what one start does and on what layout, which may be another each time"""


def said_before(cls: type[Run], values: Mapping[str, Any]) -> dict[str, Any]:
    """What the user said of the run that `resume` goes on with: its last word stands until there is another. Empty
    without a resume."""
    from chatgpt.checkpoint import latest

    if not values.get('resume'):
        return {}
    save_path = Path(values.get('save_path') or cls.from_dict({}).save_path)
    if values['resume'] == 'auto':
        places = [save_path] if latest(save_path / 'checkpoints') is not None else []
    else:  # a run's folder, its checkpoints, or one of them
        folder = Path(values['resume']).absolute()
        places = [folder, folder.parent, folder.parent.parent]
    found = next((place / SAID for place in places if (place / SAID).is_file()), None)
    if found is None:
        return {}
    known = set(cls.field_names()) - set(OF_ONE_START)
    return {name: value for name, value in (read_file(found) or {}).items() if name in known}


def report_said(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say which settings this start changes, and which it takes over."""
    now = {name: value for name, value in now.items() if name not in OF_ONE_START}
    changed = [
        f'{n} {before[n]!r} → {v!r}' if n in before else f'{n} → {v!r}' for n, v in now.items() if before.get(n) != v
    ]
    kept = [f'{name} {value!r}' for name, value in before.items() if name not in now]
    if changed:
        print(f'settings changed in this resume: {", ".join(changed)}', flush=True)
    if kept:
        print(f'settings kept from the run so far: {", ".join(kept)}', flush=True)
