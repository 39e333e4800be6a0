"""Resuming after a launcher has restarted the processes of a run.

TORCHELASTIC_RUN_ID is the name of a launch, the same before and after a restart: torchrun sets it (`--rdzv_id`, or a
new one with `--standalone`), and so does `chatgpt.launch.ray`. A run writes it into its folder after its settings are
checked; a process of the same launch that finds it there resumes, with or without --resume.
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
"""exit code of a script with wrong arguments (`run_main`, argparse, python itself): the same call would fail again"""
REPORT_MARKER = 'CHATGPT_LAUNCH_TOLD'
"""environment variable with the path of a file. The rank that prints an error creates it, so that the others do not
print the same one; there is one file per restart."""


def is_reported() -> bool:
    return REPORT_MARKER in os.environ and _report_marker().exists()


def mark_reported() -> None:
    if REPORT_MARKER in os.environ:
        _report_marker().touch()


def _report_marker() -> Path:
    return Path(f'{os.environ[REPORT_MARKER]}-{os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}')


def launch_name() -> str | None:
    """Returns the name of the launch; None without a launcher, and for torchrun's static rendezvous ('none')."""
    name = os.environ.get('TORCHELASTIC_RUN_ID')
    return None if name in (None, '', 'none') else name


def is_restart(save_path: str | os.PathLike[str]) -> bool:
    """Returns True if this launch has already run in this folder."""
    name = launch_name()
    return name is not None and _read(save_path).get('launch') == name


def sign(save_path: str | os.PathLike[str], strategy: Any) -> None:
    """Writes the name of the launch into the run's folder, which all processes must share.

    Raises:
        ValueError: if a process does not see what rank 0 has written.
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
