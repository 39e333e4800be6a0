"""Runs from config files (YAML, JSON, or a `.conf` file with one Python literal), `key=value` words and flags.

Precedence, from low to high: defaults of the dataclass, file, `key=value` words, flags. A file may be flat, or have the
sections General, Dataset and Training; keys are names of the run's fields or llm-on-ray's. No code in a file is run.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from chatgpt.launch.arguments import Parser, add_flag, choices_of, field_docs, hints_of
from chatgpt.launch.config_values import OVERRIDE, collected, flat, overrides, read_file
from chatgpt.launch.methods import METHODS
from chatgpt.launch.runs import PPORun, Run, run_class
from chatgpt.launch.theirs import check_processes, their_settings, to_our_settings
from chatgpt.names import hint, ours

R = TypeVar('R', bound=Run)
BOOLEANS = ('true', 'false', 'yes', 'no', '1', '0')
PAIRS = {'pretrain': ('model_name', 'model_pretrain'), 'reward_model': ('rm_name', 'rm_pretrain')}
"""llm-on-ray's two keys for one PPO model, by our field: the model, and trained weights that replace it"""


def values_of(
    entries: Iterable[tuple[str, str, Any]], cls: type[Run], source: str, below: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the values of a run's fields from entries (place, key, value).

    Args:
        below: keys and values of the source that these entries override.

    Raises:
        ValueError: for an unknown key (names the nearest), two keys for one field, or a value of another type.
    """

    entries = list(entries)

    def unknown(where: str, key: str) -> NoReturn:
        others = _commands_with([key for _, key, _ in entries])
        other_command = (
            f'; the settings of this file are those of {" or ".join(others)}: use that command' if others else ''
        )
        raise ValueError(f'{source}: {where} is not a setting of this run{other_command or hint(key, _names(cls))}')

    hints = hints_of(cls) | their_settings(cls)
    return collected(_paired(entries, cls, below or {}), hints, f'{source}: ', unknown)


def _commands_with(keys: SequenceOf[str]) -> list[str]:
    """Returns the commands that take all of these settings, the first of those with equal settings. Returns no command
    for a single key, which is more likely misspelt."""
    commands = {run_class(name): name for name in reversed(list(METHODS))} if len(keys) > 1 else {}
    known = {name: hints_of(cls) | their_settings(cls) for cls, name in commands.items()}
    return sorted(name for name, hints in known.items() if all(ours(key, hints) in hints for key in keys))


def _paired(
    entries: list[tuple[str, str, Any]], cls: type[Run], below: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any]]:
    """Replaces each pair of keys in `PAIRS` by one field: the trained weights if given, else the name, from this source
    or the one below."""
    pairs = {key: (field, *keys) for field, keys in PAIRS.items() for key in keys} if issubclass(cls, PPORun) else {}
    values = {key: value for _, key, value in entries}
    for where, key, value in entries:
        field, name, weights = pairs.get(key, (key, '', ''))
        if key == weights and value is None:
            if name not in values and field not in values:
                yield where, field, below.get(name)
        elif key != name or values.get(weights) is None:
            yield where, field, value


def _names(cls: type[Run]) -> list[str]:
    return [*cls.field_names(), *their_settings(cls)]


# ---------------------------------------------------------------------- command lines


HELP_ALL = '--help-all'


def parse_run(
    cls: type[R],
    *,
    description: str | None,
    positional: str | None = None,
    argv: SequenceOf[str] | None = None,
    method: str | None = None,
    prog: str | None = None,
) -> R:
    """Returns the run of a command line: positional sources of data, flags, `--config_file`, `key=value` words.

    Args:
        positional: the field that a word without `=` sets, or several words if it is a list.
        method: name in `METHODS` of the method that gives the defaults; None: that of the user or of the class.
        prog: name of the command in --help.

    Raises:
        ValueError: see `values_of`.
        SystemExit: after --print_config, which prints all settings as YAML.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = run_parser(cls, description, positional, method=method, prog=prog, everything=HELP_ALL in argv)
    if HELP_ALL in argv:
        parser.print_help()
        raise SystemExit(0)
    flags, words = _split_argv(argv, cls)
    given = vars(parser.parse_args(flags))
    plain, path, show = given.pop('words', []), given.pop('config_file', None), given.pop('print_config', False)
    several = positional is not None and hints_of(cls)[positional] == list[str] | None
    if len(plain) > (positional is not None) and not several:
        parser.error(f'{plain[-1]!r} is one word too many')
    entries = list(flat(read_file(path))) if path is not None else []
    values = values_of(entries, cls, f'config_file {path}')
    values |= values_of(overrides(words), cls, 'command line', {key: value for _, key, value in entries})
    if plain and positional is not None:
        values[positional] = plain if several else plain[0]
    presets = presets_of(method)
    before = given_before(cls, presets | values | given)
    values, of_processes = to_our_settings(values | given, cls, before)
    if not show:
        check_processes(**of_processes)
    given_values = presets | before | values
    run = cls.from_dict(given_values)
    run.given, run.method = given_values, method or run.method
    if show:
        print(to_yaml(run), end='')
        raise SystemExit(0)
    if before and os.environ.get('RANK', '0') == '0':
        report_changes({n: v for n, v in before.items() if n not in presets}, values, cls.from_dict({}).to_dict())
    return run


def presets_of(method: str | None) -> dict[str, Any]:
    """Returns the settings that a method changes from the class's defaults."""
    if method is None:
        return {}
    return {'save_path': f'outputs/{method.rpartition(":")[2]}'} | dict(METHODS.find(method).settings)


def run_parser(
    cls: type[Run],
    description: str | None,
    positional: str | None,
    *,
    method: str | None = None,
    prog: str | None = None,
    everything: bool = False,
) -> Parser:
    """Returns a parser of a run's flags. --help shows the common ones in groups, with `everything` all of them."""
    parser = Parser(description=description, prog=prog, add_help=False, argument_default=argparse.SUPPRESS)
    hints = hints_of(cls)
    more = ' ...' if positional and hints[positional] == list[str] | None else ''
    word = f'[{positional.upper()}{more}] ' if positional else ''
    parser.usage = f'%(prog)s {word}[--name value ...] [key=value ...]'
    docs, all_fields = field_docs(cls), {f.name: f for f in fields(cls)}
    common = {name: title for title, names in cls.common.items() for name in names}
    presets = presets_of(method)

    def add(group: Any, name: str, shown: bool) -> None:
        f = all_fields[name]
        text = option_text(cls, name, docs.get(name, ''), presets.get(name, f.default), method)
        add_flag(group, name, hints[name], text if shown else argparse.SUPPRESS, choices=choices_of(f))

    what = f'{docs[positional]}; ' if positional else ''
    words = f'{what}key=value words override the file'
    parser.add_argument('words', nargs='*', metavar=positional or 'key=value', help=words, default=argparse.SUPPRESS)
    start = parser.add_argument_group('help and config files')
    start.add_argument('-h', '--help', action='help', help='show the common options and stop')
    start.add_argument(HELP_ALL, action='store_true', help='show every option and stop')
    start.add_argument('--config_file', help='YAML, JSON or .conf file; flags and key=value words override it')
    start.add_argument('--print_config', action='store_true', help='print all settings with their values and stop')
    for title, names in cls.common.items():
        group = parser.add_argument_group(title)
        for name in names:
            add(group, name, name != positional)
    for base in (b for b in cls.__mro__ if '__annotations__' in vars(b)):
        group = parser.add_argument_group(f'more of {base.__name__}')
        for name in base.__annotations__:
            if name in all_fields and name not in common and name not in {a.dest for a in parser._actions}:
                add(group, name, everything)
    for name, kind in their_settings(cls).items():
        add_flag(parser, name, kind, argparse.SUPPRESS)
    return parser


def option_text(cls: type[Run], name: str, doc: str, default: Any, method: str | None) -> str:
    """Returns the help of a setting: its docstring, and its default unless the docstring has it."""
    shown = '' if default is MISSING else cls.shown_default(name, default, method)
    return doc if shown == 'none' and 'none:' in doc else f'{doc} (default: {shown})'.strip()


def _split_argv(argv: list[str], cls: type[Run]) -> tuple[list[str], list[str]]:
    """Splits a command line into flags and plain words for argparse, and `key=value` words, which may be anywhere.

    `--tensorboard` alone becomes `--tensorboard=true`, `--no_packing` `--packing=false`, and `--learning_rate` `--lr`.
    A word behind `--tensorboard` that looks neither like a file nor like a data set is its value.

    Raises:
        ValueError: if two flags are different names of one setting.
    """
    names, hints = _names(cls), hints_of(cls)
    switches = {name for name, hint in hints.items() if hint in (bool, bool | None)}
    flags, words, names_given = list[str](), list[str](), dict[str, str]()
    takes_value = False
    for i, word in enumerate(argv):
        given, equals, text = word.removeprefix('--').partition('=')
        if takes_value and re.fullmatch(r'-\.?\d.*', word):
            flags[-1] += f'={word}'  # argparse takes -1e-3 for a flag
            takes_value = False
            continue
        if takes_value or not word.startswith('--') or word == '--':
            (words if OVERRIDE.fullmatch(word) and not takes_value else flags).append(word)
            takes_value = False
            continue
        name = ours(given, names)
        if names_given.setdefault(name, given) != given:
            raise ValueError(f'--{names_given[name]} and --{given} both set {name}; give one')
        takes_value = not equals and name not in ('print_config', 'help')
        if not equals and name in switches:
            following = argv[i + 1] if i + 1 < len(argv) else ''
            takes_value = following.lower() in BOOLEANS or following.isalpha() and not Path(following).exists()
            flags.append(f'--{name}' if takes_value else f'--{name}=true')
        elif not equals and given.startswith('no_') and given[3:] in switches:
            takes_value = False
            flags.append(f'--{given[3:]}=false')
        else:
            flags.append(f'--{name}{equals}{text}')
    return flags, words


def to_yaml(run: Run) -> str:
    """Returns every field of a run as YAML, from which `read_file` and `Run.from_dict` make the same run."""
    import yaml

    return yaml.safe_dump(run.to_dict(), sort_keys=False, allow_unicode=True)


def write_resolved(run: Run, folder: str | Path) -> None:
    """Writes `config.yaml`, every setting, and `given.yaml`, the settings given in this or an earlier start."""
    import yaml

    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, 'config.yaml').write_text(to_yaml(run))
    kept = {name: value for name, value in run.given.items() if name not in START_SETTINGS}
    Path(folder, GIVEN_FILE).write_text(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))


# ---------------------------------------------------------------------- resuming

GIVEN_FILE, FORMER_GIVEN_FILE = 'given.yaml', 'said.yaml'
"""the second is read in folders of runs that have not written the first"""
START_SETTINGS = ('resume', 'save_path', 'plan', 'strategy')
"""settings of one start only, which a resume does not take over"""


def given_before(cls: type[Run], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings given in earlier starts of the run that `resume` names; empty without a resume."""
    if not values.get('resume'):
        return {}
    from chatgpt.strategies.checkpoint import latest

    save_path = Path(values.get('save_path') or cls.from_dict({}).save_path)
    if values['resume'] == 'auto':
        places = [save_path] if latest(save_path / 'checkpoints') is not None else []
    else:  # a run's folder, its checkpoints, or one of them
        folder = Path(values['resume']).absolute()
        places = [folder, folder.parent, folder.parent.parent]
    files = (place / name for place in places for name in (GIVEN_FILE, FORMER_GIVEN_FILE))
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        return {}
    known = set(cls.field_names()) - set(START_SETTINGS)
    return {name: value for name, value in (read_file(found) or {}).items() if name in known}


def report_changes(before: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Prints the settings that this start changes and those it keeps. A given default is no change."""
    now = {n: v for n, v in now.items() if n not in START_SETTINGS and (n in before or v != defaults.get(n))}
    changed = [
        f'{n} {before[n]!r} → {v!r}' if n in before else f'{n} → {v!r}' for n, v in now.items() if before.get(n) != v
    ]
    kept = [f'{name} {value!r}' for name, value in before.items() if name not in now]
    if changed:
        print(f'settings changed in this resume: {", ".join(changed)}', flush=True)
    if kept:
        print(f'settings kept from the run so far: {", ".join(kept)}', flush=True)
