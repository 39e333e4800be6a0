"""The explanation of each finding: the sections of docs/doctor.md, which an installed package has a copy of."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from chatgpt.names import hint

COPY = Path(__file__).with_name('explanations.md')
"""written by setup.py when the package is built"""
PAGE = Path(__file__).resolve().parents[3] / 'docs' / 'doctor.md'


@cache
def explanations() -> dict[str, str]:
    """Text by the key of a finding, in the order of the page; links are their words alone."""
    text = (COPY if COPY.is_file() else PAGE).read_text(encoding='utf-8')
    sections = re.findall(r'^### (\S+)\n(.*?)(?=^##)', text, re.MULTILINE | re.DOTALL)
    return {key: re.sub(r'\[([^\]]+)\]\([^)]+\)', r'\1', section).strip() for key, section in sections}


def explain(key: str) -> str:
    """The explanation of a finding.

    Raises:
        ValueError: there is no finding of that key; names the nearest.
    """
    if key not in explanations():
        raise ValueError(f'--explain {key}: the doctor has no such finding{hint(key, explanations())}')
    return f'{key}\n\n{explanations()[key]}'


def overview() -> str:
    """Each key with the beginning of what is seen."""
    width = max(map(len, explanations()))
    seen = {key: ' '.join(text.split('\n\n')[0].removeprefix('Seen: ').split()) for key, text in explanations().items()}
    return '\n'.join(f'{key:{width}}  {text if len(text) < 90 else text[:87] + "..."}' for key, text in seen.items())
