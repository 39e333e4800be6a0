"""A sweep from its file: what is run, what varies, what is looked for. Everything is checked here, before any trial.

Left out: spaces of single settings (`space`), and Optuna (`study`).
"""

from __future__ import annotations

import argparse
import itertools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from chatgpt.launch.__main__ import parser
from chatgpt.launch.config_file import presets_of, values_of
from chatgpt.launch.config_values import flat, read_file
from chatgpt.launch.methods import METHODS
from chatgpt.launch.runs import Run, run_class
from chatgpt.launch.theirs import in_our_words, meet, their_settings
from chatgpt.names import hint, ours
from chatgpt.search.space import Space, Value, space_of

DIRECTIONS = {'maximize': 'maximize', 'max': 'maximize', 'minimize': 'minimize', 'min': 'minimize'}
SAMPLERS = {'tpe': 'TPESampler', 'random': 'RandomSampler', 'grid': None}
PRUNERS = {
    'none': None,
    'median': 'MedianPruner',
    'halving': 'SuccessiveHalvingPruner',
    'hyperband': 'HyperbandPruner',
}
"""their classes in Optuna"""
NUM_TRIALS = 20
OF_ONE_RUN = ('save_path', 'model_path', 'push_to_hub', 'resume', 'plan', 'method')
"""settings that a sweep decides, or that would be the same place for all trials"""
LAUNCH = (
    'launcher',
    'num_workers',
    'cpus_per_worker',
    'gpus_per_worker',
    'address',
    'placement',
    'wait_s',
    'max_failures',
)


@dataclass(frozen=True)
class Named:
    """A sampler or pruner: a name, and arguments of its class in Optuna."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep's file.

    Args:
        method: what each trial runs.
        config: its settings, but for those that vary: a file, or names with values.
        parameters: what varies.
        metric: name in metrics.jsonl; a trial's value is the last of it.
        trials: in all, those of earlier calls included; with sampler grid, at most all of its points.
        launch: flags of `python -m chatgpt.launch`, under which trials run; without any they are single processes.
    """

    method: str
    metric: str
    direction: str
    parameters: Mapping[str, Space]
    config: Mapping[str, Any]
    trials: int
    seed: int
    sampler: Named
    pruner: Named
    launch: Mapping[str, Any]
    save_path: Path
    given_parameters: Mapping[str, Any]
    """as the file has them"""

    def grid(self) -> list[dict[str, Value]]:
        """Every combination of values; the last parameter changes fastest."""
        return [
            dict(zip(self.parameters, point, strict=True))
            for point in itertools.product(*(space.points() for space in self.parameters.values()))
        ]

    def fixed(self) -> dict[str, Any]:
        """What must be the same when the sweep goes on."""
        return {
            'method': self.method,
            'config': self.config,
            'parameters': self.given_parameters,
            'metric': self.metric,
            'direction': self.direction,
            'seed': self.seed,
            'sampler': {'name': self.sampler.name, **self.sampler.options},
        }


KEYS = tuple(f.name for f in fields(Sweep) if f.name != 'given_parameters')


def read_sweep(path: str | Path, *, launcher: str | None = None) -> Sweep:
    """The sweep of a YAML, JSON or .conf file.

    Args:
        launcher: stands above the file's.

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
        if key not in KEYS:
            raise ValueError(f'{key!r} is no key of a sweep{hint(str(key), KEYS)}')
    for key in ('method', 'metric', 'direction', 'parameters'):
        if content.get(key) is None:
            raise ValueError(f'{key} is missing')
    method, direction = content['method'], content['direction']
    METHODS.find(method)
    _known('direction', direction, DIRECTIONS)
    config = content.get('config') or {}
    if isinstance(config, str):
        config = read_file(config)
    if not isinstance(config, Mapping):
        raise ValueError(f'config={config!r} is neither a file nor names with values')
    spaces = _spaces(content['parameters'], run_class(method))
    launch = dict(_mapping('launch', content.get('launch')))
    for key in launch:
        if key not in LAUNCH:
            raise ValueError(f'launch: {key!r} is not known; there are {", ".join(LAUNCH)}{hint(str(key), LAUNCH)}')
    if launcher is not None:
        launch['launcher'] = launcher
    sweep = Sweep(
        method=method,
        metric=str(content['metric']),
        direction=DIRECTIONS[direction],
        parameters=spaces,
        config=config,
        trials=_whole('trials', content.get('trials'), 0),
        seed=_whole('seed', content.get('seed', 42), 0),
        sampler=_named('sampler', content.get('sampler', 'tpe'), SAMPLERS),
        pruner=_named('pruner', content.get('pruner', 'none'), PRUNERS),
        launch=launch,
        save_path=Path(str(content.get('save_path') or 'outputs/sweep')),
        given_parameters=content['parameters'],
    )
    size = len(sweep.grid()) if sweep.sampler.name == 'grid' else None
    sweep = replace(sweep, trials=min(sweep.trials or size or NUM_TRIALS, size or sweep.trials or NUM_TRIALS))
    check_runs(sweep)
    return sweep


def _known(name: str, value: Any, choices: typing.Collection[str]) -> None:
    if value not in choices:
        raise ValueError(
            f'{name}={value!r} is not known; choose one of {", ".join(choices)}{hint(str(value), choices)}'
        )


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f'{name}={value!r} is no names with values')
    return value or {}


def _whole(name: str, value: Any, least: int) -> int:
    value = 0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f'{name}={value!r} must be a whole number, at least {least}')
    return value


def _named(name: str, value: Any, choices: typing.Collection[str]) -> Named:
    """`tpe`, or {name: tpe, n_startup_trials: 5}."""
    options = dict(value) if isinstance(value, Mapping) else {'name': 'none' if value is None else value}
    chosen = options.pop('name', None)
    _known(name, chosen, choices)
    return Named(str(chosen), options)


def _spaces(given: Any, cls: type[Run]) -> dict[str, Space]:
    hints = typing.get_type_hints(cls) | their_settings(cls)
    if not isinstance(given, Mapping) or not given:
        raise ValueError('parameters holds the settings that vary: names, each with a list of values, or min and max')
    spaces: dict[str, Space] = {}
    for where, key, value in _entries(given):
        name = ours(key, hints)
        if name in OF_ONE_RUN:
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


def _entries(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """With the sections of config files opened, as `Training: {lr: ...}` or `Training.lr: ...`."""
    for where, key, value in flat(given):
        yield where, key.rpartition('.')[2], value


# ---------------------------------------------------------------------- the runs


def check_runs(sweep: Sweep) -> None:
    """See that the method's run takes the settings, at both ends of each space.

    Raises:
        ValueError: it does not; names the parameter.
    """
    flags = [f'--{key}={value}' for key, value in sweep.launch.items()]
    asked = parser().parse_args([*flags, 'script']).num_workers  # where a flag is wrong this ends with one line too
    settings = list(flat(sweep.config))
    below = {key: value for _, key, value in settings}
    cls = run_class(sweep.method)
    base = values_of(settings, cls, 'config')
    for name in ('model_path', 'push_to_hub', 'resume', 'plan', 'method'):
        if base.get(name):
            raise ValueError(f'config: {name} is of one run, and trials are many; leave it out')
    base = presets_of(cls, sweep.method) | base
    first = {name: space.extremes()[0] for name, space in sweep.parameters.items()}
    for name, space in sweep.parameters.items():
        for value in space.extremes():
            words = [(name, name, value) for name, value in (first | {name: value}).items()]
            try:
                values, of_processes = in_our_words(base | values_of(words, cls, 'parameters', below), cls)
                if not sweep.launch:
                    meet(of_processes.get('num_training_workers'))
                run = cls.from_dict(values)
                run.fill_defaults()
                run.validate(asked or of_processes.get('num_training_workers') or 1)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise ValueError(f'a trial with {name}={value!r} cannot run: {error}') from None
