"""Trials as processes: started, watched by their metrics.jsonl, stopped.

Each is an ordinary run in a folder of its own, whose output is in output.log. It leads a session of its own, so that a
Ctrl-C reaches it once, from the sweep, and it is asked to stop when the sweep is killed. Left out: which settings are
tried, and what is made of the results (`sweep`).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chatgpt
from chatgpt.checkpoint import CheckpointError, claim_folder
from chatgpt.search import trial_run
from chatgpt.search.settings import Sweep
from chatgpt.search.space import Value
from chatgpt.trainer.callbacks import read_jsonl
from chatgpt.trainer.callbacks.base import metric_value

STOP_S = 120.0
"""how long a trial has to save and leave"""
TAIL_BYTES = 8192
METRICS = 'metrics.jsonl'


def command(sweep: Sweep, config: Path, folder: Path, parameters: Mapping[str, Value], *, again: bool) -> list[str]:
    """A trial's command line. `again`: it goes on from its checkpoint, where it has one."""
    script = str(Path(trial_run.__file__).resolve())
    settings = {**parameters, 'save_path': str(folder), **({'resume': 'auto'} if again else {})}
    words = [sweep.method, f'--config_file={config}', *(f'{key}={json.dumps(v)}' for key, v in settings.items())]
    if not sweep.launch:
        return [sys.executable, script, *words]
    # A failed trial is a result: it is not started again unless the file says so.
    flags = {'max_failures': 0} | dict(sweep.launch)
    return [sys.executable, '-m', 'chatgpt.launch', *(f'--{key}={v}' for key, v in flags.items()), script, *words]


def share(devices: Sequence[str], slot: int, jobs: int) -> list[str]:
    """The devices of one of `jobs` places: its share of them, or one that others have too where there are fewer."""
    return list(devices[slot::jobs]) or list(devices[slot % len(devices) :][:1]) if devices else []


def environment(slot: int, jobs: int, *, launched: bool) -> dict[str, str]:
    """Of a trial in one of `jobs` places, which share cores and devices; a launcher shares out itself."""
    found = dict(os.environ)
    root = Path(chatgpt.__file__).resolve().parents[1]
    if 'site-packages' not in root.parts:
        found['PYTHONPATH'] = os.pathsep.join(dict.fromkeys([str(root), *filter(None, [found.get('PYTHONPATH')])]))
    if launched or jobs == 1:
        return found
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    found.setdefault('OMP_NUM_THREADS', str(max(1, cores // jobs)))
    if devices := share(_devices(), slot, jobs):
        found['CUDA_VISIBLE_DEVICES'] = ','.join(devices)
    return found


def _devices() -> list[str]:
    import torch

    named = os.environ.get('CUDA_VISIBLE_DEVICES')
    return named.split(',') if named else [str(n) for n in range(torch.cuda.device_count())]


class TrialProcess:
    """A trial that runs."""

    def __init__(self, words: Sequence[str], folder: Path, metric: str, variables: Mapping[str, str]) -> None:
        self.folder, self.metric = folder, metric
        folder.mkdir(parents=True, exist_ok=True)
        _wait_until_free(folder)
        self.started = time.monotonic()
        self._mark: Any = None
        self._told_to_stop: float | None = None
        with open(folder / 'output.log', 'ab') as output:
            self._start = output.tell()
            self.process = subprocess.Popen(
                words,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_ends_with(os.getpid()),
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def metrics(self) -> dict[int, float | None]:
        """The metric by step, as far as it has come; None where it is not finite.

        Raises:
            ValueError: the run has no metric of that name; lists the nearest.
        """
        try:
            lines = read_jsonl(self.folder / METRICS)
        except FileNotFoundError:
            return {}
        found: dict[int, float | None] = {}
        for line in lines:
            step = line.pop('step')
            if self.metric in line and line[self.metric] is None:
                found[step] = None
            elif (value := metric_value(line, self.metric)) is not None:
                found[step] = value
        return found

    def has_ended(self) -> bool:
        if self._told_to_stop is not None and time.monotonic() > self._told_to_stop + STOP_S:
            self.kill()
        return self.process.poll() is not None

    def stop(self) -> None:
        """Ask it to save and leave; it is killed where it does not in time."""
        if self._told_to_stop is None and self.process.poll() is None:
            self._told_to_stop = time.monotonic()
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and what it has started, at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait()

    def last_words(self) -> str:
        """Why it failed, in one line: its last `error: ...`, or its last line."""
        code = self.process.returncode
        if code < 0:
            return f'ended by {signal.Signals(-code).name}'
        with open(self.folder / 'output.log', 'rb') as file:
            file.seek(max(self._start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors='replace').splitlines() if line.strip()]
        said = [line for line in lines if line.startswith('error: ')] or lines or [f'ended with exit code {code}']
        return said[-1].removeprefix('error: ')


def _wait_until_free(folder: Path) -> None:
    """A process of a sweep that was killed may still be saving here."""
    end = time.monotonic() + STOP_S
    while True:
        try:
            claim_folder(folder).release()
            return
        except CheckpointError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _ends_with(parent: int) -> Any:
    """For the child before its program: the kernel sends it SIGTERM when the sweep has ended, in whatever way."""
    if not sys.platform.startswith('linux'):
        return None
    return partial(_ask_for_signal, ctypes.CDLL(None), parent)


def _ask_for_signal(libc: Any, parent: int) -> None:
    libc.prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
