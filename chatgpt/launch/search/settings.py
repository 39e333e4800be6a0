"""A sweep from its file: what is run, what varies, what is looked for. Everything is checked here, before any trial."""

from __future__ import annotations

import argparse
import itertools
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatgpt.launch.__main__ import parser
from chatgpt.launch.config_file import presets_of, values_of
from chatgpt.launch.config_values import flat, read_file
from chatgpt.launch.methods import METHODS
from chatgpt.launch.runs import run_class
from chatgpt.launch.search.study import PRUNERS, SAMPLERS, Sweep, ends, named, points, space_of
from chatgpt.launch.theirs import in_our_words, meet, their_settings
from chatgpt.names import hint, ours

DIRECTIONS = {'maximize': 'maximize', 'max': 'maximize', 'minimize': 'minimize', 'min': 'minimize'}
REQUIRED = ('method', 'metric', 'direction', 'parameters')
DEFAULTS = {'config': None, 'trials': None, 'seed': 42, 'sampler': 'tpe', 'pruner': 'none', 'launch': None}
DEFAULTS |= {'save_path': 'outputs/sweep'}
NUM_TRIALS = 20
OF_ONE_RUN = ('model_path', 'push_to_hub', 'resume', 'plan', 'method')
"""settings that would be the same place for all trials"""
LAUNCH: tuple[str, ...] = (
    'launcher',
    'num_workers',
    'cpus_per_worker',
    'gpus_per_worker',
    'address',
    'placement',
    'wait_s',
)
LAUNCH += ('placement', 'wait_s', 'max_failures')


def read_sweep(path: str | Path, *, launcher: str | None = None) -> Sweep:
    """The sweep of a YAML, JSON or .conf file. `launcher` takes precedence over the file's.

    Raises:
        ValueError: an unknown key (with the nearest), a missing one, a value out of range, a parameter or a value that
            the method's run does not take.
    """
    content = read_file(path)
    try:
        return _sweep(content, launcher)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from None


def _sweep(content: Mapping[str, Any], launcher: str | None) -> Sweep:
    for key in content:
        if key not in (*REQUIRED, *DEFAULTS):
            raise ValueError(f'{key!r} is no key of a sweep{hint(str(key), [*REQUIRED, *DEFAULTS])}')
    for key in REQUIRED:
        if content.get(key) is None:
            raise ValueError(f'{key} is missing')
    given = DEFAULTS | {key: value for key, value in content.items() if value is not None}
    METHODS.find(given['method'])
    if given['direction'] not in DIRECTIONS:
        raise ValueError(f'direction={given["direction"]!r} is not known; choose one of {", ".join(DIRECTIONS)}')
    config = read_file(given['config']) if isinstance(given['config'], str) else given['config'] or {}
    launch = (given['launch'] or {}) | ({'launcher': launcher} if launcher else {})
    for name, value in (('config', config), ('launch', launch)):
        if not isinstance(value, Mapping):
            raise ValueError(f'{name}={value!r} is no names with values')
    for key in launch:
        if key not in LAUNCH:
            raise ValueError(f'launch: {key!r} is not known; there are {", ".join(LAUNCH)}{hint(str(key), LAUNCH)}')
    for name, least in (('trials', 1), ('seed', 0)):
        value = given[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f'{name}={value!r} must be a whole number, at least {least}')
    sampler, pruner = named('sampler', given['sampler'], SAMPLERS), named('pruner', given['pruner'], PRUNERS)
    spaces = _spaces(given['parameters'], run_class(given['method']))
    size = len(list(itertools.product(*map(points, spaces.values())))) if sampler[0] == 'grid' else None
    fixed = {key: given[key] for key in ('method', 'parameters', 'metric', 'seed')}
    fixed |= {'config': config, 'direction': DIRECTIONS[given['direction']], 'sampler': sampler}
    sweep = Sweep(
        method=given['method'],
        metric=str(given['metric']),
        direction=DIRECTIONS[given['direction']],
        parameters=spaces,
        config=config,
        trials=min(filter(None, (given['trials'], size)), default=NUM_TRIALS),
        seed=given['seed'],
        sampler=sampler,
        pruner=pruner,
        launch=launch,
        save_path=Path(given['save_path']),
        fixed=json.loads(json.dumps(fixed, default=str)),
    )
    check_runs(sweep)
    return sweep


def _spaces(given: Any, cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls) | their_settings(cls)
    if not isinstance(given, Mapping) or not given:
        raise ValueError('parameters holds the settings that vary: names, each with a list of values, or min and max')
    spaces: dict[str, Any] = {}
    for where, key, value in flat(given):
        name = ours(key.rpartition('.')[2], hints)
        if name in (*OF_ONE_RUN, 'save_path'):
            raise ValueError(f'parameters: {where} is not for a sweep to vary')
        if name not in hints:
            raise ValueError(f'parameters: {where} is not a setting of this run{hint(key, list(hints))}')
        if name in spaces:
            raise ValueError(f'parameters: {where} is there twice')
        kinds = typing.get_args(hints[name]) or (hints[name],)
        try:
            spaces[name] = space_of(value, whole=int in kinds and float not in kinds)
        except ValueError as error:
            raise ValueError(f'parameters: {where}: {error}') from None
    return spaces


def check_runs(sweep: Sweep) -> None:
    """See that the method's run takes the settings, at both ends of each space.

    Raises:
        ValueError: it does not; names the parameter.
    """
    flags = [f'--{key}={value}' for key, value in sweep.launch.items()]
    asked = parser().parse_args([*flags, 'script']).num_workers  # a wrong flag ends with one line too
    settings, cls = list(flat(sweep.config)), run_class(sweep.method)
    below = {key: value for _, key, value in settings}
    base = values_of(settings, cls, 'config')
    for name in OF_ONE_RUN:
        if base.get(name):
            raise ValueError(f'config: {name} is of one run, and trials are many; leave it out')
    base = presets_of(sweep.method) | base
    first = {name: ends(space)[0] for name, space in sweep.parameters.items()}
    for name, value in ((name, value) for name, space in sweep.parameters.items() for value in ends(space)):
        words = [(key, key, each) for key, each in (first | {name: value}).items()]
        try:
            values, of_processes = in_our_words(base | values_of(words, cls, 'parameters', below), cls)
            if not sweep.launch:
                meet(of_processes.get('num_training_workers'))
            run = cls.from_dict(values)
            run.fill_defaults()
            run.validate(asked or of_processes.get('num_training_workers') or 1)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f'a trial with {name}={value!r} cannot run: {error}') from None
