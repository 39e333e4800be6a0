"""Records of JSON files: an array, one object a line, or objects spread over several lines back to back.

The content decides, not the suffix. A broken object costs only itself where its end can be told; see `_objects` and `_array`.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from chatgpt.dataset.records import BadRecords, Record, open_bytes

_WRAPPER_KEYS = ('data', 'instances', 'rows', 'examples')
_OBJECT_END = re.compile(r'\}\s*(\{|$)')
_BOM = b'\xef\xbb\xbf'


def json_records(path: Path, bad: BadRecords, split: str) -> Iterator[Record]:
    """Records of a JSON or JSON-lines file; `split` is one of the keys under which a .json file of one object may hold its rows."""
    with open_bytes(path) as file:
        start = b''
        while not start:
            block = file.read(4096)
            if not block:
                return
            start = block.removeprefix(_BOM).lstrip()
    if start.startswith(b'['):
        yield from _array(path, bad)
    elif path.suffix == '.json':
        yield from _unwrapped(path, bad, split)
    else:
        yield from _objects(path, bad)


def _unwrapped(path: Path, bad: BadRecords, split: str) -> Iterator[Record]:
    """A .json file of one object may hold the rows under a key: {"data": [...]}."""
    records = _objects(path, bad)
    first = next(records, None)
    if first is None:
        return
    second = next(records, None)
    key = next((k for k in (split, *_WRAPPER_KEYS) if isinstance(first.data.get(k), list)), None)
    if second is None and key is not None and all(isinstance(row, dict) for row in first.data[key]):
        yield from (Record(row, f'{path}, {key}[{i}]') for i, row in enumerate(first.data[key]))
        return
    yield first
    if second is not None:
        yield second
    yield from records


class _Broken(NamedTuple):
    offset: int
    message: str
    unfinished: bool
    """the text is a correct beginning: more of it could make it whole"""


def _decode_all(text: str) -> tuple[list[tuple[int, Any]], _Broken | None]:
    """The JSON values that stand one after the other in `text`, with their offsets, up to the first error."""
    values: list[tuple[int, Any]] = []
    text = text.rstrip()
    decoder, length = json.JSONDecoder(), len(text)
    at = len(text) - len(text.lstrip())
    while at < length:
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            # a string cannot go on in the next line, everything else can
            unfinished = error.pos >= length and not error.msg.startswith('Unterminated string')
            return values, _Broken(at, error.msg.removesuffix(' at').removesuffix(' starting'), unfinished)
        except RecursionError:
            return values, _Broken(at, 'nested too deeply', False)
        values.append((at, value))
        at = end
        while at < length and text[at].isspace():
            at += 1
    return values, None


def _lines(path: Path, bad: BadRecords) -> Iterator[tuple[int, str]]:
    with open_bytes(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                yield number, (raw.removeprefix(_BOM) if number == 1 else raw).decode()
            except UnicodeDecodeError:
                bad.report(f'{path}, line {number}', 'not UTF-8')


def _until_brace(lines: Iterator[tuple[int, str]], again: deque[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The lines up to the next one with a brace in its first column, which is put back."""
    while (line := again.popleft() if again else next(lines, None)) is not None:
        if line[1].startswith('{'):
            again.appendleft(line)
            return
        yield line


def _objects(path: Path, bad: BadRecords) -> Iterator[Record]:
    """Objects of a file that is not an array.

    A line that is a whole object is a record. A line that is a correct beginning is joined with the lines after it, up to the
    next line with a brace in its first column. If more lines show that the beginning was broken, only it is reported, and
    reading goes on at that next line.
    """
    lines, again = _lines(path, bad), deque[tuple[int, str]]()
    while True:
        first = again.popleft() if again else next(lines, None)
        if first is None:
            return
        number, text = first
        taken: list[tuple[int, str]] = []  # the lines from the next brace on, should the beginning turn out broken
        beginning, decoded = text, len(text)
        values, broken = _decode_all(text)
        while broken is not None and broken.unfinished and text.lstrip().startswith('{'):
            more = again.popleft() if again else next(lines, None)
            if more is not None:
                text += more[1]
                if taken or more[1].startswith('{'):
                    taken.append(more)
                else:
                    beginning += more[1]
                # decoding at every line would take time quadratic in the size of a large object
                if not (_OBJECT_END.match(more[1]) or 0 < len(taken) <= 3 or len(text) >= 2 * decoded):
                    continue
            values, broken = _decode_all(text)
            decoded = len(text)
            if more is None:
                break
            if broken is not None and not broken.unfinished and not taken:
                text += ''.join(line for _, line in _until_brace(lines, again))
        if broken is not None and taken:
            again.extendleft(reversed(taken))
            text = beginning
            values, broken = _decode_all(beginning)
        yield from _emit(values, broken, text, number, path, bad)


def _emit(
    values: list[tuple[int, Any]], broken: _Broken | None, text: str, first_line: int, path: Path, bad: BadRecords
) -> Iterator[Record]:
    for offset, value in values:
        where = f'{path}, line {first_line + text.count(chr(10), 0, offset)}'
        if isinstance(value, dict):
            yield Record(value, where)
        else:
            bad.report(where, f'a JSON {type(value).__name__}, where an object is needed')
    if broken is not None:
        where = f'{path}, line {first_line + text.count(chr(10), 0, broken.offset)}'
        bad.report(where, f'not valid JSON: {broken.message}{" (it breaks off)" if broken.unfinished else ""}')


def _array(path: Path, bad: BadRecords) -> Iterator[Record]:
    """The elements of a JSON array. A syntax error ends the file even when bad records are skipped: where the next element
    begins is not known."""
    with open_bytes(path) as file:
        raw = file.read().removeprefix(_BOM)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f'{path}, line {raw.count(10, 0, error.start) + 1}: not UTF-8') from None
    del raw
    space, decoder = re.compile(r'\s*'), json.JSONDecoder()

    def skip_space(at: int) -> int:
        return space.match(text, at).end()  # type: ignore[union-attr]  # matches the empty string too

    line, counted = 1, 0
    at = skip_space(text.index('[') + 1)
    closed = text[at : at + 1] == ']'
    while not closed:
        line, counted = line + text.count('\n', counted, at), at
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ValueError(f'{path}, line {error.lineno}: not valid JSON from here on: {error.msg}') from None
        if isinstance(value, dict):
            yield Record(value, f'{path}, line {line}')
        elif isinstance(value, str):
            yield Record({'text': value}, f'{path}, line {line}')
        else:
            bad.report(f'{path}, line {line}', f'a JSON {type(value).__name__}, where an object is needed')
        at = skip_space(end)
        closed = text[at : at + 1] == ']'
        if not closed and text[at : at + 1] != ',':
            where = f'{path}, line {text.count(chr(10), 0, at) + 1}'
            raise ValueError(f'{where}: not valid JSON from here on: a comma or the closing bracket is missing')
        if not closed:
            at = skip_space(at + 1)
    if text[at + 1 :].strip():
        raise ValueError(f'{path}, line {text.count(chr(10), 0, at) + 1}: more text after the end of the array')
