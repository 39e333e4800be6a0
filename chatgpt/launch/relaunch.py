"""Going on after a launcher has started the processes of a run anew.

A launch has a name, TORCHELASTIC_RUN_ID, the same before and after a restart: torchrun sets it (`--rdzv_id`, or a new
one with `--standalone`), and so does `chatgpt.launch.ray`. A run writes it into its folder once nothing is wrong with
its command line; a process of the same launch that finds it there resumes, whether --resume was given or not.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from pathlib import Path
from typing import Any

FILE = '.launch'
MISTAKE = 2
"""exit code of a script that was called wrongly (`run_main`, argparse, python itself): the same call would fail
again"""
TOLD = 'CHATGPT_LAUNCH_TOLD'
"""Variable with the path of a file. The rank that reports an error creates it, so that the others do not print the
same; one file per restart."""


def was_told() -> bool:
    return TOLD in os.environ and _told().exists()


def mark_told() -> None:
    if TOLD in os.environ:
        _told().touch()


def _told() -> Path:
    return Path(f'{os.environ[TOLD]}-{os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}')


def launch_name() -> str | None:
    """None without a launcher, and under torchrun's static rendezvous, which calls every launch 'none'."""
    name = os.environ.get('TORCHELASTIC_RUN_ID')
    return None if name in (None, '', 'none') else name


def is_restart(save_path: str | os.PathLike[str]) -> bool:
    """Whether this launch has already run in this folder."""
    name = launch_name()
    return name is not None and _read(save_path).get('launch') == name


def sign(save_path: str | os.PathLike[str], strategy: Any) -> None:
    """Write the launch's name, seen by all processes.

    Raises:
        ValueError: a process does not see the folder that rank 0 writes: what is saved there could not be put together
            again.
    """
    processes = strategy.processes
    if processes.world_size == 1 and launch_name() is None:
        return
    mark = strategy.run_on_rank0(lambda: _write(save_path))
    seen = processes.all_gather_object((_read(save_path).get('mark') == mark, socket.gethostname()))
    blind = [f'{rank} on {host}' for rank, (sees, host) in enumerate(seen) if not sees]
    if blind:
        raise ValueError(
            f'{Path(save_path).absolute()} is not shared: what rank 0 on {seen[0][1]} writes there is not seen by rank '
            f'{", ".join(blind)}; give a --save_path on a file system that all nodes mount at the same place'
        )


def _write(save_path: str | os.PathLike[str]) -> str:
    mark = uuid.uuid4().hex
    folder = Path(save_path)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f'{FILE}.tmp'
    unfinished.write_text(json.dumps({'launch': launch_name(), 'mark': mark}))
    unfinished.replace(folder / FILE)
    return mark


def _read(save_path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        content = json.loads(Path(save_path, FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
