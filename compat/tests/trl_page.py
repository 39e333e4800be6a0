"""Reads the tables of docs/coming_from/trl.md and of the pages in docs/coming_from/trl."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = ROOT / 'docs' / 'coming_from'
PAGE = '\n'.join(page.read_text() for page in [_FOLDER / 'trl.md', *sorted((_FOLDER / 'trl').glob('*.md'))])


def section(title: str) -> str:
    """Returns the text under a heading of one of the pages, up to the next heading."""
    return re.split(r'\n#{1,2} ', PAGE.split(f'\n## {title}\n')[1])[0]


def rows(title: str) -> list[list[str]]:
    """Returns the cells of a section's tables without headers."""
    lines = [line for line in section(title).splitlines() if line.startswith('| ')]
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in lines[1:]]


KEYS = {name.strip('`'): note for name, note in rows('Statistics')}
"""key of TRL's statistics of a step → note: equal, converted, or missing with a reason"""
