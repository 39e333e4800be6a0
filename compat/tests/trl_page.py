"""Tables of docs/coming_from/trl.md."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'docs' / 'coming_from' / 'trl.md').read_text()


def rows(section: str) -> list[list[str]]:
    """The cells of a section's tables, without their heads."""
    text = PAGE.split(f'\n## {section}\n')[1].split('\n## ')[0]
    lines = [line for line in text.splitlines() if line.startswith('| ')]
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in lines[1:]]


KEYS = {name.strip('`'): note for name, note in rows('Statistics')}
"""TRL's statistics of a step: the same number, converted, or left out and why"""
