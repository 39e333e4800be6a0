"""Texts, numbers and times as a page shows them. Texts of models and people are data: escaped, cut with a note, and
without characters that no page can hold."""

from __future__ import annotations

import json
from datetime import datetime
from html import escape
from typing import Any

_CONTROLS = {i: 0x2400 + i for i in range(32) if chr(i) not in '\t\n'} | {0x7F: 0x2421}
"""control characters → their pictures"""


def plain(text: Any) -> str:
    """The text with what is invisible or impossible in a page made visible: control characters, lone surrogates."""
    clean = str(text).replace('\r\n', '\n').translate(_CONTROLS)
    return clean.encode('utf-8', 'replace').decode('utf-8')


def cut(text: Any, limit: int) -> str:
    """At most `limit` characters, and how many there are where there are more."""
    clean = plain(text)
    if len(clean) > limit and any('\u202a' <= c <= '\u202e' or '\u2066' <= c <= '\u2069' for c in clean[:limit]):
        return f'\u2068{clean[:limit]}\u2069 … (cut: {limit} of {len(clean)} characters)'  # isolated from the note
    return clean if len(clean) <= limit else f'{clean[:limit]} … (cut: {limit} of {len(clean)} characters)'


def safe(text: Any) -> str:
    """As a part of HTML, in an element or in a quoted attribute."""
    return escape(plain(text), quote=True)


def script_json(value: Any) -> str:
    """As the content of a script element of type application/json, whatever texts are in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
    return text.encode('utf-8', 'replace').decode('utf-8').replace('<', '\\u003c')


def value_text(value: Any) -> str:
    """A setting's value as one would write it."""
    if value is None:
        return 'none'
    if isinstance(value, str):
        return value or "''"
    if isinstance(value, float):
        return f'{value:.10g}'
    return json.dumps(value, ensure_ascii=False, default=str)


def time_text(iso: str | None) -> str:
    """2026-11-22 10:05 UTC"""
    moment = moment_of(iso)
    return '' if moment is None else moment.strftime('%Y-%m-%d %H:%M UTC')


def moment_of(iso: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(iso) if iso else None
    except ValueError:
        return None


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 05 min, 2 d 3 h"""
    if round(seconds) < 60:
        return f'{seconds:.0f} s'
    minutes = round(seconds / 60)
    if minutes < 60:
        return f'{minutes} min'
    hours, minutes = divmod(minutes, 60)
    return f'{hours} h {minutes:02d} min' if hours < 24 else f'{hours // 24} d {hours % 24} h'
