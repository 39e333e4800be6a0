"""Finds faults of a run phase by phase, during the run or afterwards, and explains them with the sections of
docs/doctor.md, which are copied into an installed package."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from chatgpt.monitor.doctor import collecting, learning  # noqa: F401  register the checks
from chatgpt.monitor.doctor.finding import CHECKS, LEVELS, Finding
from chatgpt.monitor.doctor.history import History
from chatgpt.monitor.run_folder.reading import RunFolder
from chatgpt.monitor.run_folder.record import RunRecord
from chatgpt.names import hint


class Diagnosis:
    """The findings of a run, phase by phase. Each finding is reported once.

    Args:
        record: the run's record.
        settings: the run's settings, if it has no record.
        found: keys of findings that are not reported again.
    """

    def __init__(
        self, record: RunRecord | None = None, settings: Mapping[str, Any] | None = None, found: Iterable[str] = ()
    ) -> None:
        self.history = History(record, settings)
        self.found: dict[str, int] = dict.fromkeys(found, 0)
        """key → phase in which it was first seen"""

    def remember(self, row: Mapping[str, Any]) -> None:
        """Adds the metrics of a phase without checking it, as at a resume."""
        self.history.add(row)

    def see(self, row: Mapping[str, Any]) -> list[Finding]:
        """Adds the metrics of a phase, with its number as `step`, and returns the new findings."""
        self.history.add(row)
        new = []
        for key, check in CHECKS.items():
            if self.found.keys() & {key, *check.unless} or (seen := check.look(self.history)) is None:
                continue
            fields = {'level': check.level, 'title': check.title} | {k: v for k, v in seen._asdict().items() if v}
            new.append(Finding(key=key, step=self.history.step, **fields))
            self.found[key] = self.history.step
        return new


def diagnose(run: RunFolder) -> list[Finding]:
    """Returns all findings of a run, ordered by the phase in which they began."""
    diagnosis = Diagnosis(run.record, run.config if run.record is None else None)
    return [finding for row in run.metrics for finding in diagnosis.see(row)]


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings sorted by level, then by phase."""
    return sorted(findings, key=lambda f: (LEVELS.index(f.level), f.step))


# ---------------------------------------------------------------------- explanations

COPY = Path(__file__).with_name('explanations.md')
"""written by setup.py when the package is built"""
PAGES = Path(__file__).resolve().parents[3] / 'docs' / 'doctor'


@cache
def explanations() -> dict[str, str]:
    """Returns the explanations by key of a finding, in the order of the pages, without the targets of links."""
    pages = [COPY] if COPY.is_file() else sorted(PAGES.glob('*.md'))
    text = '\n'.join(page.read_text(encoding='utf-8') for page in pages)
    sections = re.findall(r'^### (\S+)\n(.*?)(?=^#|\Z)', text, re.MULTILINE | re.DOTALL)
    return {key: re.sub(r'\[([^\]]+)\]\([^)]+\)', r'\1', section).strip() for key, section in sections}


def explain(key: str) -> str:
    """Returns the explanation of a finding.

    Raises:
        ValueError: if there is no finding of that key; names the nearest.
    """
    if key not in explanations():
        raise ValueError(f'--explain {key}: the doctor has no such finding{hint(key, explanations())}')
    return f'{key}\n\n{explanations()[key]}'


def overview() -> str:
    """Returns a line per finding: its key and the start of its explanation."""
    width = max(map(len, explanations()))
    seen = {key: ' '.join(text.split('\n\n')[0].removeprefix('Seen: ').split()) for key, text in explanations().items()}
    return '\n'.join(f'{key:{width}}  {text if len(text) < 90 else text[:87] + "..."}' for key, text in seen.items())
