"""Optuna: the one file that imports it. A study in a journal, asked for settings and told what became of them.

What is asked for depends on the file's seed, the number of the trial and the trials before it alone, so a sweep that
was interrupted goes on as if it had not been. Left out: running trials (`trials`).
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chatgpt.search.settings import PRUNERS, SAMPLERS, Named, Sweep
from chatgpt.search.space import Choice, Space, Value

JOURNAL = 'journal.log'


@dataclass(frozen=True)
class Row:
    """What became of a trial."""

    number: int
    state: str
    """complete, pruned, failed, or unfinished"""
    value: float | None
    """the metric's last; of a failed trial none"""
    step: int | None
    """of that value"""
    parameters: dict[str, Value]
    seconds: float
    error: str
    curve: dict[int, float] = field(default_factory=dict)
    """the metric by step"""

    @property
    def folder(self) -> str:
        return f'trial-{self.number:04d}'


def need_optuna() -> None:
    if find_spec('optuna') is None:
        raise ImportError(
            "a sweep needs the package optuna: pip install optuna, or from a checkout pip install '.[sweep]'"
        )


class Study:
    """The trials of a sweep, on disk. One process at a time holds it.

    Raises:
        ImportError: no Optuna; names the command that installs it.
        ValueError: an argument that a sampler or pruner does not have.
    """

    def __init__(self, sweep: Sweep) -> None:
        need_optuna()
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep = sweep
        self._made('sampler', SAMPLERS, sweep.sampler, seed=0)
        pruner = self._made('pruner', PRUNERS, sweep.pruner)
        path = sweep.save_path / JOURNAL
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend(path)
        self._study = optuna.create_study(
            study_name='sweep',
            storage=JournalStorage(JournalFileBackend(str(path))),
            direction=sweep.direction,  # type: ignore[arg-type]
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=True,
        )

    @staticmethod
    def _made(what: str, classes: dict[str, str | None], named: Named, **more: Any) -> Any:
        """The object that a name and its options are; None where the name has no class."""
        import optuna

        name = classes[named.name]
        if name is None:
            if named.options:
                raise ValueError(f'{what} {named.name} takes no options, not {", ".join(named.options)}')
            return None
        cls = getattr(getattr(optuna, f'{what}s'), name)
        known = [p for p in inspect.signature(cls).parameters if p != 'seed']
        for option in named.options:
            if option not in known:
                near = difflib.get_close_matches(option, known, n=1, cutoff=0.0)
                raise ValueError(f'{what} {named.name} has no option {option!r}; did you mean {", ".join(near)}?')
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # what Optuna calls experimental
            try:
                return cls(**named.options, **more)
            except (TypeError, ValueError) as error:
                raise ValueError(f'{what} {named.name}: {error}') from None

    # ------------------------------------------------------------------ asking

    def unfinished(self) -> list[Any]:
        """Trials that were started and have no end. A parameter that was not written down in time is drawn now."""
        import optuna

        found = []
        for t in self._study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            self._seed(t.number)
            trial = optuna.trial.Trial(self._study, t._trial_id)
            for name, space in self.sweep.parameters.items():
                trial._suggest(name, distribution(space))
            found.append(trial)
        return found

    def num_trials(self) -> int:
        """Those that were started."""
        return sum(t.state.name != 'WAITING' for t in self._study.get_trials(deepcopy=False))

    def ask(self) -> Any:
        """A new trial, with its parameters."""
        number = self.num_trials()
        self._seed(number)
        is_new = number == len(self._study.get_trials(deepcopy=False))
        if self.sweep.sampler.name == 'grid' and is_new:  # else it waits since a call that was killed
            self._study.enqueue_trial(self.sweep.grid()[number])
        return self._study.ask({name: distribution(space) for name, space in self.sweep.parameters.items()})

    def _seed(self, number: int) -> None:
        """Draws from here on are those of this trial."""
        import numpy as np

        if self.sweep.sampler.name != 'grid':
            seed = int(np.random.SeedSequence([self.sweep.seed, number]).generate_state(1)[0])
            self._study.sampler = self._made('sampler', SAMPLERS, self.sweep.sampler, seed=seed)

    # ------------------------------------------------------------------ telling

    def report(self, trial: Any, value: float, step: int) -> bool:
        """Note the metric of a step; whether the trial is not worth going on with."""
        if step not in self._study._storage.get_trial(trial._trial_id).intermediate_values:
            trial.report(value, step)
        return trial.should_prune()

    def end(self, trial: Any, state: str, value: float | None = None, *, seconds: float, error: str = '') -> None:
        """`state`: complete (with a value), pruned or failed."""
        from optuna.trial import TrialState

        trial.set_user_attr('seconds', seconds)
        trial.set_user_attr('error', error)
        states = {'complete': TrialState.COMPLETE, 'pruned': TrialState.PRUNED, 'failed': TrialState.FAIL}
        self._study.tell(trial, value if state == 'complete' else None, state=states[state])

    def rows(self) -> list[Row]:
        """All trials, by number."""
        names = {'COMPLETE': 'complete', 'PRUNED': 'pruned', 'FAIL': 'failed'}
        rows = []
        for t in self._study.get_trials():
            curve = t.intermediate_values
            step = max(curve, default=None)
            rows.append(
                Row(
                    number=t.number,
                    state=names.get(t.state.name, 'unfinished'),
                    value=None if t.state.name == 'FAIL' or step is None else curve[step],
                    step=step,
                    parameters={name: t.params.get(name) for name in self.sweep.parameters},
                    seconds=t.user_attrs.get('seconds', 0.0),
                    error=t.user_attrs.get('error', ''),
                    curve=curve,
                )
            )
        return rows


STATES = ('complete', 'pruned', 'unfinished', 'failed')


def best_first(sweep: Sweep, rows: Sequence[Row]) -> list[Row]:
    """By state, the complete first, then by value, then by number."""
    sign = -1 if sweep.direction == 'maximize' else 1
    return sorted(rows, key=lambda row: (STATES.index(row.state), sign * (row.value or 0.0), row.number))


def best_of(sweep: Sweep, rows: Sequence[Row]) -> Row | None:
    """The complete trial with the best value."""
    return next((row for row in best_first(sweep, rows) if row.state == 'complete'), None)


def distribution(space: Space) -> Any:
    from optuna import distributions as d

    if isinstance(space, Choice):
        return d.CategoricalDistribution(space.values)
    if space.whole:
        step = int(space.step or 1)
        low, high = int(space.low), int(space.high)
        return d.IntDistribution(low, high - (high - low) % step, space.log, step)
    top: Any = space.points()[-1] if space.step else space.high  # Optuna wants a whole number of steps
    return d.FloatDistribution(space.low, top, space.log, space.step)


def _mend(path: Path) -> None:
    """Remove what a killed process has left: half a line at the end, and a lock. Only for who holds the folder."""
    if path.is_file():
        text = path.read_bytes()
        if text and not text.endswith(b'\n'):
            path.write_bytes(text[: text.rfind(b'\n') + 1])
    for lock in path.parent.glob(f'{JOURNAL}.lock*'):
        lock.unlink()
