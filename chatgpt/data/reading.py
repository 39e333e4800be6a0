"""Reads records from csv, json, jsonl, parquet, plain text, folders, hub names, `datasets` objects and lists.

Every record has its file and line, for errors. Files are read lazily, except that the text of a JSON array is in memory
while its elements are decoded one by one.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

from chatgpt.hub import check_name, nearest

T = TypeVar('T')
SUFFIXES = ('.csv', '.tsv', '.json', '.jsonl', '.ndjson', '.parquet', '.txt')
_HUB_NAME = re.compile(r'\w[\w.-]*(/\w[\w.-]*)?(:\w[\w./-]*)?')
_WRAPPER_KEYS = ('data', 'instances', 'rows', 'examples')
_OBJECT_END = re.compile(r'\}\s*(\{|$)')
_BOM = b'\xef\xbb\xbf'


class Record(NamedTuple):
    """One row of a source: its columns, and its place (`prompts.csv, line 3`)."""

    data: dict[str, Any]
    where: str


class BadRecordError(ValueError):
    """A record cannot be used and bad ones are not skipped; names its place."""


SKIPPED = 'Bad records are left out with --skip_bad_records (Python: skip_bad_records=True)'


NAMED_BY = '; name the column of the prompt with --prompt_column'


def without_remedy(error: BadRecordError, *, has_column: bool = False) -> BadRecordError:
    """Returns the error without the sentence about skipping, for callers without that flag, and without --prompt_column
    unless they have it."""
    text = str(error).removesuffix(f'. {SKIPPED}')
    return BadRecordError(text if has_column else text.replace(NAMED_BY, '; rename the column of the prompt to prompt'))


NUM_TRIED = 100
"""records that are tried after a bad first one, before the error suggests skipping bad ones"""


def any_usable(records: Iterator[T], use: Callable[[T], Any]) -> bool:
    """Returns True if `use` accepts one of the next records; False if it raises ValueError for each."""
    try:
        for record in islice(records, NUM_TRIED):
            try:
                use(record)
            except ValueError:
                continue
            return True
    except BadRecordError:  # reading a record failed
        pass
    return False


class BadRecords:
    """Handles records that cannot be used: raises ValueError at the first, or with `skip` counts them."""

    def __init__(self, skip: bool = False, keep: int = 10):
        self.skip = skip
        self.num_skipped = 0
        self.reasons: list[str] = []
        """the first `keep` of them, as `file, line n: reason`"""
        self.noticed: dict[str, list[str]] = {}
        """places of usable records with a property to report, by its name"""
        self._keep = keep

    def notice(self, what: str, where: str) -> None:
        self.noticed.setdefault(what, []).append(where)

    def report(self, where: str, reason: str, remedy: str = SKIPPED) -> None:
        """`remedy`: a sentence about what to do; '' if skipping bad records would leave none."""
        if not self.skip:
            raise BadRecordError(f'{where}: {reason}' + (f'. {remedy}' if remedy else ''))
        self.num_skipped += 1
        if len(self.reasons) < self._keep:
            self.reasons.append(f'{where}: {reason}')


def suffix_of(path: str | Path) -> str:
    """Returns the ending of a file's name in small letters, without .gz behind it."""
    name = Path(path).name.lower()
    return Path(name.removesuffix('.gz')).suffix


def open_bytes(path: Path) -> IO[bytes]:
    """Opens a file for reading bytes; decompresses one that ends in .gz."""
    return cast('IO[bytes]', gzip.open(path, 'rb') if path.suffix.lower() == '.gz' else open(path, 'rb'))


def read_records(
    source: Any,
    bad: BadRecords | None = None,
    *,
    split: str = 'train',
    subset: str | None = None,
    streaming: bool = False,
    text_separator: str = '\n\n',
) -> Iterator[Record]:
    """Yields the records of a source, in order.

    source: a path (file; folder of files; folder written by `Dataset.save_to_disk`), a hub name (or name:folder), a
        `datasets` object, or any iterable of dicts, of strings (each becomes `{'text': ...}`) or of `Path`s. File names
        may end in `.gz`.
    split, subset: part of a hub data set or `DatasetDict`. Of a folder with files of this split, those whose names
        begin with that of another one are left out. No effect on other sources.
    streaming: read a hub data set over the network instead of downloading it first.
    text_separator: separates records of a plain text file; blank lines by default, '\\n' makes each line a record, ''
        the whole file.

    Raises ValueError at the call for a missing or empty source, and during iteration for a record that cannot be read
    (unless `bad` skips).
    """
    bad = bad or BadRecords()
    name, records = _open_source(source, bad, split, subset, streaming, text_separator)

    def others() -> Iterator[Record]:
        return _open_source(source, BadRecords(skip=True), split, subset, streaming, text_separator)[1]

    return _not_empty(name, records, bad, others)


def _not_empty(
    name: str, records: Iterator[Record], bad: BadRecords, others: Callable[[], Iterator[Record]]
) -> Iterator[Record]:
    """Raises ValueError for a source without records. `others` reads it again without bad records, after a bad first
    one."""
    skipped_before, found = bad.num_skipped, False
    try:
        for record in records:
            if column := _broken_column(record):
                bad.report(record.where, f'the text of {column} holds half of a surrogate pair, which is no character')
                continue
            found = True
            yield record
    except BadRecordError as error:
        if found or not all(map(_broken_column, islice(others(), NUM_TRIED))):
            raise
        raise without_remedy(error) from None
    if not found and bad.num_skipped == skipped_before:
        raise ValueError(f'{name}: there is no record in it')


def _broken_column(record: Record) -> str:
    """Returns the name of a column with an unpaired surrogate, or ''."""
    return next((repr(key) for key, value in record.data.items() if _has_half_a_pair(value)), '')


def _has_half_a_pair(value: Any) -> bool:
    """Returns True if a text, at any depth, has a code point of U+D800 to U+DFFF, which UTF-8 cannot encode."""
    if isinstance(value, str):
        return not value.isascii() and any('\ud800' <= character <= '\udfff' for character in value)
    if isinstance(value, Mapping):
        return any(map(_has_half_a_pair, (*value, *value.values())))
    return isinstance(value, (list, tuple)) and any(map(_has_half_a_pair, value))


def without_frame(source: Any) -> Any:
    """Returns the rows of a pandas DataFrame as dicts, with None in empty cells; anything else as it is."""
    if not hasattr(source, 'iterrows'):
        return source
    return source.astype(object).where(source.notna(), None).to_dict('records')


def _open_source(
    source: Any, bad: BadRecords, split: str, subset: str | None, streaming: bool, separator: str
) -> tuple[str, Iterator[Record]]:
    if isinstance(source, Path) or (isinstance(source, str) and Path(source).expanduser().exists()):
        return _open_path(Path(source).expanduser(), bad, split, separator)
    if isinstance(source, str):
        if suffix_of(source) in SUFFIXES or not _HUB_NAME.fullmatch(source):
            raise ValueError(f'{source}: no such file or folder{nearest(source, "dataset")}')
        return source, _rows(_load_hub(source, split, subset, streaming), f'data set {source}', bad)
    source = without_frame(source)
    if isinstance(source, Mapping):
        if split not in source or not all(
            isinstance(key, str) and isinstance(value, Iterable) for key, value in source.items()
        ):
            raise ValueError(f'data: no split {split!r} among {sorted(map(str, source))}; name one with split=')
        return f'split {split}', _rows(source[split], f'split {split}', bad)
    if not isinstance(source, Iterable) and not (hasattr(source, '__getitem__') and hasattr(source, '__len__')):
        raise ValueError(
            f'data: cannot read a {type(source).__name__}; give a path, a hub name, a data set, a DataFrame or a list '
            'of dicts'
        )
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, Path) for item in source):
        opened = [_open_path(path.expanduser(), bad, split, separator) for path in source]
        return ', '.join(map(str, source)), (record for _, records in opened for record in records)
    return 'data', _rows(source, 'data', bad)


def _open_path(path: Path, bad: BadRecords, split: str, separator: str) -> tuple[str, Iterator[Record]]:
    if not path.exists():
        raise ValueError(f'{path}: no such file or folder{nearest(str(path), "dataset")}')
    if path.is_dir():
        return str(path), _folder(path, bad, split, separator)
    suffix = suffix_of(path)
    if suffix not in SUFFIXES:
        raise ValueError(
            f'{path}: unknown kind of file {suffix!r}; known are {", ".join(SUFFIXES)} (each also with .gz)'
        )
    if path.stat().st_size == 0:
        raise ValueError(f'{path}: the file is empty')
    if suffix != '.parquet':
        # UTF-16 shows by its byte order mark or its zeros
        with open_bytes(path) as file:
            start = file.read(2)
        found = 'UTF-16' if start in (b'\xff\xfe', b'\xfe\xff') else None
        if len(start) == 2 and b'\0' in start:
            found = 'UTF-16BE' if start[0] == 0 else 'UTF-16LE'
        if found is not None:
            raise ValueError(f'{path}: encoded in {found}, and data are read as UTF-8. {_converted(path, found)}')
    if suffix in ('.csv', '.tsv'):
        return str(path), _csv(path, bad, tab=suffix == '.tsv')
    if suffix == '.parquet':
        return str(path), _parquet(path)
    if suffix == '.txt':
        return str(path), _text(path, separator)
    return str(path), _json(path, bad, split)


_SPLIT = re.compile(r'(train|test|validation|valid|val|dev|eval)(?![a-z])', re.IGNORECASE)


def _folder(path: Path, bad: BadRecords, split: str, separator: str) -> Iterator[Record]:
    if (path / 'dataset_dict.json').exists() or (path / 'state.json').exists():
        from datasets import load_from_disk

        _, records = _open_source(load_from_disk(str(path)), bad, split, None, False, separator)
        yield from (Record(data, f'{path}, {where}') for data, where in records)
        return
    files = sorted(p for p in path.iterdir() if suffix_of(p) in SUFFIXES)
    if not files:
        raise ValueError(f'{path}: the folder holds no data file; known are {", ".join(SUFFIXES)}')
    of_split = {file: found[0].lower() for file in files if (found := _SPLIT.match(file.name))}
    others = [file for file in files if of_split.get(file, split) != split]
    if split in of_split.values() and others:
        left_out = ', '.join(file.name for file in others)
        warnings.warn(f'{path}: read are the files of the split {split!r}, and not {left_out}', stacklevel=2)
        files = [file for file in files if file not in others]
    for file in files:
        yield from _open_path(file, bad, split, separator)[1]


def _load_hub(name: str, split: str, subset: str | None, streaming: bool) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f'{name}: reading from the hub needs the package datasets: pip install datasets') from error
    name, _, folder = name.partition(':')
    check_name(name, 'dataset')
    try:
        part = {'data_dir': folder} if folder else {}
        return datasets.load_dataset(name, subset, split=split, streaming=streaming, **part)
    except Exception as error:  # the hub client raises many types; each means that this name cannot be read
        reason = ' '.join(str(error).split())[:300]
        text = f'{name}: no such file, and no data set from the hub: {type(error).__name__}: {reason}'
        if reason.startswith(('Unknown split', 'Config name is missing')):
            text = f'{name}: {reason} Write the part that you want to a file: chatgpt-rlhf convert {name} data.jsonl'
            text += f' --to SHAPE --split SPLIT{"" if reason.startswith("Unknown") else " --subset CONFIG"}'
        raise ValueError(text) from error


def _rows(rows: Any, name: str, bad: BadRecords) -> Iterator[Record]:
    items = rows if isinstance(rows, Iterable) else (rows[i] for i in range(len(rows)))
    for number, row in enumerate(items, 1):
        where = f'{name}, row {number}'
        if isinstance(row, str):
            yield Record({'text': row}, where)
        elif isinstance(row, Mapping):
            yield Record(dict(row), where)
        else:
            bad.report(where, f'a {type(row).__name__}, where a dict of columns or a text is needed')


# --- csv -----------------------------------------------------------------------------------------------------------


def _csv(path: Path, bad: BadRecords, tab: bool) -> Iterator[Record]:
    csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
    # surrogateescape keeps bytes that are not UTF-8 in their row, which is then reported with its line
    with io.TextIOWrapper(open_bytes(path), 'utf-8-sig', errors='surrogateescape', newline='') as file:  # type: ignore[arg-type]
        first_line = next((line for line in file if line.strip()), '')
        file.seek(0)
        delimiter = '\t' if tab else next((d for d in (',', ';', '\t') if d in first_line), ',')
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            where = f'{path}, line {reader.line_num + 1}'
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if header is None:
                    raise ValueError(f'{where}: the header is not valid csv: {error}') from None
                bad.report(where, f'not valid csv: {error}')
                continue
            if not row:
                continue
            if header is None:
                header = [column.strip() for column in row]
                repeated = sorted({column for column in header if column and header.count(column) > 1})
                if repeated:
                    raise ValueError(f'{where}: the header names {", ".join(repeated)} more than once')
            elif len(row) != len(header):
                bad.report(where, f'{len(row)} fields, but the header has {len(header)}')
            elif any(map(_has_half_a_pair, row)):
                bad.report(where, 'not UTF-8', _remedy(path, delimiter.join(row).encode('utf-8', 'surrogateescape')))
            else:
                yield Record({column: cell for column, cell in zip(header, row, strict=True) if column}, where)


def _converted(path: Path, encoding: str) -> str:
    name = path.name.removesuffix('.gz')
    return f'Convert the file: iconv -f {encoding} -t UTF-8 {name} > utf8-{name}'


def _remedy(path: Path, raw: bytes) -> str:
    """Returns the remedy for a line that is not UTF-8: to convert the file, if it has a single-byte encoding."""
    if not raw.decode('utf-8', 'ignore').isascii():
        return SKIPPED  # damaged UTF-8
    encoding = 'CP1252' if any(0x80 <= byte < 0xA0 for byte in raw) else 'ISO-8859-1'
    label = {'CP1252': 'CP1252 (Windows)', 'ISO-8859-1': 'ISO-8859-1 (latin-1)'}[encoding]
    return f'Its bytes are those of {label}. {_converted(path, encoding)}'


def _whole(path: Path) -> str:
    """Returns the text of a file, without its byte order mark. Raises ValueError if it is not UTF-8."""
    with open_bytes(path) as file:
        raw = file.read()
    try:
        return raw.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        remedy = _remedy(path, raw)
        what = f'{path}, line {raw.count(10, 0, error.start) + 1}: not UTF-8'
        raise ValueError(what + (f'. {remedy}' if remedy != SKIPPED else '')) from None


# --- json ----------------------------------------------------------------------------------------------------------


def _json(path: Path, bad: BadRecords, split: str) -> Iterator[Record]:
    """Yields the records of an array, of one object per line, or of objects over several lines each: the content
    decides, not the suffix.

    Only the broken object is lost, if its end can be found. `split` is one of the keys under which a .json file of one
    object may hold its rows.
    """
    with open_bytes(path) as file:
        start = b''
        while not start:
            block = file.read(4096)
            if not block:
                return
            start = block.removeprefix(_BOM).lstrip()
    if start.startswith(b'['):
        yield from _array(path, bad)
    elif suffix_of(path) == '.json':
        yield from _unwrapped(path, bad, split)
    else:
        yield from _objects(path, bad)


def _unwrapped(path: Path, bad: BadRecords, split: str) -> Iterator[Record]:
    """Yields the rows of a .json file of one object that holds them under a key: {"data": [...]}."""
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
    unfinished: bool  # more text could complete the value


def _decode_all(text: str) -> tuple[list[tuple[int, Any]], _Broken | None]:
    """Returns the consecutive JSON values in `text` with their offsets, up to the first error."""
    values: list[tuple[int, Any]] = []
    text = text.rstrip()
    decoder, length = json.JSONDecoder(), len(text)
    at = len(text) - len(text.lstrip())
    while at < length:
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            # a string cannot continue in the next line, everything else can
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
                bad.report(f'{path}, line {number}', 'not UTF-8', _remedy(path, raw))


def _until_brace(lines: Iterator[tuple[int, str]], again: deque[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yields the lines before the next one with a brace in its first column, which is put back."""
    while (line := again.popleft() if again else next(lines, None)) is not None:
        if line[1].startswith('{'):
            again.appendleft(line)
            return
        yield line


def _objects(path: Path, bad: BadRecords) -> Iterator[Record]:
    """Yields the objects of a file that is not an array: one per line, or over several lines, beginning with a brace in
    the first column. A broken object is reported, and reading continues at the next such brace."""
    lines, again = _lines(path, bad), deque[tuple[int, str]]()
    while True:
        first = again.popleft() if again else next(lines, None)
        if first is None:
            return
        number, text = first
        taken: list[tuple[int, str]] = []  # the lines from the next brace on, to reread after a broken beginning
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
                # decoding after every line would take quadratic time for a large object
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
    """Yields the elements of a JSON array. A syntax error ends the file even if bad records are skipped, because the
    next element cannot be found."""
    text = _whole(path)
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
        except RecursionError:
            raise ValueError(f'{path}, line {line}: not valid JSON from here on: nested too deeply') from None
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


# --- parquet, text -------------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f'{path}: reading parquet needs the package pyarrow: pip install pyarrow') from error
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own error types, without the file's name
        raise ValueError(f'{path}: not a parquet file: {" ".join(str(error).split())[:200]}') from error
    number = 0
    for batch in file.iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            number += 1
            yield Record(row, f'{path}, row {number}')


def _text(path: Path, separator: str) -> Iterator[Record]:
    text = _whole(path).replace('\r\n', '\n').replace('\r', '\n')
    # several blank lines separate once, and a blank line may contain spaces
    pattern = (
        re.compile(r'\n[ \t]*\n\s*') if separator == '\n\n' else re.compile(re.escape(separator)) if separator else None
    )
    starts = [0, *(m.end() for m in pattern.finditer(text))] if pattern else [0]
    ends = [*(m.start() for m in pattern.finditer(text)), len(text)] if pattern else [len(text)]
    line, counted = 1, 0
    for start, end in zip(starts, ends, strict=True):
        piece = text[start:end]
        first = start + len(piece) - len(piece.lstrip())
        line, counted = line + text.count('\n', counted, first), first
        if piece.strip():
            yield Record({'text': piece.strip()}, f'{path}, line {line}')
