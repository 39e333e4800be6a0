"""Waiting in tests. The limit of a test is `timeout` of pyproject.toml and guards against a hang; no test has its own,
none asks how long something took."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

HANG_S = 600.0


def until(condition: Callable[[], Any], told: Callable[[], object] = lambda: 'it did not happen') -> Any:
    """The value of `condition()`, as soon as it is true."""
    end = time.monotonic() + HANG_S
    while not (found := condition()):
        assert time.monotonic() < end, told()
        time.sleep(0.02)
    return found


def painted(page: Any, after_ms: int = 0) -> None:
    """Wait until a browser's page has run the timers of so many milliseconds that it has set, and drawn itself. Its own
    timers say so, for they come in order however busy the machine is."""
    frames = 'requestAnimationFrame(() => requestAnimationFrame(done))'
    page.evaluate(f'() => new Promise(done => setTimeout(() => {frames}, {after_ms}))')
