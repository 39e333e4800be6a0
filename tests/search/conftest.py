"""Sweeps whose trials are a small program instead of a training run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_trials import PROGRAM

from chatgpt.launch.search import sweep as loop
from chatgpt.launch.search.settings import read_sweep
from chatgpt.launch.search.study import Sweep


@pytest.fixture
def write_sweep(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        content = {
            'method': 'sft',
            'metric': 'sft/loss',
            'direction': 'minimize',
            'trials': 4,
            'save_path': str(tmp_path / 'sweep'),
            'parameters': {'lr': {'min': 1.0e-4, 'max': 1.0e-1, 'log': True}},
        } | changes
        path = tmp_path / 'sweep.json'
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
        return path

    return write


@pytest.fixture
def sweep_of(write_sweep: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sweep]:
    """A sweep of the program in `fake_trials`; `behaviour` goes to it. Without its plot, unless that is asked for."""

    def make(behaviour: dict[str, Any] | None = None, **changes: Any) -> Sweep:
        def command(sweep: Sweep, config: Path, folder: Path, parameters: Any, *, again: bool) -> list[str]:
            given = {'folder': str(folder), 'parameters': dict(parameters), 'again': again} | (behaviour or {})
            return [sys.executable, '-I', '-S', '-c', PROGRAM, json.dumps(given)]

        monkeypatch.setattr(loop, 'command', command)
        monkeypatch.setattr(loop, 'POLL_S', 0.02)
        if not (behaviour or {}).get('plot'):
            monkeypatch.setattr(loop.Study, 'write_plots', lambda study: None)
        return read_sweep(write_sweep(**changes))

    return make
