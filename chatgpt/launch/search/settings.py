"""Reads and checks the file of a sweep, before any trial."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chatgpt.launch.__main__ import parser
from chatgpt.launch.arguments import hints_of
from chatgpt.launch.config_file import presets_of, values_of
from chatgpt.launch.config_values import flat, options_of, read_file
from chatgpt.launch.methods import METHODS
from chatgpt.launch.runs import run_class
from chatgpt.launch.search.study import PRUNERS, SAMPLERS, Sweep, distribution, made, need_optuna, points
from chatgpt.launch.theirs import check_processes, their_settings, to_our_settings
from chatgpt.names import hint, ours

DIRECTIONS = {'maximize': 'maximize', 'max': 'maximize', 'minimize': 'minimize', 'min': 'minimize'}
REQUIRED = ('method', 'metric', 'direction', 'parameters')
DEFAULTS: dict[str, Any] = {'config': {}, 'trials': None, 'seed': 42, 'sampler': 'tpe', 'pruner': 'none'}
DEFAULTS |= {'launch': {}, 'save_path': 'outputs/sweep'}
NUM_TRIALS = 20
OF_ONE_RUN = ('model_path', 'push_to_hub', 'resume', 'plan', 'method')
"""settings that all trials would share"""
LAUNCH = (
    *('launcher', 'num_workers', 'cpus_per_worker', 'gpus_per_worker', 'address', 'placement', 'wait_s'),
    'max_failures',
)
SPACE = ('strategy', 'values', 'min', 'max', 'log', 'step')
STRATEGIES = ('choice', 'uniform', 'loguniform', 'quniform', 'int', 'randint')


def read_sweep(path: str | Path, *, launcher: str | None = None) -> Sweep:
    """Returns the sweep of a YAML, JSON or .conf file. `launcher` takes precedence over the file's.

    Raises:
        ValueError: for an unknown key (names the nearest), a missing one, a value out of range, or a parameter or value
            that the method's run does not take.
        ImportError: if Optuna is not installed; names the command that installs it.
    """
    need_optuna()
    content = read_file(path)
    try:
        return _sweep(content, launcher)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from None


def _sweep(content: Mapping[str, Any], launcher: str | None) -> Sweep:
    for key in content:
        if key not in (*REQUIRED, *DEFAULTS):
            raise ValueError(f'{key!r} is no key of a sweep{hint(str(key), [*REQUIRED, *DEFAULTS])}')
    given = DEFAULTS | {key: value for key, value in content.items() if value is not None}
    for key in REQUIRED:
        if key not in given:
            raise ValueError(f'{key} is missing')
    METHODS.find(given['method'])
    given['direction'] = DIRECTIONS[known('direction', given['direction'], DIRECTIONS)]
    given['config'] = read_file(given['config']) if isinstance(given['config'], str) else given['config']
    for name in ('config', 'launch'):
        if not isinstance(given[name], Mapping):
            raise ValueError(f'{name}={given[name]!r} is no names with values')
    for key in given['launch']:
        if key not in LAUNCH:
            raise ValueError(f'launch: {key!r} is not known; there are {", ".join(LAUNCH)}{hint(str(key), LAUNCH)}')
    given['launch'] = given['launch'] | ({'launcher': launcher} if launcher else {})
    for name, least in (('trials', 1), ('seed', 0)):
        value = given[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f'{name}={value!r} must be a whole number, at least {least}')
    for name, classes in (('sampler', SAMPLERS), ('pruner', PRUNERS)):  # `tpe`, or {name: tpe, n_startup_trials: 5}
        options = dict(given[name]) if isinstance(given[name], Mapping) else {'name': given[name]}
        given[name] = known(name, options.pop('name', None), classes), options
        seed: dict[str, Any] = {'seed': 0} if name == 'sampler' else {}  # so that `seed` among the options is an error
        made(name, *given[name], **seed)
    fixed = {key: given[key] for key in (*REQUIRED, 'seed', 'config', 'sampler')}
    given['parameters'] = _spaces(given['parameters'], given['method'])
    size = math.prod(len(points(s)) for s in given['parameters'].values()) if given['sampler'][0] == 'grid' else None
    given['trials'] = min(filter(None, (given['trials'], size)), default=NUM_TRIALS)
    if not isinstance(given['save_path'], str | os.PathLike):
        raise ValueError(f'save_path={given["save_path"]!r} is no path')
    given |= {'metric': str(given['metric']), 'save_path': Path(given['save_path'])}
    sweep = Sweep(**given, fixed=json.loads(json.dumps(fixed, default=str)))
    check_runs(sweep)
    return sweep


def known(what: str, value: Any, choices: Iterable[str]) -> Any:
    if not isinstance(value, str) or value not in choices:
        names = list(choices)
        raise ValueError(f'{what}={value!r} is not known; choose one of {", ".join(names)}{hint(str(value), names)}')
    return value


def _spaces(given: Any, method: str) -> dict[str, Any]:
    hints = hints_of(run_class(method)) | their_settings(run_class(method))
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
        kinds = options_of(hints[name])
        try:
            spaces[name] = space_of(value, whole=int in kinds and float not in kinds)
        except ValueError as error:
            raise ValueError(f'parameters: {where}: {error}') from None
    return spaces


def space_of(given: Any, *, whole: bool) -> Any:
    """Returns the Optuna distribution of a parameter, given as `[8, 16]`, `{min: 0, max: 1}` or in the form of trlX's
    sweeps, `{strategy: loguniform, values: [1.0e-5, 1.0e-3]}`.

    Args:
        whole: the setting takes whole numbers only.

    Raises:
        ValueError: if it is no list and has neither `values` nor `min` and `max`, or they do not fit the strategy.
    """
    given = {'values': given} if isinstance(given, list) else given
    if not isinstance(given, Mapping):
        raise ValueError(f'{given!r} is one value, which does not vary; give a list of values, or min and max')
    for key in given:
        known('key', key, SPACE)
    values = given.get('values')
    strategy = given.get('strategy', 'choice' if values is not None else 'int' if whole else 'uniform')
    if known('strategy', strategy, STRATEGIES) == 'choice':
        single = isinstance(values, list) and all(isinstance(v, float | int | str | bool | None) for v in values)
        if not values or not single or set(given) - {'strategy', 'values'}:
            raise ValueError('choice takes values, a list of at least one, each a single value, and nothing else')
        return distribution('Categorical', values)
    if values is not None and (not isinstance(values, list) or len(values) not in (2, 3) or 'min' in given):
        raise ValueError(f'{strategy} takes values: [low, high], or min and max')
    bounds: list[Any] = [*values, None] if values else [given.get(name) for name in ('min', 'max', 'step')]
    low, high, step = bounds[:3]
    for name, value in (('min', low), ('max', high), ('step', 1 if step is None else step)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f'{name}={value!r} is no number, and a range needs min and max')
    if strategy == 'quniform' and step is None:
        raise ValueError('quniform needs a step: values: [low, high, step]')
    log, high = (
        given.get('log', strategy == 'loguniform'),
        high - (strategy == 'randint'),
    )  # randint excludes its end, as in numpy and Ray
    if not whole and strategy not in ('int', 'randint'):
        return distribution('Float', low, high, log, step)
    if any(value != int(value) for value in (low, high, step or 1)):
        raise ValueError(f'{low}, {high}: whole numbers are needed')
    return distribution('Int', int(low), int(high), log, int(step or 1))


def check_runs(sweep: Sweep) -> None:
    """Checks the settings of trials at both ends of each parameter.

    Raises:
        ValueError: if the method's run does not take them; names the parameter.
    """
    flags = [f'--{key}={value}' for key, value in sweep.launch.items()]
    workers = parser().parse_args([*flags, 'script']).num_workers  # reports a wrong flag of the launcher
    settings, cls = list(flat(sweep.config)), run_class(sweep.method)
    below = {key: value for _, key, value in settings}
    base = values_of(settings, cls, 'config')
    for name in OF_ONE_RUN:
        if base.get(name):
            raise ValueError(f'config: {name} is of one run, and trials are many; leave it out')
    base = presets_of(sweep.method) | base
    ends = {
        name: getattr(space, 'choices', None) or (space.low, space.high) for name, space in sweep.parameters.items()
    }
    for name, value in ((name, value) for name, values in ends.items() for value in values):
        words = [(key, key, value if key == name else values[0]) for key, values in ends.items()]
        try:
            values, of_processes = to_our_settings(base | values_of(words, cls, 'parameters', below), cls)
            if not sweep.launch:
                check_processes(of_processes.get('num_training_workers'))
            run = cls.from_dict(values)
            run.fill_defaults()
            run.validate(workers or of_processes.get('num_training_workers') or 1)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f'a trial with {name}={value!r} cannot run: {error}') from None
