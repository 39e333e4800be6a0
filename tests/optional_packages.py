"""Marks for tests that need an optional package."""

from __future__ import annotations

import importlib.util

import pytest

needs_colossalai = pytest.mark.skipif(
    importlib.util.find_spec('colossalai') is None,
    reason='colossalai is not installed; see requirements-colossalai.txt',
)
