"""Waiting in tests. `timeout` of pyproject.toml guards against a hang; no test has a limit of its own or measures
time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

HANG_S = 600.0


def until(condition: Callable[[], Any], message: Callable[[], object] = lambda: 'it did not happen') -> Any:
    """Returns the value of `condition()` as soon as it is true. message: gives the error after HANG_S."""
    end = time.monotonic() + HANG_S
    while not (found := condition()):
        assert time.monotonic() < end, message()
        time.sleep(0.02)
    return found


def painted(page: Any, after_ms: int = 0) -> None:
    """Waits until a browser's page has run its timers of up to `after_ms` milliseconds and repainted.

    It uses the page's own timers, which fire in order even on a busy machine.
    """
    frames = 'requestAnimationFrame(() => requestAnimationFrame(done))'
    page.evaluate(f'() => new Promise(done => setTimeout(() => {frames}, {after_ms}))')
