"""Optuna, which only this file imports: distributions, samplers and pruners by name, and the study of a sweep in a
journal.

Proposals depend only on the file's seed, the number of the trial and the trials before it, so an interrupted sweep
continues as if it had not been interrupted.
"""

from __future__ import annotations

import csv
import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

JOURNAL = 'journal.log'
SAMPLERS = {'tpe': 'TPESampler', 'random': 'RandomSampler', 'grid': 'PartialFixedSampler'}
PRUNERS = {'none': 'NopPruner', 'median': 'MedianPruner', 'halving': 'SuccessiveHalvingPruner'}
PRUNERS |= {'hyperband': 'HyperbandPruner'}
"""classes in Optuna by name"""
STATES = {'COMPLETE': 'complete', 'PRUNED': 'pruned', 'RUNNING': 'unfinished', 'WAITING': 'unfinished'}
STATES['FAIL'] = 'failed'
"""names of Optuna's states, in the order of the table; a trial that was running when a sweep ended is WAITING in the
next call"""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The settings of a sweep; see docs/sweep.md.

    Args:
        parameters: Optuna distributions by setting.
        sampler, pruner: name, and keyword arguments of the class in Optuna.
        fixed: keys that must be the same when the sweep continues.
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
        """Returns every combination of values; the last parameter changes fastest."""
        combinations = itertools.product(*map(points, self.parameters.values()))
        return [dict(zip(self.parameters, values, strict=True)) for values in combinations]


def points(space: Any) -> list[Any]:
    """Returns every value of a space. Raises ValueError if there are infinitely many."""
    if hasattr(space, 'choices'):
        return list(space.choices)
    if space.step is None:
        raise ValueError('sampler grid tries every value, and a range without a step has no end of them')
    return [space.low + i * space.step for i in range(round((space.high - space.low) / space.step) + 1)]


def need_optuna() -> None:
    if find_spec('optuna') is None:
        raise ImportError(
            "a sweep needs the package optuna: pip install optuna, or from a checkout pip install '.[sweep]'"
        )


def distribution(kind: str, *arguments: Any) -> Any:
    """Returns a 'Categorical', 'Float' or 'Int' distribution. Raises ValueError for an invalid range."""
    from optuna import distributions

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # the upper end becomes a multiple of the step
        return getattr(distributions, f'{kind}Distribution')(*arguments)


def made(what: str, name: str, options: Any, **more: Any) -> Any:
    """Returns a 'sampler' or 'pruner' of Optuna. Raises ValueError for arguments that its class does not take."""
    import optuna

    if name == 'grid':  # all parameters are fixed, so the base sampler samples nothing
        more = {'fixed_params': {}, 'base_sampler': optuna.samplers.RandomSampler(more.pop('seed'))} | more
    kind = getattr(getattr(optuna, f'{what}s'), {'sampler': SAMPLERS, 'pruner': PRUNERS}[what][name])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # ExperimentalWarning
        try:
            return kind(**options, **more)
        except (TypeError, ValueError) as error:
            raise ValueError(f'{what} {name}: {error}') from None


class Study:
    """The trials of a sweep, on disk. Only one process at a time may open it."""

    def __init__(self, sweep: Sweep) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna.trial import TrialState

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep = sweep
        path = sweep.save_path / JOURNAL
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_bytes() if path.is_file() else b''
        if text and not text.endswith(b'\n'):  # a killed process may leave an incomplete line and a lock
            path.write_bytes(text[: text.rfind(b'\n') + 1])
        for lock in path.parent.glob(f'{JOURNAL}.lock*'):
            lock.unlink()
        self.optuna = optuna.create_study(
            study_name='sweep',
            storage=JournalStorage(JournalFileBackend(str(path))),
            direction=sweep.direction,  # type: ignore[arg-type]
            pruner=made('pruner', *sweep.pruner),
            load_if_exists=True,
        )
        for number in self.numbers('RUNNING'):
            self.optuna._storage.set_trial_state_values(self.optuna.trials[number]._trial_id, TrialState.WAITING)

    def numbers(self, *states: str) -> list[int]:
        """Returns the numbers of the trials in these states of Optuna's; of all trials if none is given."""
        return [t.number for t in self.optuna.get_trials(deepcopy=False) if not states or t.state.name in states]

    def num_left(self) -> int:
        """Returns the number of trials that are not started yet."""
        return len(self.numbers('WAITING')) + max(0, self.sweep.trials - len(self.numbers()))

    def ask(self) -> tuple[Any, bool]:
        """Returns the next trial with its parameters, and True if it was started before; these come first. Parameters
        that were not in the journal yet are sampled now."""
        waiting = self.numbers('WAITING')
        self._seed_sampler(min(waiting, default=len(self.numbers())))
        return self.optuna.ask(dict(self.sweep.parameters)), bool(waiting)

    def _seed_sampler(self, number: int) -> None:
        """Seeds the sampler for a trial."""
        import numpy as np

        seed = int(np.random.SeedSequence([self.sweep.seed, number]).generate_state(1)[0])
        point: dict[str, Any] = {'fixed_params': self.sweep.grid()[number]} if self.sweep.sampler[0] == 'grid' else {}
        self.optuna.sampler = made('sampler', *self.sweep.sampler, seed=seed, **point)

    def report(self, trial: Any, value: float, step: int) -> bool:
        """Records the metric of a step. Returns True if the trial is to be pruned."""
        if step not in self.optuna._storage.get_trial(trial._trial_id).intermediate_values:
            trial.report(value, step)
        return trial.should_prune()

    def end(self, trial: Any, state: str, value: float | None = None, *, seconds: float, error: str = '') -> None:
        """Ends a trial. `state`: COMPLETE (with a value), PRUNED or FAIL."""
        from optuna.trial import TrialState

        trial.set_user_attr('seconds', round(seconds, 1))
        trial.set_user_attr('error', error)
        self.optuna.tell(trial, value if state == 'COMPLETE' else None, state=TrialState[state])

    def best(self) -> Any:
        """Returns the best complete trial, or None."""
        try:
            return self.optuna.best_trial
        except ValueError:  # none is complete
            return None

    def write_table(self) -> str:
        """Writes trials.csv, in the order of the trials, and returns the table as text, the best trial first."""
        from chatgpt.trainer.callbacks import format_table  # imports torch, only after the file is checked

        rows: list[dict[str, Any]] = []
        for t in self.optuna.get_trials():
            step = max(t.intermediate_values, default=None)
            value = None if t.state.name == 'FAIL' or step is None else t.intermediate_values[step]
            row = {'number': t.number, 'state': STATES[t.state.name], 'value': value, 'step': step}
            row |= {name: t.params.get(name) for name in self.sweep.parameters}
            rows.append(row | {name: t.user_attrs.get(name, '') for name in ('seconds', 'error')})
        names = ['number', 'state', 'value', 'step', *self.sweep.parameters, 'seconds', 'error']
        with open(self.sweep.save_path / 'trials.csv', 'w', newline='') as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
        sign, order = -1 if self.sweep.direction == 'maximize' else 1, list(STATES.values())
        rows.sort(key=lambda row: (order.index(row['state']), sign * (row['value'] or 0.0), row['number']))
        heads = {self.sweep.metric if name == 'value' else name: name for name in names}
        if not any(row['error'] for row in rows):
            del heads['error']
        return format_table([{h: shown(row[n]) for h, n in heads.items()} for row in rows], list(heads), width=100)

    def write_plots(self) -> None:
        """Writes curves.png, the metric by step, and parameters.png, the metric by each parameter, of all trials."""
        if find_spec('matplotlib') is None:
            print('no plots: they need the package matplotlib: pip install matplotlib', flush=True)
            return
        import matplotlib

        matplotlib.use('Agg')
        from matplotlib import pyplot as plt
        from optuna.visualization import matplotlib as plots

        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # ExperimentalWarning
            for name, plot in (('curves', plots.plot_intermediate_values), ('parameters', plots.plot_slice)):
                plot(self.optuna)
                plt.savefig(self.sweep.save_path / f'{name}.png', dpi=110, bbox_inches='tight')
                plt.close('all')


def shown(value: Any) -> str:
    return '' if value is None else f'{value:.4g}' if isinstance(value, float) else str(value)
