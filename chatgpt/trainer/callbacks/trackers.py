"""Trackers by name, for `--log_with`: a base class and backends for TensorBoard, W&B, Trackio and MLflow.

`TRACKERS['mine'] = MyCallback` registers one for command lines and config files; `my_file.py:MyCallback` works without
registration. A tracker is a callback class that is made without arguments; pass an object with arguments in
`callbacks=`.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from chatgpt.registry import Registry
from chatgpt.trainer.callbacks.base import Callback, TrainerView, check_interval, need_package

NONE = 'none'
"""name for no tracker, used alone"""
MAX_PARAMS, MAX_METRICS, MAX_TEXT = 100, 1000, 6000
"""limits of a call of MLflow's `log_batch`; maximum length of a parameter"""


class Tracker(Callback):
    """Logs every metric of every learning phase, with the phase as step, and samples every `samples_every` phases.

    Each run is one run of the tracker, written by rank 0, which a resumed run continues.

    Args:
        samples_every: learning phases between tables of samples.
        num_rows: rows of a table; 0 logs none.

    Raises:
        ImportError: the package is missing; names the command that installs it.
    """

    module: ClassVar[str] = ''
    """name of the package that it needs"""

    def __init__(self, *, samples_every: int = 10, num_rows: int = 4) -> None:
        if self.module:
            need_package(self.module, f'{type(self).__name__}()')
        self.samples_every = check_interval('samples_every', samples_every)
        self.num_rows = num_rows
        self._run_id: str | None = None
        self._run: Any = None

    @abstractmethod
    def start(self, trainer: TrainerView, run_id: str | None) -> tuple[Any, str | None]:
        """Begins a run with the trainer's settings, or continues `run_id`; returns the run and its id."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], rows: SequenceOf[Mapping[str, Any]], step: int) -> None:
        """Logs the metrics of a phase, and rows of samples, empty in most phases."""

    @abstractmethod
    def finish(self, *, failed: bool) -> None:
        """Ends the run."""

    def state_dict(self) -> dict[str, Any]:
        return {'run_id': self._run_id} if self._run_id else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run_id = state.get('run_id')

    def on_fit_start(self, trainer: TrainerView) -> None:
        if trainer.strategy.is_rank_0:
            self._run, self._run_id = self.start(trainer, self._run_id)

    def _begun(self, trainer: TrainerView) -> bool:
        """Returns True on the rank that logs; begins the run for `step` of a trainer, which has no `fit`."""
        if self._run is None:
            self.on_fit_start(trainer)
        return self._run is not None

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        from chatgpt.trainer.callbacks.samples import rows_of

        if not self._begun(trainer):
            return
        shown = self.num_rows and trainer.last_experiences and (step == 1 or step % self.samples_every == 0)
        given = trainer.last_experiences if shown else []
        self.log(
            metrics, rows_of(given, self.num_rows, trainer.tokenizer, reference='rollout/kl_mean' in metrics), step
        )

    def on_fit_end(self, trainer: TrainerView) -> None:
        self._end(failed=False)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        self._end(failed=True)

    def _end(self, *, failed: bool) -> None:
        if self._run is not None:
            self.finish(failed=failed)
            self._run = None


def sample_table(rows: SequenceOf[Mapping[str, Any]]) -> str:
    """Returns samples as aligned text."""
    from chatgpt.trainer.callbacks.samples import format_table, shown_parts

    columns = [name for name in ('score', 'kl', 'prompt', 'response') if any(name in row for row in rows)]
    return format_table(list(map(shown_parts, rows)), columns, width=2000)


class TensorBoard(Tracker):
    """Metrics as scalars, and samples as text. The other arguments are `Tracker`'s.

    Args:
        log_dir: folder of the event files; None means `run_dir/tensorboard`. `fit` renames that of an earlier run to
            `tensorboard.previous`.
    """

    module = 'tensorboard'

    def __init__(self, log_dir: str | Path | None = None, *, samples_every: int = 10, num_rows: int = 4) -> None:
        super().__init__(samples_every=samples_every, num_rows=num_rows)
        self.log_dir = log_dir

    def on_fit_start(self, trainer: TrainerView) -> None:
        if self.log_dir is None and trainer.run_dir is None:
            raise ValueError('TensorBoard() has nowhere to write: give it log_dir, or the trainer a run_dir')
        super().on_fit_start(trainer)

    def start(self, trainer: TrainerView, run_id: str | None) -> tuple[Any, None]:
        from torch.utils.tensorboard import SummaryWriter

        self._end(failed=False)
        folder = Path(self.log_dir or Path(str(trainer.run_dir), 'tensorboard'))
        if self.log_dir is None and not trainer.phase and folder.is_dir():
            earlier = folder.with_name('tensorboard.previous')  # of another run in this folder
            shutil.rmtree(earlier, ignore_errors=True)
            os.replace(folder, earlier)
        # purge_step hides what an interrupted run wrote after the checkpoint of this resume
        return SummaryWriter(str(folder), purge_step=trainer.phase + 1 if trainer.phase else None), None

    def log(self, metrics: Mapping[str, float], rows: SequenceOf[Mapping[str, Any]], step: int) -> None:
        for name, value in metrics.items():
            self._run.add_scalar(name, value, step)
        if rows:
            indented = '\n'.join(f'    {line}' for line in sample_table(rows).splitlines())  # a code block in Markdown
            self._run.add_text('samples', indented, step)
        self._run.flush()

    def finish(self, *, failed: bool) -> None:
        self._run.close()


class _ProjectTracker(Tracker):
    """W&B, and Trackio, which has the same interface. The other arguments are `Tracker`'s.

    Args:
        project: None takes WANDB_PROJECT or TRACKIO_PROJECT, or chatgpt.
        **init: further arguments of the package's `init`, such as name, entity, mode, group or tags.
    """

    def __init__(self, project: str | None = None, *, samples_every: int = 10, num_rows: int = 4, **init: Any) -> None:
        super().__init__(samples_every=samples_every, num_rows=num_rows)
        self.project = project or os.environ.get(f'{self.module.upper()}_PROJECT') or 'chatgpt'
        self.init = init

    @property
    def package(self) -> Any:
        """Returns the imported package."""
        return import_module(self.module)

    def log(self, metrics: Mapping[str, float], rows: SequenceOf[Mapping[str, Any]], step: int) -> None:
        logged: dict[str, Any] = dict(metrics)
        if rows:
            from chatgpt.trainer.callbacks.samples import shown_parts

            shown = [shown_parts(row) if 'parts' in row else row for row in rows]
            columns: list[Any] = list(dict.fromkeys(name for row in shown for name in row))
            data = [[row.get(c) for c in columns] for row in shown]
            logged['samples'] = self.package.Table(columns=columns, data=data)
        self._run.log(logged, step=step)


class WandB(_ProjectTracker):
    """Metrics and tables of samples in Weights & Biases."""

    module = 'wandb'

    def start(self, trainer: TrainerView, run_id: str | None) -> tuple[Any, str]:
        again = {'id': run_id, 'resume': 'allow'} if run_id else {}
        folder = str(trainer.run_dir) if trainer.run_dir is not None else None
        settings = {'project': self.project, 'config': trainer.config.to_dict(), 'dir': folder}
        run = self.package.init(**(settings | again | self.init))
        return run, run.id

    def on_log(
        self,
        trainer: TrainerView,
        stats: dict[str, float],
        batch: Mapping[str, SequenceOf[Any]],
        rewards: list[float],
        columns_to_log: list[str],
    ) -> None:
        """Logs a table `game_log`, as in TRL, of every row and its reward."""
        columns = [c for c in columns_to_log if c in batch]
        if not columns or not self._begun(trainer):
            return
        shown = {c: batch[c] for c in columns} | ({'reward': rewards} if rewards else {})
        rows = [list(row) for row in zip(*shown.values(), strict=True)]
        table = self.package.Table(columns=list(shown), data=rows)
        self._run.log({'game_log': table}, step=trainer.phase)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio(_ProjectTracker):
    """Metrics and tables of samples in Trackio, Hugging Face's tracker in local files, for `trackio show`. Phases that
    a resumed run repeats appear twice."""

    module = 'trackio'

    def start(self, trainer: TrainerView, run_id: str | None) -> tuple[Any, str]:
        # Trackio finds a run by its name, and its generated names are not unique between processes.
        folder = trainer.run_dir.name if trainer.run_dir is not None else 'run'
        name = run_id or f'{folder}-{uuid.uuid4().hex[:8]}'
        settings = {'project': self.project, 'name': name, 'resume': 'allow', 'config': trainer.config.to_dict()}
        run = self.package.init(**(settings | self.init))
        return run, run.name

    def finish(self, *, failed: bool) -> None:
        self.package.finish()  # the current run is that of `start`


class MLflow(Tracker):
    """Settings as parameters, metrics, and samples as texts in MLflow, by `mlflow` or the smaller `mlflow-skinny`.

    Phases that a resumed run repeats appear twice in a metric's history. `mlflow`'s own active run is not changed. The
    other arguments are `Tracker`'s.

    Args:
        experiment: its name; None takes MLFLOW_EXPERIMENT_NAME, or chatgpt. Created if missing.
        tracking_uri: of a server or database; None takes MLFLOW_TRACKING_URI, or MLflow's default.
        **tags: of a new run.
    """

    module = 'mlflow'

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        samples_every: int = 10,
        num_rows: int = 4,
        **tags: Any,
    ) -> None:
        super().__init__(samples_every=samples_every, num_rows=num_rows)
        self.experiment = experiment or os.environ.get('MLFLOW_EXPERIMENT_NAME') or 'chatgpt'
        self.tracking_uri = tracking_uri
        self.tags = tags

    def start(self, trainer: TrainerView, run_id: str | None) -> tuple[Any, str]:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(self.tracking_uri)
        if run_id:  # parameters cannot be changed after the start
            client.update_run(run_id, status='RUNNING')
            return client, run_id
        name = trainer.run_dir.name if trainer.run_dir is not None else None
        run = client.create_run(self._experiment_id(client), run_name=name, tags=self.tags)
        params = [Param(key, str(value)[:MAX_TEXT]) for key, value in trainer.config.to_dict().items()]
        for start in range(0, len(params), MAX_PARAMS):
            client.log_batch(run.info.run_id, params=params[start : start + MAX_PARAMS])
        return client, run.info.run_id

    def _experiment_id(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                return client.create_experiment(self.experiment)
            except MlflowException:  # another run has just made it, or it cannot be made
                found = client.get_experiment_by_name(self.experiment)
                if found is None:
                    raise
        return found.experiment_id

    def log(self, metrics: Mapping[str, float], rows: SequenceOf[Mapping[str, Any]], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        # MLflow refuses a name with other characters, such as the @ and = of eval/score_mean@beta=1
        named = {re.sub(r'[^\w/.\- :]', ' ', name): float(value) for name, value in metrics.items()}
        values = [Metric(name, value, now, step) for name, value in named.items()]
        for start in range(0, len(values), MAX_METRICS):
            self._run.log_batch(self._run_id, metrics=values[start : start + MAX_METRICS])
        if rows:
            self._run.log_text(self._run_id, sample_table(rows), f'samples/phase-{step}.txt')

    def finish(self, *, failed: bool) -> None:
        self._run.set_terminated(self._run_id, 'FAILED' if failed else 'FINISHED')


class TrackerRegistry(Registry[type[Callback]]):
    """Callback classes by name."""

    def admit(self, name: str, found: Any) -> type[Callback]:
        if not (isinstance(found, type) and issubclass(found, Callback)):
            raise ValueError(f'{name!r} is no class derived from chatgpt.trainer.callbacks.Callback')
        return found


TRACKERS = TrackerRegistry(
    'log_with', type, {'tensorboard': TensorBoard, 'wandb': WandB, 'trackio': Trackio, 'mlflow': MLflow}
)


def tracker_names(words: Iterable[str]) -> list[str]:
    """Returns the names in 'wandb,tensorboard', several such words, or 'none'; each once.

    Raises:
        ValueError: an unknown tracker (lists the known ones), or 'none' beside another.
    """
    names = list(dict.fromkeys(name.strip() for word in words for name in word.split(',')))
    if NONE in names:
        if len(names) > 1:
            raise ValueError(f'log_with={",".join(names)}: none is no tracker beside others; leave one out')
        return []
    for name in names:
        TRACKERS.find(name)
    return names
