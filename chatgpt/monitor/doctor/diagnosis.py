"""From the numbers of a run to findings, phase by phase, while it goes on or afterwards; and the explanation of each
finding, a section of a page in docs/doctor, which an installed package has a copy of."""

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
            said = {'level': check.level, 'title': check.title} | {k: v for k, v in seen._asdict().items() if v}
            new.append(Finding(key=key, step=self.history.step, **said))
            self.found[key] = self.history.step
        return new


def diagnose(run: RunFolder) -> list[Finding]:
    """All findings of a run, by the phase in which they began. A run without metrics has none."""
    diagnosis = Diagnosis(run.record, run.config)
    return [finding for row in run.metrics for finding in diagnosis.see(row)]


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """By level, then by phase."""
    return sorted(findings, key=lambda f: (LEVELS.index(f.level), f.step))


# ---------------------------------------------------------------------- explanations

COPY = Path(__file__).with_name('explanations.md')
"""written by setup.py when the package is built"""
PAGES = Path(__file__).resolve().parents[3] / 'docs' / 'doctor'


@cache
def explanations() -> dict[str, str]:
    """Text by the key of a finding, in the order of the pages; links are their words alone."""
    pages = [COPY] if COPY.is_file() else sorted(PAGES.glob('*.md'))
    text = '\n'.join(page.read_text(encoding='utf-8') for page in pages)
    sections = re.findall(r'^### (\S+)\n(.*?)(?=^#|\Z)', text, re.MULTILINE | re.DOTALL)
    return {key: re.sub(r'\[([^\]]+)\]\([^)]+\)', r'\1', section).strip() for key, section in sections}


def explain(key: str) -> str:
    """The explanation of a finding.

    Raises:
        ValueError: there is no finding of that key; names the nearest.
    """
    if key not in explanations():
        raise ValueError(f'--explain {key}: the doctor has no such finding{hint(key, explanations())}')
    return f'{key}\n\n{explanations()[key]}'


def overview() -> str:
    """Each key with the beginning of what is seen."""
    width = max(map(len, explanations()))
    seen = {key: ' '.join(text.split('\n\n')[0].removeprefix('Seen: ').split()) for key, text in explanations().items()}
    return '\n'.join(f'{key:{width}}  {text if len(text) < 90 else text[:87] + "..."}' for key, text in seen.items())
