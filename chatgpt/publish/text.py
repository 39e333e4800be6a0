"""Values and texts as a public page may show them: Markdown that shows what is there, and nothing of the machine that
the run was on."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatgpt.report.text import value_text

MOST_CHARACTERS = 600
"""of a sample"""
_HUB_NAME = re.compile(r'[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?')
_SLASH = re.compile(r'[/\\]')
_BEGINS_AS_PATH = re.compile(r'(~|\.\.?)?[/\\]\S|[A-Za-z]:[/\\]')
_PATH_IN_TEXT = re.compile(r'(?<![\w.])(?:~|\.\.?|[A-Za-z]:)?[/\\](?:[^\s/\\:]+[/\\])+')
"""the folders of an absolute path"""
_TURNS_TEXT = ('RLE', 'LRE', 'PDF', 'RLO', 'LRO', 'RLI', 'LRI', 'FSI', 'PDI')
"""bidirectional classes of the characters that make a line read in another order than it is written"""


def hub_name(source: Any) -> str | None:
    """A name of the hub, `NAME` or `ACCOUNT/NAME`; None for a file, a folder, or no name at all."""
    if not isinstance(source, str) or not _HUB_NAME.fullmatch(source) or '--' in source or '..' in source:
        return None
    return None if source.endswith(('.git', '.')) or Path(source).exists() or Path(source).suffix in FILES else source


FILES = frozenset(
    {'.jsonl', '.json', '.csv', '.tsv', '.parquet', '.txt', '.arrow', '.py', '.gz', '.yaml', '.yml', '.bin'}
)


def without_paths(value: Any) -> Any:
    """The value with the last part of every path alone, at any depth. Names of the hub stay."""
    if isinstance(value, Mapping):
        return {str(k): without_paths(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(v) for v in value]
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or hub_name(value):
        return value
    if _BEGINS_AS_PATH.match(value) or (_SLASH.search(value) and not re.search(r'\s', value)):
        return re.split(_SLASH, value.rstrip('/\\'))[-1] or value
    return _PATH_IN_TEXT.sub('', value)


def code(value: Any) -> str:
    """A value as a code span inside a table."""
    text = value_text(value).replace('\n', '⏎')
    fence = _fence(text, 1)
    pad = ' ' if '`' in text else ''
    return f'{fence}{pad}{text}{pad}{fence}'.replace('|', '\\|')


def fenced(text: str, language: str) -> str:
    """A block of code that nothing in the text ends."""
    fence = _fence(text, 3)
    return f'{fence}{language}\n{text}\n{fence}'


def _fence(text: str, least: int) -> str:
    return '`' * max(least, 1 + max((len(run) for run in re.findall(r'`+', text)), default=0))


def count(value: int) -> str:
    """A count of parameters in words."""
    for size, word in ((10**9, 'billion'), (10**6, 'million'), (10**3, 'thousand')):
        if value >= size:
            return f'{value / size:.3g} {word}'
    return str(value)


def block(text: str) -> str:
    """A text as a fenced block that shows it as it is: nothing in it is Markdown or markup, ends the block, or turns
    the reading order. Long ones are cut, and say so."""
    cut = len(text) > MOST_CHARACTERS
    return fenced(''.join(map(_visible, text[:MOST_CHARACTERS] + (' …' if cut else ''))), 'text')


def _visible(character: str) -> str:
    if character in '\n\t':
        return character
    kind = unicodedata.category(character)
    if kind in ('Cc', 'Zl', 'Zp', 'Cs') or unicodedata.bidirectional(character) in _TURNS_TEXT:
        return f'\\u{ord(character):04x}'
    return character


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown; cells are ready to be shown."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)
