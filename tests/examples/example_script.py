"""An example in this process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from chatgpt.launch.arguments import run_main

ROOT = Path(__file__).resolve().parents[2]


def script(name: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / 'examples' / f'{name}.py')
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, 'argv', [name, *flags])
    run_main(module.main)
