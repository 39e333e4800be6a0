"""Runs the trials of a sweep as parallel processes, prunes them by their metric, and reports them to the study.

Each trial is an ordinary run in its own folder, with its output in output.log. It has its own session, so that only the
sweep passes Ctrl-C on to it, and gets SIGTERM when the sweep is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from chatgpt.environments.host import kill_group
from chatgpt.launch.ray import Signals
from chatgpt.launch.search.study import Study, Sweep, shown
from chatgpt.launch.torchrun import python_path
from chatgpt.monitor.run_folder.lines import read_jsonl

POLL_S = 0.2
STOP_S = 120.0
"""seconds that a trial has to save and end"""


def say(text: str) -> None:
    print(text, flush=True)


def _words(parameters: Mapping[str, Any]) -> str:
    return ' '.join(f'{name}={shown(value)}' for name, value in parameters.items())


def run_sweep(sweep: Sweep, *, jobs: int = 1) -> int:
    """Runs the trials of a sweep. Returns the exit code: 0, 1 if no trial is complete, 130 or 143 after a signal.
    Unfinished trials of an earlier call continue first.

    Raises:
        CheckpointError: if another process runs a sweep in this folder; names it.
        ValueError: if the folder has another sweep, or the runs do not log the metric.
    """
    from chatgpt.strategies.checkpoint import claim_folder  # imports torch, only after the file is checked

    folder = sweep.save_path
    with claim_folder(folder):
        kept = folder / 'sweep.json'
        before = json.loads(kept.read_text()) if kept.is_file() else sweep.fixed
        for name, value in sweep.fixed.items():
            if before.get(name) != value:
                raise ValueError(
                    f'{folder} holds a sweep whose {name} is {json.dumps(before.get(name))}, not {json.dumps(value)}; '
                    'give another save_path'
                )
        study = Study(sweep)
        kept.write_text(json.dumps(sweep.fixed, indent=1) + '\n')
        (folder / 'config.yaml').write_text(yaml.safe_dump(sweep.fixed['config'], sort_keys=False, allow_unicode=True))
        received = _run_trials(sweep, study, jobs)
        say(study.write_table())
        study.write_plots()
        best = study.best()
        if best is not None:
            say(f'best: trial {best.number} with {sweep.metric} {best.value:.6g}: {_words(best.params)}')
            say(f'its settings: {folder}/trial-{best.number:04d}/config.yaml')
        if received is not None:
            unfinished = ', '.join(map(str, study.numbers('RUNNING', 'WAITING')))
            say(f'stopped; the same command goes on{" with trial " if unfinished else ""}{unfinished}')
            return 128 + received
    return 0 if best is not None else 1


def _run_trials(sweep: Sweep, study: Study, jobs: int) -> int | None:
    """Runs trials until all have ended. Returns the number of the signal that stopped them before, else None. At a
    signal all trials save and end, and stay unfinished in the study; a second one kills them."""
    running, received = list[Running](), None
    with Signals() as signals:
        try:
            while True:
                while received is None and len(running) < jobs and study.num_left():
                    trial, again = study.ask()
                    slot = min(set(range(jobs)) - {r.slot for r in running})
                    say(f'trial {trial.number} {"goes on" if again else "starts"}: {_words(trial.params)}')
                    running.append(Running(sweep, trial, slot, jobs, again=again))
                for one in list(running):
                    if one.has_ended(study, report=received is None):
                        running.remove(one)
                if not running and (received or not study.num_left()):
                    return received
                for number in signals.take():
                    if received is None:
                        received = number
                        name = signal.Signals(number).name
                        say(f'{name}: passed on to {len(running)} trials, which save and leave')
                    else:
                        for one in running:
                            one.kill()
                if received is not None:
                    for one in running:
                        one.stop()
                time.sleep(POLL_S)
        finally:  # also after an error of this process
            for one in running:
                one.kill()


def command(sweep: Sweep, config: Path, folder: Path, parameters: Mapping[str, Any], *, again: bool) -> list[str]:
    """Returns a trial's command line. `again`: resume from its checkpoint, if it has one."""
    settings = {**parameters, 'save_path': str(folder), **({'resume': 'auto'} if again else {})}
    words = [sweep.method, f'--config_file={config}', *(f'{key}={json.dumps(v)}' for key, v in settings.items())]
    if not sweep.launch:
        return [sys.executable, '-m', 'chatgpt', *words]
    # A failed trial is a result: it is restarted only if the file sets max_failures.
    flags = {'max_failures': 0} | dict(sweep.launch)
    return [sys.executable, '-m', 'chatgpt.launch', *(f'--{key}={v}' for key, v in flags.items()), *words]


def share(devices: Sequence[str], slot: int, jobs: int) -> list[str]:
    """Returns the devices of slot `slot` of `jobs`: its share, or one shared device if there are fewer than slots."""
    return list(devices[slot::jobs]) or list(devices[slot % len(devices) :][:1]) if devices else []


def environment(slot: int, jobs: int, *, launched: bool) -> dict[str, str]:
    """Returns the environment variables of a trial; slots divide cores and devices, unless a launcher does."""
    import torch

    found = os.environ | python_path(os.environ.get('PYTHONPATH'))
    if launched or jobs == 1:
        return found
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    found.setdefault('OMP_NUM_THREADS', str(max(1, cores // jobs)))
    named = os.environ.get('CUDA_VISIBLE_DEVICES')
    devices = named.split(',') if named else [str(n) for n in range(torch.cuda.device_count())]
    if own := share(devices, slot, jobs):
        found['CUDA_VISIBLE_DEVICES'] = ','.join(own)
    return found


class Running:
    """A trial and its process."""

    def __init__(self, sweep: Sweep, trial: Any, slot: int, jobs: int, *, again: bool) -> None:
        self.sweep, self.trial, self.slot = sweep, trial, slot
        self.folder = sweep.save_path / f'trial-{trial.number:04d}'
        self.folder.mkdir(parents=True, exist_ok=True)
        _wait_until_free(self.folder)
        self.curve: dict[int, float | None] = {}
        """the metric by step; None if it is not finite"""
        self.pruned_at: int | None = None
        self.started = time.monotonic()
        self._stop_sent_at: float | None = None
        with open(self.folder / 'output.log', 'ab') as output:
            self._start = output.tell()
            self.process = subprocess.Popen(
                command(sweep, sweep.save_path / 'config.yaml', self.folder, trial.params, again=again),
                env=environment(slot, jobs, launched=bool(sweep.launch)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_stop_with_this_process(),
            )

    def has_ended(self, study: Study, *, report: bool) -> bool:
        """Reads the metric and stops a pruned trial. Returns True if the process has ended. `report`: to the study.

        Raises:
            ValueError: if the run has no metric of that name; names the nearest.
        """
        if self._stop_sent_at is not None and time.monotonic() > self._stop_sent_at + STOP_S:
            self.kill()
        ended = self.process.poll() is not None  # before _read, so that the last lines are read
        if report and self.pruned_at is None:
            self._read(study)
        if ended and report:
            self._tell_end(study)
        elif self.pruned_at is not None:
            self.stop()
        return ended

    def _read(self, study: Study) -> None:
        """Reads the lines logged since the last call, until the trial is pruned."""
        from chatgpt.trainer.callbacks.base import metric_value  # imports torch, only after the file is checked

        path, metric = self.folder / 'metrics.jsonl', self.sweep.metric
        lines, late = read_jsonl(path) if path.is_file() else [], self.folder / 'eval.jsonl'
        if metric.startswith('eval/') and late.is_file():  # also holds evaluations after the last phase
            lines += [line for line in read_jsonl(late) if line['step'] and metric in line]
        for line in lines:
            step = line.pop('step')
            is_lost = metric in line and line[metric] is None
            try:
                value = None if is_lost else metric_value(line, metric)
            except ValueError as error:
                message = f'{error}; correct metric, and give another save_path or remove {self.sweep.save_path}'
                raise ValueError(message) from None
            if step in self.curve or (value is None and not is_lost):
                continue
            self.curve[step] = value
            if value is not None and study.report(self.trial, value, step):
                self.pruned_at = step
                return

    def _tell_end(self, study: Study) -> None:
        last, metric = self.pruned_at or max(self.curve, default=0), self.sweep.metric
        value, seconds, error = self.curve.get(last), time.monotonic() - self.started, ''
        if self.pruned_at is not None:
            state, message = 'PRUNED', f'pruned at step {last}: {metric} {value:.6g}'
        elif error := self._error():
            state, message = 'FAIL', f'failed: {error} (output.log in its folder)'
        else:
            state, message = 'COMPLETE', f'complete: {metric} {value:.6g} in {seconds:.0f} s'
        say(f'trial {self.trial.number} {message}')
        study.end(self.trial, state, value, seconds=seconds, error=error)
        study.write_table()

    def _error(self) -> str:
        """Returns why it failed, in one line: its last `error: ...`, or its last line; '' if it did not fail."""
        code, last, metric = self.process.returncode, max(self.curve, default=0), self.sweep.metric
        if code < 0:
            return f'ended by {signal.Signals(-code).name}'
        if not code:
            no_value = f'{metric} is not finite at step {last}' if last else f'it logged no {metric}'
            return no_value if self.curve.get(last) is None else ''
        output = (self.folder / 'output.log').read_bytes()[self._start :].decode(errors='replace')
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith('error: ')] or lines or [f'ended with exit code {code}']
        return errors[-1].removeprefix('error: ')

    def stop(self) -> None:
        """Sends SIGTERM, at which the trial saves and ends; it is killed after `STOP_S`."""
        if self._stop_sent_at is None and self.process.poll() is None:
            self._stop_sent_at = time.monotonic()
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the trial and the processes that it has started."""
        kill_group(self.process.pid)
        self.process.wait()


def _wait_until_free(folder: Path) -> None:
    """Waits for a process of a killed sweep that may still be saving to this folder."""
    from chatgpt.strategies.checkpoint import CheckpointError, claim_folder

    end = time.monotonic() + STOP_S
    while True:
        try:
            return claim_folder(folder).close()
        except CheckpointError:
            if time.monotonic() > end:
                raise
            time.sleep(POLL_S)


def _stop_with_this_process() -> Callable[[], None] | None:
    """Returns a `preexec_fn` by which the kernel sends the child SIGTERM when the sweep ends, in whatever way."""
    if not sys.platform.startswith('linux'):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return ask
