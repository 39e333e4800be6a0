"""A local hub for huggingface_hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import Hub, serving, use


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Starts a hub with a token that may write; files are uploaded by LFS."""
    with serving() as hub:
        use(hub.address, monkeypatch, tmp_path)
        yield hub
