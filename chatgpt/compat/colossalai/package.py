"""The package `colossalai` where it is not installed: what a script imports of it and may not even use."""

from __future__ import annotations

SERVED: dict[str, str] = {}

INSTEAD: dict[str, str] = {}
