"""Recorded sequences of a run: one parquet file per phase, a row per sequence with its per-token arrays.

    rollouts/phase-00000012.parquet

Files are written under a temporary name and renamed, so readers see complete files only. See docs/reading_rollouts.md
for the columns.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = 'rollouts'
FORMAT = '1'
KEEP_AT_MOST = 0.75
"""share of a limit that remains after thinning, so that the next phase does not need another one"""
_NAME = re.compile(r'phase-(\d{8,})\.parquet')
_TEMPORARY = '.tmp'
PER_TOKEN = ('old_logprobs', 'ref_logprobs', 'values', 'rewards', 'advantages', 'returns')
"""columns of (A,) float32, never null; `entropy` is null if it was not computed"""
COLUMNS = (
    *('phase', 'index', 'group', 'prompt', 'response', 'score', 'shaped_score', 'kl', 'finish_reason', 'version'),
    *('prompt_ids', 'token_ids', 'prompt_tokens', 'tokens', 'mask', *PER_TOKEN, 'entropy'),
    *('weighted_scores', 'columns', 'episode', 'last_turn'),
)
ADDED = frozenset(('episode', 'last_turn'))
"""columns that recordings of earlier versions do not have; read as None"""


@cache
def _schema() -> Any:
    import pyarrow as pa

    ids, texts, floats = pa.list_(pa.int64()), pa.list_(pa.string()), pa.list_(pa.float32())
    types = dict.fromkeys(('phase', 'index', 'group', 'version'), pa.int64())
    types |= dict.fromkeys(('prompt', 'response', 'finish_reason', 'columns', 'episode', 'last_turn'), pa.string())
    types |= dict.fromkeys(('score', 'shaped_score', 'kl'), pa.float64())
    types |= dict.fromkeys(('prompt_ids', 'token_ids'), ids) | dict.fromkeys(('prompt_tokens', 'tokens'), texts)
    types |= dict.fromkeys((*PER_TOKEN, 'entropy'), floats)
    types |= {'mask': pa.list_(pa.bool_()), 'weighted_scores': pa.list_(pa.list_(pa.float64()))}
    return pa.schema([(name, types[name]) for name in COLUMNS], metadata={'chatgpt.rollouts': FORMAT})


def file_of(folder: str | os.PathLike[str], phase: int) -> Path:
    return Path(folder) / f'phase-{phase:08d}.parquet'


def rollouts_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the rollouts folder in a run's folder, or `path` itself if it has none."""
    inside = Path(path) / FOLDER
    return inside if inside.is_dir() else Path(path)


def recorded_phases(path: str | os.PathLike[str]) -> list[int]:
    """Returns the recorded phases, ascending. `path`: a run's folder, or its rollouts folder."""
    return sorted(phase for phase, _ in _files(rollouts_folder(path)))


def check_recorded(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a folder without recorded sequences."""
    if not Path(path).is_dir():
        raise ValueError(f'{path}: there is no such folder; give the folder of a run of ppo or a relative')
    if not recorded_phases(path):
        raise ValueError(
            f'{path} has no recorded responses (rollouts/phase-*.parquet): give the folder of a run of ppo or a '
            'relative, not of one that only learns'
        )


def _files(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yields (phase, file), unordered."""
    if folder.is_dir():
        for name in os.listdir(folder):
            if found := _NAME.fullmatch(name):
                yield int(found[1]), folder / name


# ---------------------------------------------------------------------- writing


def write_rollouts(folder: str | os.PathLike[str], phase: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes a phase's rows, with the keys of `COLUMNS`; lists may be numpy arrays. Creates the folder.

    Returns:
        The file, which replaces an earlier one of that phase.

    Raises:
        OSError: if it could not be written (a full disk); no partial file remains.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    listed = list(rows)
    columns = [
        pa.array([row.get(f.name) if f.name in ADDED else row[f.name] for row in listed], type=f.type)
        for f in _schema()
    ]
    table = pa.table(columns, schema=_schema())
    path = file_of(folder, phase)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with open(temporary, 'wb') as file:
            # Dictionaries cost more than they save in a file of a few rows.
            pq.write_table(table, file, compression='zstd', use_dictionary=False, write_statistics=False)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


def begin(folder: str | os.PathLike[str], phase: int) -> None:
    """Prepares the folder for phases after `phase`: removes the files of later phases. With phase 0 the files of an
    earlier run are moved to `rollouts.previous`, which is replaced."""
    folder = Path(folder)
    if phase == 0 and recorded_phases(folder):
        aside = folder.with_name(folder.name + '.previous')
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    for later, path in list(_files(folder)):
        if later > phase:
            path.unlink()
    for torn in folder.glob(f'*.parquet{_TEMPORARY}'):
        torn.unlink()


def sizes_of(folder: str | os.PathLike[str]) -> dict[int, int]:
    """Returns the file size of every recorded phase, in bytes."""
    return {phase: path.stat().st_size for phase, path in _files(Path(folder))}


def phases_to_keep(sizes: Mapping[int, int], max_bytes: float, max_phases: int) -> set[int]:
    """Returns all phases if they are within both limits; else the first, the last, and the multiples of the smallest
    power of two with which at most `KEEP_AT_MOST` of either limit is used.

    Of a long run it keeps phases at equal distances, and more of the newest ones until the next thinning.
    """
    kept, step = set(sizes), 1
    if sum(sizes.values()) <= max_bytes and len(sizes) <= max_phases:
        return kept
    ends = {min(sizes), max(sizes)}
    while len(kept) > 2:
        step *= 2
        kept = {phase for phase in sizes if phase % step == 0} | ends
        if sum(sizes[p] for p in kept) <= KEEP_AT_MOST * max_bytes and len(kept) <= KEEP_AT_MOST * max_phases:
            break
    return kept


# ---------------------------------------------------------------------- reading


def read_rollouts(
    path: str | os.PathLike[str],
    phases: Collection[int] | None = None,
    *,
    prompt: str | None = None,
    text: str | None = None,
    score: tuple[float | None, float | None] | None = None,
    offset: int = 0,
    limit: int | None = None,
    columns: Collection[str] = COLUMNS,
) -> list[dict[str, Any]]:
    """Returns recorded sequences, ordered by phase and sample index, as dicts with the keys `columns`.

    Args:
        path: a run's folder, its rollouts folder, or one file.
        phases: phases to read; None: all.
        prompt: text that prompts must contain, case-insensitive.
        text: text that responses must contain, case-insensitive.
        score: (lowest, highest), both included; None: no bound. A score that is not a number is in no range.
        offset, limit: number of matching sequences to skip, and maximum number to return.
        columns: names of `COLUMNS`, by default all.

    A file that cannot be read, or is no recording, is skipped with a warning that names it.
    """
    wanted = None if phases is None else set(phases)

    def matches(row: Mapping[str, Any]) -> bool:
        return (
            (wanted is None or row['phase'] in wanted)
            and _contains(row['prompt'], prompt)
            and _contains(row['response'], text)
            and _within(row['score'], score)
        )

    rows: list[dict[str, Any]] = []
    for phase, file in _readable(Path(path)):
        if wanted is not None and phase is not None and phase not in wanted:
            continue
        left = None if limit is None else limit - len(rows)
        if left is not None and left <= 0:
            break
        skipped, found = _read(file, matches, offset, left, columns)
        offset -= skipped
        rows += found
    return rows


def _readable(path: Path) -> Iterator[tuple[int | None, Path]]:
    """Yields (phase, file), ordered by phase; (None, path) if `path` is a file."""
    if path.is_file():
        yield None, path
        return
    folder = rollouts_folder(path)
    known = sorted(_files(folder))
    if folder.is_dir():
        foreign = sorted(p for p in folder.iterdir() if p.name.endswith('.parquet') and not _NAME.fullmatch(p.name))
        for other in foreign:
            warnings.warn(f'{other}: not named as a recording of a phase; left out', stacklevel=3)
    yield from known


def _read(
    file: Path,
    matches: Callable[[Mapping[str, Any]], bool],
    offset: int,
    left: int | None,
    columns: Collection[str],
) -> tuple[int, list[dict[str, Any]]]:
    """Returns the number of matching rows skipped by the offset, and at most `left` of the next ones; (0, []), with a
    warning, for a file that is no recording. Reads the arrays only if rows match."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            there = opened.schema_arrow.names
            missing = [name for name in COLUMNS if name not in there and name not in ADDED]
            if missing:
                warnings.warn(
                    f'{file}: is no recording of sequences (no column {missing[0]!r}); left out', stacklevel=4
                )
                return 0, []
            heads = opened.read(columns=['phase', 'index', 'prompt', 'response', 'score']).to_pylist()
            found = sorted((i for i, row in enumerate(heads) if matches(row)), key=lambda i: heads[i]['index'])
            taken = found[offset : None if left is None else offset + left]
            rows = opened.read(columns=[c for c in columns if c in there]).take(taken).to_pylist() if taken else []
            rows = [{name: row.get(name) for name in columns} for row in rows]
    except (OSError, pa.ArrowException) as error:
        warnings.warn(f'{file}: cannot be read ({str(error).splitlines()[0]}); left out', stacklevel=4)
        return 0, []
    return min(offset, len(found)), rows


def _contains(text: str, part: str | None) -> bool:
    return not part or part.casefold() in text.casefold()


def _within(value: float | None, bounds: tuple[float | None, float | None] | None) -> bool:
    if bounds is None or bounds == (None, None):
        return True
    low, high = bounds
    if value is None or value != value:
        return False
    return (low is None or value >= low) and (high is None or value <= high)
