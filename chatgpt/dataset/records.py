"""What a record is, and what becomes of a bad one."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import IO, Any, NamedTuple, cast


class Record(NamedTuple):
    """One row of a source: its columns, and where it stands (`prompts.csv, line 3`)."""

    data: dict[str, Any]
    where: str


class BadRecordError(ValueError):
    """A record cannot be used, and bad ones are not to be left out; names its place."""


class BadRecords:
    """What happens to records that cannot be used: the first one is a ValueError, or with `skip` they are counted."""

    def __init__(self, skip: bool = False, keep: int = 10):
        self.skip = skip
        self.num_skipped = 0
        self.reasons: list[str] = []
        """the first `keep` of them, `file, line n: reason`"""
        self.noticed: dict[str, list[str]] = {}
        """places of usable records with a peculiarity, by its name"""
        self._keep = keep

    def notice(self, what: str, where: str) -> None:
        self.noticed.setdefault(what, []).append(where)

    def report(self, where: str, reason: str) -> None:
        if not self.skip:
            raise BadRecordError(f'{where}: {reason}. Bad records are left out with --skip_bad_records (Python: skip_bad_records=True)')
        self.num_skipped += 1
        if len(self.reasons) < self._keep:
            self.reasons.append(f'{where}: {reason}')


def open_bytes(path: Path) -> IO[bytes]:
    """A file's bytes; one that ends in .gz is unpacked on the way."""
    return cast('IO[bytes]', gzip.open(path, 'rb') if path.name.endswith('.gz') else open(path, 'rb'))
