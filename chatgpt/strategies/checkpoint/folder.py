"""The checkpoints in a run's folder: names, retention, recovery after a kill, and the lock of the writer."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import warnings
from contextlib import ExitStack
from pathlib import Path

from chatgpt.strategies.checkpoint.files import fsync_folder
from chatgpt.strategies.checkpoint.layout import MANIFEST, CheckpointError

LOCK = '.lock'
CUT_SHORT = 'cut-short'
"""folder, beside step-N, of the one checkpoint that is written when an exception ends a phase midway"""
_STEP = re.compile(r'step-(\d{8,})')


def temporary_of(folder: Path) -> Path:
    """Returns the path of a checkpoint while it is written."""
    return folder.with_name(f'.{folder.name}.tmp')


def backup_of(folder: Path) -> Path:
    """Returns the path of a checkpoint while another one replaces it."""
    return folder.with_name(f'.{folder.name}.old')


def step_folder(root: str | os.PathLike[str], step: int) -> Path:
    """Returns root/step-00000012."""
    if step < 0:
        raise ValueError(f'step={step} must not be negative')
    return Path(root) / f'step-{step:08d}'


def step_of(folder: str | os.PathLike[str]) -> int | None:
    """Returns 12 for .../step-00000012, None for other names."""
    match = _STEP.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def list_checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """Returns the finished checkpoints under `root`, those with a manifest, in order of their steps."""
    root = Path(root)
    if not root.is_dir():
        return []
    found = [
        (step, path) for path in root.iterdir() if (step := step_of(path)) is not None and (path / MANIFEST).is_file()
    ]
    return [path for _, path in sorted(found)]


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Returns the finished checkpoint of the highest step, else the one in `CUT_SHORT`, else None."""
    checkpoints = list_checkpoints(root)
    if checkpoints:
        return checkpoints[-1]
    return Path(root, CUT_SHORT) if Path(root, CUT_SHORT, MANIFEST).is_file() else None


def score_of(folder: Path) -> float | None:
    """Returns the `score` in a checkpoint's manifest, or None."""
    try:
        score = json.loads((folder / MANIFEST).read_bytes())['meta'].get('score')
    except (ValueError, KeyError, OSError, AttributeError):
        return None
    return float(score) if isinstance(score, (int, float)) else None


def prune(
    root: str | os.PathLike[str], *, keep_last: int | None = None, keep_best: int = 0, up_to: int | None = None
) -> list[Path]:
    """Removes checkpoints except the last `keep_last` and the `keep_best` with the highest scores; returns the removed.

    Args:
        keep_last: None keeps all.
        keep_best: number of checkpoints to keep by `meta['score']` of their manifests; the later wins a tie.
        up_to: ignore checkpoints of later steps, which a run that resumed from an earlier one has not written.
    """
    if keep_last is None:
        return []
    if keep_last < 1 or keep_best < 0:
        raise ValueError(f'keep_last={keep_last} must be at least 1 and keep_best={keep_best} at least 0')
    checkpoints = [path for path in list_checkpoints(root) if up_to is None or (step_of(path) or 0) <= up_to]
    scored = [(score, number) for number, path in enumerate(checkpoints) if (score := score_of(path)) is not None]
    best = {checkpoints[number] for _, number in sorted(scored, reverse=True)[:keep_best]}
    removed = [path for path in checkpoints[:-keep_last] if path not in best]
    for path in removed:
        remove(path)
    return removed


def remove(folder: Path) -> None:
    """Removes a checkpoint. A kill does not leave an incomplete one under its name."""
    temporary = temporary_of(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    os.rename(folder, temporary)
    fsync_folder(folder.parent)
    shutil.rmtree(temporary, ignore_errors=True)


def recover(root: str | os.PathLike[str]) -> list[Path]:
    """Cleans up after a killed process: restores replaced checkpoints, removes unfinished ones, and returns the
    removed.

    Call it after `claim_folder`, since an unfinished checkpoint may otherwise be one that another run is writing.
    """
    root = Path(root)
    removed = []
    for path in sorted(root.iterdir()):
        name = re.fullmatch(r'\.(.+)\.(tmp|old)', path.name)
        if name is None or not path.is_dir():
            continue
        home = root / name[1]
        if name[2] == 'old' and not (home / MANIFEST).exists():
            os.rename(path, home)
            continue
        shutil.rmtree(path)
        removed.append(path)
    if removed:
        fsync_folder(root)
    return removed


def claim_folder(root: str | os.PathLike[str]) -> ExitStack:
    """Creates `root` if it does not exist and locks it for this run, until `close` or the end of the `with` block. Call
    it on one rank.

    The lock is the kernel's (flock), so it ends with the process.

    Raises:
        CheckpointError: with process and host, if another run holds the lock.
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    file = open(root / LOCK, 'a+')  # open while the lock is held
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or 'another process'
        file.close()
        raise CheckpointError(
            f'{root}: {holder} is writing here; wait for it to end or choose another folder'
        ) from None
    except OSError as error:  # a file system without locks
        file.close()
        warnings.warn(f'{root}: it cannot be locked against other runs ({error.strerror})', stacklevel=2)
        return ExitStack()
    file.seek(0)
    file.truncate()
    file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
    file.flush()
    held = ExitStack()
    held.callback(file.close)
    held.callback(fcntl.flock, file, fcntl.LOCK_UN)
    return held
