"""A sweep: trials asked for, run side by side, pruned by their metric, told to the study; a table and a plot.

Left out: one trial's process (`trials`), Optuna (`study`), table and plot (`report`).
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import yaml

from chatgpt.checkpoint import claim_folder
from chatgpt.launch.ray import Signals
from chatgpt.search.report import shown, write_plot, write_table
from chatgpt.search.settings import Sweep
from chatgpt.search.study import Study, best_of
from chatgpt.search.trials import TrialProcess, command, environment

POLL_S = 0.2
KEPT = 'sweep.json'
CONFIG = 'config.yaml'


@dataclass
class Running:
    """A trial and its process."""

    trial: Any
    process: TrialProcess
    slot: int
    curve: dict[int, float | None] = field(default_factory=dict)
    pruned_at: int | None = None


def say(text: str) -> None:
    print(text, flush=True)


def run_sweep(sweep: Sweep, *, jobs: int = 1) -> int:
    """Run trials until there are as many as the sweep asks for; the exit code: 0, 1 where no trial is complete, 130 or
    143 after a signal. Trials that an earlier call left unfinished go on first.

    Raises:
        CheckpointError: another process runs a sweep in this folder; names it.
        ValueError: the folder holds another sweep; a metric that the runs do not have.
    """
    with claim_folder(sweep.save_path):
        check_same(sweep)
        study = Study(sweep)
        keep(sweep)
        with Signals() as signals:
            number = Loop(sweep, study, jobs, signals).run()
        rows = study.rows()
        say(write_table(sweep, rows))
        write_plot(sweep, rows)
        best = best_of(sweep, rows)
        if best is not None:
            say(f'best: trial {best.number} with {sweep.metric} {best.value:.6g}: {shown(best.parameters)}')
            say(f'its settings: {sweep.save_path / best.folder / "config.yaml"}')
        if number is not None:
            unfinished = [str(row.number) for row in rows if row.state == 'unfinished']
            say('stopped; the same command goes on' + (f' with trial {", ".join(unfinished)}' if unfinished else ''))
            return 128 + number
    return 0 if best is not None else 1


def check_same(sweep: Sweep) -> None:
    """Raises ValueError where the folder holds a sweep of something else."""
    path = sweep.save_path / KEPT
    if not path.is_file():
        return
    before, now = json.loads(path.read_text()), json.loads(json.dumps(sweep.fixed(), default=str))
    for name, value in now.items():
        if before.get(name) != value:
            raise ValueError(
                f'{sweep.save_path} holds a sweep whose {name} is {json.dumps(before.get(name))}, not '
                f'{json.dumps(value)}; give another save_path'
            )


def keep(sweep: Sweep) -> None:
    """What the sweep is, and the settings that all its trials have, in its folder."""
    (sweep.save_path / KEPT).write_text(json.dumps(sweep.fixed(), indent=1, default=str) + '\n')
    config = json.loads(json.dumps(sweep.config, default=str))  # lists for the tuples of a .conf
    (sweep.save_path / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


class Loop:
    """What runs now, and what comes next."""

    def __init__(self, sweep: Sweep, study: Study, jobs: int, signals: Signals) -> None:
        self.sweep, self.study, self.jobs, self.signals = sweep, study, jobs, signals
        self.running: list[Running] = []
        self.unfinished = study.unfinished()

    def run(self) -> int | None:
        """Until all trials have ended; the number of the signal that ended it before that, else None."""
        try:
            while self.fill() or self.running:
                for running in list(self.running):
                    self.look_at(running)
                if received := self.signals.take():
                    self.stop_all(received[0])
                    return received[0]
                time.sleep(POLL_S)
            return None
        finally:  # an error of ours leaves no process behind
            for running in self.running:
                running.process.kill()

    def fill(self) -> bool:
        """Start what fits; whether anything was started."""
        before = len(self.running)
        while len(self.running) < self.jobs:
            again = bool(self.unfinished)
            if not again and self.study.num_trials() >= self.sweep.trials:
                break
            self.start(self.unfinished.pop(0) if again else self.study.ask(), again=again)
        return len(self.running) > before

    def start(self, trial: Any, *, again: bool) -> None:
        sweep, number = self.sweep, trial.number
        folder = sweep.save_path / f'trial-{number:04d}'
        slot = min(set(range(self.jobs)) - {r.slot for r in self.running})
        words = command(sweep, sweep.save_path / CONFIG, folder, trial.params, again=again)
        variables = environment(slot, self.jobs, launched=bool(sweep.launch))
        say(f'trial {number} {"goes on" if again else "starts"}: {shown(trial.params)}')
        self.running.append(Running(trial, TrialProcess(words, folder, sweep.metric, variables), slot))

    def look_at(self, running: Running) -> None:
        """Read its metric, decide whether it goes on, and tell the study when it has ended."""
        process, ended = running.process, running.process.has_ended()  # before the last reading
        if running.pruned_at is None:
            self.read(running)
        if ended:
            self.running.remove(running)
            self.end(running)
        elif running.pruned_at is not None:
            process.stop()

    def read(self, running: Running) -> None:
        try:
            metrics = running.process.metrics()
        except ValueError as error:
            raise ValueError(
                f'{error}; correct metric, and give another save_path or remove {self.sweep.save_path}'
            ) from None
        for step, value in sorted(metrics.items()):
            if step in running.curve:
                continue
            running.curve[step] = value
            if value is not None and self.study.report(running.trial, value, step):
                running.pruned_at = step
                return

    def end(self, running: Running) -> None:
        number, process, metric = running.trial.number, running.process, self.sweep.metric
        last = running.pruned_at or max(running.curve, default=0)
        value, error = running.curve.get(last), ''
        if running.pruned_at is not None:
            state = 'pruned'
            say(f'trial {number} pruned at step {last}: {metric} {value:.6g}')
        elif process.process.returncode or value is None:
            state = 'failed'
            if process.process.returncode:
                error = process.last_words()
            else:
                error = f'{metric} is not finite at step {last}' if last else f'it logged no {metric}'
            say(f'trial {number} failed: {error} (output.log in its folder)')
        else:
            state = 'complete'
            say(f'trial {number} complete: {metric} {value:.6g} in {process.seconds:.0f} s')
        self.study.end(running.trial, state, value, seconds=process.seconds, error=error)
        write_table(self.sweep, self.study.rows())

    def stop_all(self, number: int) -> None:
        """All trials save and leave; they stay unfinished in the study. A second signal ends them at once."""
        say(f'{signal.Signals(number).name}: passed on to {len(self.running)} trials, which save and leave')
        for running in self.running:
            running.process.stop()
        while any(not running.process.has_ended() for running in self.running):
            if self.signals.take():
                for running in self.running:
                    running.process.kill()
            time.sleep(POLL_S)
        self.running.clear()
