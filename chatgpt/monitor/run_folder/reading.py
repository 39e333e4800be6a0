"""Reads a run's folder, except checkpoints and models. Missing files are empty."""

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
    """The folder of a run. Each file is read at its first use.

    Args:
        path: the folder.

    Raises:
        ValueError: if there is no such folder, or it is not that of a run; names the folders of runs in it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f'{self.path}: there is no such folder')
        if not is_run(self.path):
            below = sorted(str(p) for p in self.path.iterdir() if is_run(p))
            more = f' and {len(below) - 5} more' if len(below) > 5 else ''
            hint = f'; these in it are: {", ".join(below[:5])}{more}' if below else ''
            raise ValueError(f'{self.path} is not the folder of a run: it has no metrics.jsonl and no run.json{hint}')

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @cached_property
    def record(self) -> RunRecord | None:
        """Content of run.json; None if there is none."""
        return RunRecord.read(self.path)

    @cached_property
    def metrics(self) -> list[Row]:
        """One row per learning phase, with `step`, counted from 1."""
        return self._rows('metrics.jsonl')

    @cached_property
    def eval(self) -> list[Row]:
        """One row per evaluation; `step` 0 is before training."""
        return self._rows('eval.jsonl')

    @cached_property
    def samples(self) -> list[Row]:
        return self._rows('samples.jsonl')

    @cached_property
    def eval_samples(self) -> list[Row]:
        """Samples of evaluations, with the same prompts each time."""
        return self._rows('eval_samples.jsonl')

    @cached_property
    def findings(self) -> list[Row]:
        return self._rows('findings.jsonl')

    def rollouts(self, phases: Collection[int] | None = None, limit: int | None = None) -> list[Row]:
        """Returns recorded sequences with per-token arrays; `run_folder.rollouts.read_rollouts` has more filters."""
        return read_rollouts(self.path / FOLDER, phases, limit=limit)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Settings of a run of the command, from config.yaml; empty for others."""
        path = self.path / 'config.yaml'
        try:
            found = yaml.safe_load(path.read_text()) if path.is_file() else None
        except yaml.YAMLError as error:
            raise ValueError(f'{path} is not YAML: {" ".join(str(error).split())}') from None
        return found if isinstance(found, dict) else {}

    @property
    def phase(self) -> int:
        """Number of learning phases in metrics.jsonl."""
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
