"""Reads the runs of a page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatgpt.monitor.doctor import Finding, diagnose, worst_first
from chatgpt.monitor.report.charts import CUT, PLANNED, RECORDED_ENDS
from chatgpt.monitor.report.rollouts import phases_for_page
from chatgpt.monitor.report.series import Column, columns
from chatgpt.monitor.run_folder import RunFolder
from chatgpt.monitor.run_folder.record import without_secrets
from chatgpt.monitor.run_folder.rollouts import recorded_phases


@dataclass
class Run:
    """The data of a run; `name` is unique on the page."""

    name: str
    folder: RunFolder
    columns: dict[str, Column]
    findings: list[Finding]
    doctor_error: str = ''
    """error of the doctor, if it failed"""
    recorded: list[dict[str, Any]] = field(default_factory=list)
    """sequences of phases at equal distances, with their per-token arrays"""

    @property
    def status(self) -> str:
        """'running', 'ended', 'stopped', 'failed', or 'unknown' without run.json."""
        return self.folder.record.status if self.folder.record is not None else 'unknown'


def read_run(path: str | os.PathLike[str], name: str) -> Run:
    """Reads a run's folder.

    Raises:
        ValueError: if there is no such folder, or it is not that of a run.
    """
    folder = RunFolder(Path(path))
    found = columns([*folder.eval, *folder.metrics])
    if (
        'rollout/ended_share' in found and 'environment/num_turns_mean' not in found
    ):  # episodes have metrics for their ends
        at, shares = found['rollout/ended_share']
        found[CUT] = at, [None if share is None else 1 - share for share in shares]
    plan = (folder.record.plan if folder.record is not None else None) or {}
    if plan.get('peak_gib') and 'perf/peak_memory_gib' in found:
        at = found['perf/peak_memory_gib'][0]
        found[PLANNED] = (at[0], at[-1]), (plan['peak_gib'], plan['peak_gib'])
    recorded = folder.rollouts(phases) if (phases := phases_for_page(recorded_phases(folder.path))) else []
    found |= why_ended(recorded)
    findings, error = _findings(folder)
    return Run(name, folder, found, findings, error, recorded)


def why_ended(rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Returns the shares of recorded sequences that ended by an end token, a stop string or the length limit, by phase.
    Empty if no stop string ended any, since `rollout/ended_share`, of all sequences, is then enough."""
    reasons: dict[int, list[str]] = {}
    for row in rows:
        reasons.setdefault(row['phase'], []).append(row['finish_reason'])
    if not any('stop' in of_phase for of_phase in reasons.values()):
        return {}
    return {
        name: (list(reasons), [of_phase.count(reason) / len(of_phase) for of_phase in reasons.values()])
        for name, reason in RECORDED_ENDS.items()
    }


def _findings(folder: RunFolder) -> tuple[list[Finding], str]:
    """Returns the findings, the worst first, and the error of the doctor if it fails: the page is written anyway."""
    try:
        return worst_first(diagnose(folder)), ''
    except Exception as failure:
        return [], f'{type(failure).__name__}: {failure}'


def names_of(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Returns the shortest endings of the paths that are unique."""
    parts = [Path(path).absolute().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ['/'.join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f'{p[-1]} ({i})' for i, p in enumerate(parts, 1)]


def all_settings(run: Run) -> dict[str, Any]:
    """Returns all settings of trainer and generation by name, without secrets; those of config.yaml without
    run.json."""
    record = run.folder.record
    found = {**record.settings, **record.generation} if record is not None else dict(run.folder.config)
    return without_secrets(found)  # type: ignore[no-any-return]
