"""A run's folder, read: everything but checkpoints and models. A part that is not there is empty."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from chatgpt.monitor.run_folder.lines import read_jsonl
from chatgpt.monitor.run_folder.record import RunRecord
from chatgpt.monitor.run_folder.rollouts import FOLDER, read_rollouts

Row = dict[str, Any]


class RunFolder:
    """What a run has left, each part read when it is first asked for.

    Args:
        path: the folder.

    Raises:
        ValueError: there is no such folder, or it is not that of a run; says which folders below it are.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f'{self.path}: there is no such folder')
        if not is_run(self.path):
            below = sorted(str(p) for p in self.path.iterdir() if is_run(p))
            more = f' and {len(below) - 5} more' if len(below) > 5 else ''
            told = f'; these in it are: {", ".join(below[:5])}{more}' if below else ''
            raise ValueError(f'{self.path} is not the folder of a run: it has no metrics.jsonl and no run.json{told}')

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @cached_property
    def record(self) -> RunRecord | None:
        """Of run.json; None for the folder of a version that wrote none."""
        return RunRecord.read(self.path)

    @cached_property
    def metrics(self) -> list[Row]:
        """One row per learning phase, with `step`, counted from 1."""
        return self._rows('metrics.jsonl')

    @cached_property
    def eval(self) -> list[Row]:
        """One row per evaluation; `step` 0 is that before training."""
        return self._rows('eval.jsonl')

    @cached_property
    def samples(self) -> list[Row]:
        return self._rows('samples.jsonl')

    @cached_property
    def eval_samples(self) -> list[Row]:
        """The same prompts at every evaluation."""
        return self._rows('eval_samples.jsonl')

    @cached_property
    def findings(self) -> list[Row]:
        return self._rows('findings.jsonl')

    def rollouts(self, phases: Collection[int] | None = None, limit: int | None = None) -> list[Row]:
        """Recorded sequences with their per-token arrays; `read_rollouts` of `run_folder.rollouts` finds more
        narrowly."""
        return read_rollouts(self.path / FOLDER, phases, limit=limit)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings of a run of the command line; empty for others."""
        path = self.path / 'config.yaml'
        return (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}

    @property
    def phase(self) -> int:
        """Learning phases that it has written down."""
        return int(self.metrics[-1]['step']) if self.metrics else 0

    def _rows(self, filename: str) -> list[Row]:
        path = self.path / filename
        rows = read_jsonl(path) if path.is_file() else []
        for number, row in enumerate(rows, 1):
            if not isinstance(row.get('step'), int):
                raise ValueError(f'{path}, line {number}: the line is damaged, for it has no step; take it out')
        return rows


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ('run.json', 'metrics.jsonl'))
