"""Runs the tests marked `gpu`, and writes counts after every test, so that an interrupted run keeps its results.

    python benchmarks/gpu_tests.py OUT.json [--workers 3]

It collects only files with the mark, since collecting the whole suite takes longer than these tests.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, script_parser, write_json

TELLS, SLOWEST = 1500, 10


def marked_files(root: Path = ROOT) -> list[str]:
    """Returns the files under tests/ with the mark, relative to `root`, those of tests/gpu first."""
    found = [path for path in root.glob('tests/**/test_*.py') if re.search(r'\bpytest\.mark\.gpu\b', path.read_text())]
    return [str(path.relative_to(root)) for path in sorted(found, key=lambda p: (p.parent.name != 'gpu', p))]


class Tally:
    """A pytest plugin that writes the counts of outcomes so far."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.counts = dict.fromkeys(('passed', 'failures', 'errors', 'skipped'), 0)
        self.failed: dict[str, str] = {}
        self.reasons: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.finished = False
        self.write()

    def write(self) -> None:
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:SLOWEST]
        numbers = {'tests': sum(self.counts.values()), **self.counts, 'finished': self.finished}
        found = {'failed': self.failed, 'skip_reasons': self.reasons, 'slowest_s': dict(slowest)}
        write_json(self.out, numbers | found)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped:
            self.counts['skipped'] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        elif report.failed:
            self.counts['failures' if report.when == 'call' else 'errors'] += 1
            self.failed[f'{report.nodeid} ({report.when})'] = report.longreprtext[-TELLS:]
        elif report.when == 'call':
            self.counts['passed'] += 1
        else:
            return
        self.seconds[report.nodeid] = round(report.duration, 2)
        self.write()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.counts['errors'] += 1
            self.failed[f'{report.nodeid} (collected)'] = report.longreprtext[-TELLS:]
            self.write()

    def pytest_sessionfinish(self) -> None:
        self.finished = True
        self.write()


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument('out', type=Path)
    parser.add_argument('--workers', type=int, default=1, help='number of processes, if pytest-xdist is installed')
    parser.add_argument('--files', nargs='+', help='default: all files with the mark')
    args = parser.parse_args()
    flags = ['-m', 'gpu', '-q', '-p', 'no:cacheprovider', f'--rootdir={ROOT}']
    if args.workers > 1 and importlib.util.find_spec('xdist') is not None:
        flags += ['-n', str(args.workers), '--dist', 'worksteal']
    return int(pytest.main([*flags, *(args.files or marked_files())], plugins=[Tally(args.out)]))


if __name__ == '__main__':
    sys.exit(main())
