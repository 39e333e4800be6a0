"""Metrics and sample texts in Trackio, Hugging Face's tracker in local files. Needs the optional package `trackio`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from chatgpt.trainer.callbacks.base import TrainerView, need_package
from chatgpt.trainer.callbacks.tracked_run import TrackedRun


class Trackio(TrackedRun):
    """Logs every metric of every learning phase with the phase as step, and a table of samples.

    `trackio show` then shows them. A resumed run goes on in its Trackio run; phases that it repeats are there twice.

    Args:
        project: the Trackio project; None: TRACKIO_PROJECT, or chatgpt.
        samples_every: learning phases between tables of samples.
        num_rows: rows of a table; 0 logs none.
        **init: further arguments of `trackio.init`, such as name, group or space_id.

    Raises:
        ImportError: the package is missing; names the command that installs it.
    """

    def __init__(self, project: str | None = None, *, samples_every: int = 10, num_rows: int = 4, **init: Any) -> None:
        need_package('trackio', 'Trackio()')
        super().__init__(samples_every=samples_every, num_rows=num_rows)
        self.project = project or os.environ.get('TRACKIO_PROJECT') or 'chatgpt'
        self.init = init
        self._run: Any = None

    def start(self, trainer: TrainerView, run_id: str | None) -> str:
        import trackio

        # Trackio finds a run by its name, and the names that it makes up itself are not unique between processes.
        folder = trainer.run_dir.name if trainer.run_dir is not None else 'run'
        name = run_id or f'{folder}-{uuid.uuid4().hex[:8]}'
        settings = {'project': self.project, 'name': name, 'resume': 'allow', 'config': trainer.config.to_dict()}
        self._run = trackio.init(**(settings | self.init))
        return self._run.name

    def log(self, metrics: Mapping[str, float], rows: SequenceOf[Mapping[str, Any]], step: int) -> None:
        logged: dict[str, Any] = dict(metrics)
        if rows:
            import trackio

            logged['samples'] = trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log(logged, step=step)

    def finish(self, *, failed: bool) -> None:
        import trackio

        trackio.finish()  # of the current run, which `start` has made
