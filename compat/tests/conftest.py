"""Fixtures of the library's tests; processes that a test starts find both packages without an installation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import model_folder, nothing_leaks, same_processor, with_16_bits

__all__ = ['model_folder', 'nothing_leaks', 'same_processor', 'with_16_bits']

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='session', autouse=True)
def found_by_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        before = os.environ.get('PYTHONPATH')
        patch.setenv('PYTHONPATH', os.pathsep.join([str(ROOT), str(ROOT / 'compat'), *([before] if before else [])]))
        yield
