"""A fixture that replaces vLLM by the fake in `stand_in`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from spawned_workers import STAND_IN

from chatgpt.rollout import vllm_remote


def _forget() -> None:
    for name in [n for n in sys.modules if n.split('.')[0] == 'vllm']:
        del sys.modules[name]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Imports of vllm give the fake, and weights on a CPU can be sent to it."""
    _forget()
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.setattr(vllm_remote, 'SENT_FROM', ('cuda', 'cpu'))
    monkeypatch.setenv('VLLM_ENABLE_V1_MULTIPROCESSING', '0')
    yield STAND_IN
    _forget()
