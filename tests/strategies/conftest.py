"""One job with the checks of ColossalAI for all files with tests of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from colossalai_job import TWO, run_all

from chatgpt.testing.processes import run_distributed


@pytest.fixture(scope='session')
def colossalai_folder() -> Iterator[str]:
    """Where the job writes."""
    with tempfile.TemporaryDirectory(prefix='colossalai-') as path:
        yield path


@pytest.fixture(scope='session')
def colossalai_checks(colossalai_folder: str) -> list[dict[str, Any]]:
    """{check: its facts, or a traceback} of both ranks; see `outcome`."""
    return run_distributed(run_all, 2, colossalai_folder, list(TWO))
