"""Optuna: the one file that imports it. Spaces, samplers and pruners by name, and the study of a sweep in a journal.

What is proposed depends on the file's seed, the number of the trial and the trials before it alone, so a sweep that was
interrupted continues as if it had not been.
"""

from __future__ import annotations

import csv
import itertools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chatgpt.names import hint

JOURNAL = 'journal.log'
SAMPLERS = {'tpe': 'TPESampler', 'random': 'RandomSampler', 'grid': None}
PRUNERS = {'none': 'NopPruner', 'median': 'MedianPruner', 'halving': 'SuccessiveHalvingPruner'}
PRUNERS |= {'hyperband': 'HyperbandPruner'}
"""their classes in Optuna"""
SPACE = ('strategy', 'values', 'min', 'max', 'log', 'step')
STRATEGIES = ('choice', 'uniform', 'loguniform', 'quniform', 'int', 'randint')
STATES = {
    'COMPLETE': 'complete',
    'PRUNED': 'pruned',
    'RUNNING': 'unfinished',
    'FAIL': 'failed',
    'WAITING': 'unfinished',
}
"""in the order of the table"""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep's file.

    Args:
        method: what each trial runs.
        config: its settings, but for those that vary.
        parameters: what varies; an Optuna distribution each.
        metric: name in metrics.jsonl; a trial's value is the last of it.
        trials: in all, those of earlier calls included.
        sampler, pruner: a name, and arguments of its class in Optuna.
        launch: flags of `python -m chatgpt.launch`, under which trials run; without any they are single processes.
        fixed: what must be the same when the sweep is continued.
    """

    method: str
    metric: str
    direction: str
    parameters: Mapping[str, Any]
    config: Mapping[str, Any]
    trials: int
    seed: int
    sampler: tuple[str, Mapping[str, Any]]
    pruner: tuple[str, Mapping[str, Any]]
    launch: Mapping[str, Any]
    save_path: Path
    fixed: Mapping[str, Any]

    def grid(self) -> list[dict[str, Any]]:
        """Every combination of values; the last parameter changes fastest."""
        combinations = itertools.product(*map(points, self.parameters.values()))
        return [dict(zip(self.parameters, values, strict=True)) for values in combinations]


def need_optuna() -> None:
    if find_spec('optuna') is None:
        raise ImportError(
            "a sweep needs the package optuna: pip install optuna, or from a checkout pip install '.[sweep]'"
        )


def known(what: str, value: Any, choices: Any) -> Any:
    if value not in choices:
        raise ValueError(
            f'{what}={value!r} is not known; choose one of {", ".join(choices)}{hint(str(value), list(choices))}'
        )
    return value


def space_of(given: Any, *, whole: bool) -> Any:
    """The Optuna distribution that a sweep's file gives, as `[8, 16]`, `{min: 0, max: 1}` or in the form of trlX's
    sweeps, `{strategy: loguniform, values: [1.0e-5, 1.0e-3]}`.

    Args:
        whole: the setting takes whole numbers only.

    Raises:
        ValueError: it is no list and has no `values` or `min` and `max`, or they do not fit the strategy.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    given = {'values': given} if isinstance(given, list) else given
    if not isinstance(given, Mapping):
        raise ValueError(f'{given!r} is one value, which does not vary; give a list of values, or min and max')
    for key in given:
        if key not in SPACE:
            raise ValueError(f'{key!r} is not known; there are {", ".join(SPACE)}{hint(str(key), SPACE)}')
    values = given.get('values')
    strategy = given.get('strategy', 'choice' if values is not None else 'int' if whole else 'uniform')
    if known('strategy', strategy, STRATEGIES) == 'choice':
        if not isinstance(values, list) or not values or set(given) - {'strategy', 'values'}:
            raise ValueError('choice takes values, a list of at least one, and nothing else')
        if not all(isinstance(value, float | int | str | bool | None) for value in values):
            raise ValueError(f'values={values} holds something that is no single value')
        return CategoricalDistribution(values)
    if values is not None and (not isinstance(values, list) or len(values) not in (2, 3) or 'min' in given):
        raise ValueError(f'{strategy} takes values: [low, high], or min and max')
    given_range: list[Any] = [*values, None] if values else [given.get(name) for name in ('min', 'max', 'step')]
    low, high, step = given_range[:3]
    for name, value in (('min', low), ('max', high), ('step', 1 if step is None else step)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f'{name}={value!r} is no number, and a range needs min and max')
    if strategy == 'quniform' and step is None:
        raise ValueError('quniform needs a step: values: [low, high, step]')
    log, high = given.get('log', strategy == 'loguniform'), high - (strategy == 'randint')  # as numpy and Ray have it
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # the upper end becomes a multiple of the step
        if not whole and strategy not in ('int', 'randint'):
            return FloatDistribution(low, high, log, step)
        if any(value != int(value) for value in (low, high, step or 1)):
            raise ValueError(f'{low}, {high}: whole numbers are needed')
        return IntDistribution(int(low), int(high), log, int(step or 1))


def points(space: Any) -> list[Any]:
    """Every value of a space. Raises ValueError where there are infinitely many."""
    if hasattr(space, 'choices'):
        return list(space.choices)
    if space.step is None:
        raise ValueError('sampler grid tries every value, and a range without a step has no end of them')
    return [space.low + i * space.step for i in range(round((space.high - space.low) / space.step) + 1)]


def ends(space: Any) -> list[Any]:
    """All values of a choice, and both ends of a range."""
    return list(space.choices) if hasattr(space, 'choices') else [space.low, space.high]


def named(what: str, given: Any, classes: Mapping[str, str | None]) -> tuple[str, dict[str, Any]]:
    """`tpe`, or {name: tpe, n_startup_trials: 5}, as name and options."""
    options = dict(given) if isinstance(given, Mapping) else {'name': given}
    name = known(what, options.pop('name', None), classes)
    if classes[name] is not None:
        _made(what, classes, (name, options))
    return name, options


def _made(what: str, classes: Mapping[str, str | None], of: tuple[str, Mapping[str, Any]], **more: Any) -> Any:
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # what Optuna calls experimental
        try:
            return getattr(getattr(optuna, f'{what}s'), str(classes[of[0]]))(**of[1], **more)
        except (TypeError, ValueError) as error:
            raise ValueError(f'{what} {of[0]}: {error}') from None


class Study:
    """The trials of a sweep, on disk. One process at a time holds it."""

    def __init__(self, sweep: Sweep) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep = sweep
        path = sweep.save_path / JOURNAL
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend(path)
        self.optuna = optuna.create_study(
            study_name='sweep',
            storage=JournalStorage(JournalFileBackend(str(path))),
            direction=sweep.direction,  # type: ignore[arg-type]
            pruner=_made('pruner', PRUNERS, sweep.pruner),
            load_if_exists=True,
        )

    def unfinished(self) -> list[Any]:
        """Trials that were started and have no end. A parameter that was not written down in time is drawn now."""
        import optuna

        found = []
        for t in self.optuna.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            self._seed(t.number)
            trial = optuna.trial.Trial(self.optuna, t._trial_id)
            for name, space in self.sweep.parameters.items():
                trial._suggest(name, space)
            found.append(trial)
        return found

    def num_trials(self) -> int:
        """Those that were started."""
        return sum(t.state.name != 'WAITING' for t in self.optuna.get_trials(deepcopy=False))

    def ask(self) -> Any:
        """A new trial, with its parameters."""
        number = self.num_trials()
        self._seed(number)
        is_new = number == len(self.optuna.get_trials(deepcopy=False))
        if self.sweep.sampler[0] == 'grid' and is_new:  # else it waits since a call that was killed
            self.optuna.enqueue_trial(self.sweep.grid()[number])
        return self.optuna.ask(dict(self.sweep.parameters))

    def _seed(self, number: int) -> None:
        """Draws from here on are those of this trial."""
        import numpy as np

        if self.sweep.sampler[0] != 'grid':
            seed = int(np.random.SeedSequence([self.sweep.seed, number]).generate_state(1)[0])
            self.optuna.sampler = _made('sampler', SAMPLERS, self.sweep.sampler, seed=seed)

    def report(self, trial: Any, value: float, step: int) -> bool:
        """Note the metric of a step; whether the trial is to be pruned."""
        if step not in self.optuna._storage.get_trial(trial._trial_id).intermediate_values:
            trial.report(value, step)
        return trial.should_prune()

    def end(self, trial: Any, state: str, value: float | None = None, *, seconds: float, error: str = '') -> None:
        """`state`: COMPLETE (with a value), PRUNED or FAIL."""
        from optuna.trial import TrialState

        trial.set_user_attr('seconds', round(seconds, 1))
        trial.set_user_attr('error', error)
        self.optuna.tell(trial, value if state == 'COMPLETE' else None, state=TrialState[state])

    def write_table(self) -> tuple[str, dict[str, Any] | None, list[int]]:
        """Writes trials.csv in the order of the trials. Returns the same as text, the best first; the row of the best
        complete trial; and the numbers of unfinished ones."""
        rows: list[dict[str, Any]] = []
        for t in self.optuna.get_trials():
            step = max(t.intermediate_values, default=None)
            value = None if t.state.name == 'FAIL' or step is None else t.intermediate_values[step]
            row: dict[str, Any] = {'number': t.number, 'state': STATES[t.state.name], 'value': value, 'step': step}
            row |= {name: t.params.get(name) for name in self.sweep.parameters}
            rows.append(row | {name: t.user_attrs.get(name, '') for name in ('seconds', 'error')})
        names = ['number', 'state', 'value', 'step', *self.sweep.parameters, 'seconds', 'error']
        with open(self.sweep.save_path / 'trials.csv', 'w', newline='') as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
        sign, order = -1 if self.sweep.direction == 'maximize' else 1, list(STATES.values())
        rows.sort(key=lambda row: (order.index(row['state']), sign * (row['value'] or 0.0), row['number']))
        used = [name for name in names if name != 'error' or any(row['error'] for row in rows)]
        heads = [self.sweep.metric if name == 'value' else name for name in used]
        text = [{head: shown(row[name]) for head, name in zip(heads, used, strict=True)} for row in rows]
        best = rows[0] if rows and rows[0]['state'] == 'complete' else None
        unfinished = sorted(row['number'] for row in rows if row['state'] == 'unfinished')
        from chatgpt.trainer.callbacks import format_table  # torch, which a mistake in the file does not wait for

        return format_table(text, heads, width=100), best, unfinished

    def write_plots(self) -> None:
        """curves.png, the metric by step of every trial, and parameters.png, against each parameter."""
        if find_spec('matplotlib') is None:
            print('no plots: they need the package matplotlib: pip install matplotlib', flush=True)
            return
        import matplotlib

        matplotlib.use('Agg')
        from matplotlib import pyplot as plt
        from optuna.visualization import matplotlib as plots

        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # what Optuna calls experimental
            for name, plot in (('curves', plots.plot_intermediate_values), ('parameters', plots.plot_slice)):
                plot(self.optuna)
                plt.savefig(self.sweep.save_path / f'{name}.png', dpi=110, bbox_inches='tight')
                plt.close('all')


def shown(value: Any) -> str:
    return '' if value is None else f'{value:.4g}' if isinstance(value, float) else str(value)


def _mend(path: Path) -> None:
    """Remove what a killed process has left: half a line at the end, and a lock. Only for who holds the folder."""
    if path.is_file():
        text = path.read_bytes()
        if text and not text.endswith(b'\n'):
            path.write_bytes(text[: text.rfind(b'\n') + 1])
    for lock in path.parent.glob(f'{JOURNAL}.lock*'):
        lock.unlink()
