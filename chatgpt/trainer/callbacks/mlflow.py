"""Metrics and sample texts in MLflow. Needs the optional package `mlflow`, or its smaller `mlflow-skinny`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import Any

from chatgpt.trainer.callbacks.base import TrainerView, need_package
from chatgpt.trainer.callbacks.samples import format_table
from chatgpt.trainer.callbacks.tracked_run import TrackedRun

MAX_PARAMS, MAX_METRICS = 100, 1000
"""of one call of `log_batch`"""
MAX_TEXT = 6000
"""characters of a parameter"""


class MLflow(TrackedRun):
    """Logs the settings as parameters, every metric of every learning phase with the phase as step, and tables of
    samples as texts.

    A resumed run goes on in its MLflow run; phases that it repeats are in a metric's history twice. Nothing is set for
    the process: `mlflow`'s own active run stays as it is.

    Args:
        experiment: its name; None: MLFLOW_EXPERIMENT_NAME, or chatgpt. It is made where there is none.
        tracking_uri: of a server or data base; None: MLFLOW_TRACKING_URI, or what MLflow takes then.
        samples_every: learning phases between tables of samples.
        num_rows: rows of a table; 0 logs none.
        **tags: of a new run.

    Raises:
        ImportError: the package is missing; names the command that installs it.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        samples_every: int = 10,
        num_rows: int = 4,
        **tags: Any,
    ) -> None:
        need_package('mlflow', 'MLflow()')
        super().__init__(samples_every=samples_every, num_rows=num_rows)
        self.experiment = experiment or os.environ.get('MLFLOW_EXPERIMENT_NAME') or 'chatgpt'
        self.tracking_uri = tracking_uri
        self.tags = tags
        self._client: Any = None

    def start(self, trainer: TrainerView, run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(self.tracking_uri)
        if run_id:  # a parameter cannot be changed: those of the start stand
            self._client.update_run(run_id, status='RUNNING')
            return run_id
        name = trainer.run_dir.name if trainer.run_dir is not None else None
        run = self._client.create_run(self._experiment_id(), run_name=name, tags=self.tags)
        params = iter([Param(key, str(value)[:MAX_TEXT]) for key, value in trainer.config.to_dict().items()])
        while batch := list(islice(params, MAX_PARAMS)):
            self._client.log_batch(run.info.run_id, params=batch)
        return run.info.run_id

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                return self._client.create_experiment(self.experiment)
            except MlflowException:  # another run has just made it, or there is a reason why it cannot be
                found = self._client.get_experiment_by_name(self.experiment)
                if found is None:
                    raise
        return found.experiment_id

    def log(self, metrics: Mapping[str, float], rows: SequenceOf[Mapping[str, Any]], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = iter([Metric(name, float(value), now, step) for name, value in metrics.items()])
        while batch := list(islice(values, MAX_METRICS)):
            self._client.log_batch(self._run_id, metrics=batch)
        if rows:
            table = format_table(rows, ('score', 'kl', 'prompt', 'response'), width=2000)
            self._client.log_text(self._run_id, table, f'samples/phase-{step}.txt')

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, 'FAILED' if failed else 'FINISHED')
