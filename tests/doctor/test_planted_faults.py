"""Runs with a planted fault, made by the trainers themselves: each is diagnosed, on the way and afterwards, and the
same run without the fault is not."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
from doctor_faults import FAULTS, key_of

from chatgpt.monitor.doctor import CHECKS, diagnose
from chatgpt.monitor.run_folder.reading import RunFolder

SLEEPING = ('slow-rank', 'time-elsewhere')
"""wait on purpose; `test_doctor_checks` has them in numbers, and benchmarks/doctor.py runs them"""


def test_every_finding_has_a_run():
    assert {key_of(name) for name in FAULTS} == set(CHECKS)


@pytest.fixture(scope='module')
def found_by(tmp_path_factory):
    @cache  # several faults have the same run without it
    def keys(make) -> list[tuple[str, int]]:
        folder = tmp_path_factory.mktemp('run')
        make(folder)
        run = RunFolder(folder)
        found = [(f.key, f.step) for f in diagnose(run)]
        assert found == [(row['finding'], row['step']) for row in run.findings]
        return found

    return keys


@pytest.mark.parametrize('name', [name for name in FAULTS if name not in SLEEPING])
def test_a_run_with_a_planted_fault_is_diagnosed(name, found_by):
    fault, key = FAULTS[name], key_of(name)
    assert key in dict(found_by(fault.planted))
    assert key not in dict(found_by(fault.without))
