"""From the numbers of a run to findings: phase by phase, while it goes on or afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from chatgpt.monitor.doctor import collecting, learning  # noqa: F401  register the checks
from chatgpt.monitor.doctor.finding import CHECKS, LEVELS, Finding
from chatgpt.monitor.doctor.history import History
from chatgpt.monitor.run_folder.reading import RunFolder
from chatgpt.monitor.run_folder.record import RunRecord


class Diagnosis:
    """A run that is looked at phase by phase. What has been found once is not found again.

    Args:
        record: what the run is; see `RunRecord`.
        settings: of a folder without a record.
        found: keys that count as found already.
    """

    def __init__(
        self, record: RunRecord | None = None, settings: Mapping[str, Any] | None = None, found: Iterable[str] = ()
    ) -> None:
        self.history = History(record, settings)
        self.found: dict[str, int] = dict.fromkeys(found, 0)
        """key → phase in which it was first seen"""

    def remember(self, row: Mapping[str, Any]) -> None:
        """A phase that was looked at before, as at a resume: its numbers count, and nothing is found in it."""
        self.history.add(row)

    def see(self, row: Mapping[str, Any]) -> list[Finding]:
        """What begins with the phase of these metrics, which hold its number as `step`."""
        self.history.add(row)
        new = []
        for key, check in CHECKS.items():
            if self.found.keys() & {key, *check.unless} or (seen := check.look(self.history)) is None:
                continue
            finding = Finding(
                key=key,
                step=self.history.step,
                level=seen.level or check.level,
                title=seen.title or check.title,
                evidence=seen.evidence,
                cause=seen.cause,
                change=seen.change,
            )
            self.found[key] = finding.step
            new.append(finding)
        return new


def diagnose(run: RunFolder) -> list[Finding]:
    """All findings of a run, by the phase in which they began. A run without metrics has none."""
    diagnosis = Diagnosis(run.record, run.config)
    return [finding for row in run.metrics for finding in diagnosis.see(row)]


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """By level, then by phase."""
    return sorted(findings, key=lambda f: (LEVELS.index(f.level), f.step))
