"""Files of JSON objects, one per line, that are appended to and truncated at a resume.

Each line is flushed and fsynced, so that a killed run keeps every line. JSON has no NaN and no infinity: values that
are not finite are written as null, which pandas reads as NaN.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SURROGATES = 'backslashreplace'
"""error handler that writes a lone surrogate, which UTF-8 cannot encode, as an escape of JSON"""


def json_safe(value: Any) -> Any:
    """Replaces NaN and infinities by None, and tensors and numpy numbers by Python's, at any depth."""
    if isinstance(value, Mapping):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, 'tolist'):
        return json_safe(value.tolist())
    return str(value)


class JsonLines:
    """A file of JSON objects, one per line, each with a `step` that does not decrease."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Appends records and syncs the file. On failure (a full disk) the file is truncated to its old length."""
        text = ''.join(json.dumps(json_safe(r), ensure_ascii=False, allow_nan=False) + '\n' for r in records)
        with open(self.path, 'ab', buffering=0) as file:  # a buffer would be written on closing, after the truncation
            before, rest = file.tell(), memoryview(text.encode('utf-8', SURROGATES))
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, before)
                raise

    def begin(self, step: int) -> None:
        """Prepares the file for lines after `step`. With step 0 the file of an earlier run is renamed to
        `<name>.previous.jsonl`, replacing an earlier one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if step > 0:
            self.truncate_to(step)
        elif self.path.exists() and self.path.stat().st_size > 0:
            os.replace(self.path, previous_of(self.path))

    def truncate_to(self, step: int) -> int:
        """Truncates the file before its first line that is later or incomplete. Returns the bytes removed."""
        if not self.path.exists():
            return 0
        keep = 0
        with open(self.path, 'r+b') as file:
            for line in file:
                if not line.endswith(b'\n') or not _has_step_up_to(line, step):
                    break
                keep += len(line)
            size = file.seek(0, os.SEEK_END)
            if keep < size:
                file.truncate(keep)
                file.flush()
                os.fsync(file.fileno())
        return size - keep


def _has_step_up_to(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)['step'] <= step
    except (ValueError, KeyError, TypeError):
        return False


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the objects of a file, without an incomplete last line.

    Raises:
        ValueError: if another line is no JSON object; names it.
    """
    rows = []
    for number, line in enumerate(Path(path).read_bytes().split(b'\n')[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f'{path}, line {number}: the line is damaged, for it is no JSON object; take it out')
        rows.append(row)
    return rows


def previous_of(path: Path) -> Path:
    """Returns the path to which the file of an earlier run in the same folder is renamed."""
    return path.with_name(f'{path.stem}.previous{path.suffix}')
