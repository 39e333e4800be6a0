"""Texts, values and times as a page shows them. Texts of models and people are cut with a note, and cleaned of
characters that HTML cannot contain; the templates escape them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

_CONTROLS = {i: 0x2400 + i for i in range(32) if chr(i) not in '\t\n'} | {0x7F: 0x2421}
"""control characters → their symbols"""


def plain(text: Any) -> str:
    """Returns the text with control characters and lone surrogates replaced by visible characters."""
    clean = str(text).replace('\r\n', '\n').translate(_CONTROLS)
    return clean.encode('utf-8', 'replace').decode('utf-8')


def cut(text: Any, limit: int) -> str:
    """Returns at most `limit` characters, with the full length if the text is longer."""
    clean = plain(text)
    if len(clean) > limit and any('\u202a' <= c <= '\u202e' or '\u2066' <= c <= '\u2069' for c in clean[:limit]):
        return f'\u2068{clean[:limit]}\u2069 … (cut: {limit} of {len(clean)} characters)'  # isolated from the note
    return clean if len(clean) <= limit else f'{clean[:limit]} … (cut: {limit} of {len(clean)} characters)'


def script_json(value: Any) -> str:
    """Returns JSON that is safe in a script element of type application/json."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
    return text.encode('utf-8', 'replace').decode('utf-8').replace('<', '\\u003c')


def value_text(value: Any) -> str:
    """Formats the value of a setting."""
    if value is None:
        return 'none'
    if isinstance(value, str):
        return value or "''"
    if isinstance(value, float):
        return f'{value:.10g}'
    return json.dumps(value, ensure_ascii=False, default=str)


def time_text(iso: str | None) -> str:
    """Formats a time as 2026-11-22 10:05 UTC."""
    moment = moment_of(iso)
    return '' if moment is None else moment.strftime('%Y-%m-%d %H:%M UTC')


def moment_of(iso: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(iso) if iso else None
    except ValueError:
        return None


def duration(seconds: float) -> str:
    """Formats a duration as 45 s, 12 min, 3 h 05 min or 2 d 3 h."""
    if round(seconds) < 60:
        return f'{seconds:.0f} s'
    minutes = round(seconds / 60)
    if minutes < 60:
        return f'{minutes} min'
    hours, minutes = divmod(minutes, 60)
    return f'{hours} h {minutes:02d} min' if hours < 24 else f'{hours // 24} d {hours % 24} h'
