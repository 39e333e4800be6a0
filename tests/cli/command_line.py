"""Calls the command in this process."""

from __future__ import annotations

import sys

import pytest

from chatgpt.launch.cli import command


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Runs `chatgpt-rlhf WORDS` and returns its exit code."""
    monkeypatch.setattr(sys, 'argv', ['/usr/bin/chatgpt-rlhf', *words])
    try:
        command.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
