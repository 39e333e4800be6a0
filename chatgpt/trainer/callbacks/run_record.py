"""Writes run.json at the start of a run, at every resume and at its end, on rank 0."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import torch

from chatgpt import __version__
from chatgpt.monitor.run_folder import rollouts
from chatgpt.monitor.run_folder.lines import previous_of
from chatgpt.monitor.run_folder.record import FILENAME, SECRET, RunRecord, Start, Status, without_secrets
from chatgpt.strategies.machine import processor, unused_card
from chatgpt.trainer.callbacks.base import Callback, TrainerView

PACKAGES = ('torch', 'transformers', 'datasets', 'tokenizers', 'numpy', 'colossalai', 'peft', 'ray', 'vllm')
OTHER_FILES = ('eval.jsonl', 'samples.jsonl', 'eval_samples.jsonl', 'findings.jsonl', 'report.html')
"""files of a run folder beside run.json and metrics.jsonl, which every run has; `RunRecorder` renames those of an
earlier run, for several callbacks may write one"""
PLANNED_AFTER_S = 10.0
"""delay of the plan, which takes a quarter of a second: too much for a run of a few seconds"""


class RunRecorder(Callback):
    """Writes run.json. Part of every trainer with a `run_dir`.

    Args:
        settings: all settings of the run, if there are more than the trainer's own.
        defaults: their default values.
        planned: returns the planned memory, for `RunRecord.plan`; called once, on rank 0.
    """

    order: ClassVar[int] = -20

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        planned: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        self.settings = dict(settings) if settings is not None else None
        self.defaults, self.planned = dict(defaults or {}), planned
        self.record: RunRecord | None = None
        self._plan_at = 0.0

    def on_fit_start(self, trainer: TrainerView) -> None:
        if trainer.phase == 0 and trainer.run_dir is not None and trainer.strategy.is_rank_0:
            rollouts.begin(trainer.run_dir / rollouts.FOLDER, 0)
        self._begin(trainer, trainer.phase)

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        if self.record is None:  # a step-wise trainer has no fit start
            self._begin(trainer, step - 1)
        if self.record is not None and time.monotonic() > self._plan_at:
            self._plan_at = math.inf  # once: a plan that failed would fail again
            self.record.plan = self.planned()
            self._write(trainer)

    def end(self, trainer: TrainerView) -> None:
        """Records that `fit` has ended."""
        whole = trainer.num_phases is None or trainer.phase >= trainer.num_phases
        self._end(trainer, 'ended' if whole else 'stopped')

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._end(trainer, 'stopped')
        else:
            self._end(trainer, 'failed', f'{type(error).__name__}: {error}'.strip().rstrip(':'))

    def _begin(self, trainer: TrainerView, phase: int) -> None:
        """Records a start of the run after `phase`, on rank 0."""
        self.record = None
        if trainer.run_dir is None or not trainer.strategy.is_rank_0:
            return
        if phase == 0:
            # files of an earlier run are renamed, even those that the new run does not write
            for name in OTHER_FILES:
                if (trainer.run_dir / name).is_file():
                    os.replace(trainer.run_dir / name, previous_of(trainer.run_dir / name))
        record = describe(trainer, self.settings, self.defaults)
        start = this_start(phase)
        record.phase, record.starts = phase, [*_earlier_starts(trainer.run_dir, phase), start]
        self.record, self._plan_at = record, time.monotonic() + PLANNED_AFTER_S
        self._write(trainer)

    def _end(self, trainer: TrainerView, status: Status, error: str | None = None) -> None:
        if self.record is None:
            return
        self.record.status, self.record.phase, self.record.error = status, trainer.phase, error
        self.record.ended = now()
        self._write(trainer)

    def _write(self, trainer: TrainerView) -> None:
        assert self.record is not None and trainer.run_dir is not None
        try:
            self.record.write(trainer.run_dir)
        except OSError as error:
            warnings.warn(
                f'{trainer.run_dir / FILENAME} could not be written ({error.strerror or error})', stacklevel=2
            )


class RunEnd(Callback):
    """Records the end of a run after the last evaluation and the last checkpoint."""

    order: ClassVar[int] = 500

    def on_fit_end(self, trainer: TrainerView) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, RunRecorder):
                callback.end(trainer)


def describe(
    trainer: TrainerView, settings: Mapping[str, Any] | None = None, defaults: Mapping[str, Any] | None = None
) -> RunRecord:
    """Returns the record of a run as it is now, without starts; `settings` and `defaults` as for `RunRecorder`."""
    strategy, config, facts = trainer.strategy, trainer.config, trainer.facts()
    return RunRecord(
        method=facts.pop('method'),
        trainer=type(trainer).__name__,
        settings=dict(settings) if settings is not None else config.to_dict(),
        defaults=dict(defaults or {}) if settings is not None else defaults_of(config),
        strategy={
            'name': type(strategy).__name__,
            'world_size': strategy.world_size,
            **({'processes': processes} if (processes := strategy.processes.world_size) != strategy.world_size else {}),
            **{name: fact for name, fact in strategy.numerics.facts().items() if fact is not None},
            'device': str(strategy.device),
            'seed': strategy.seed,
        },
        models={name: model_facts(strategy.unwrap(model)) for name, model in trainer.models().items()},
        optimizers=trainer.fingerprint()['optimizers'],
        num_phases=trainer.num_phases,
        phase=trainer.phase,
        **facts,
    )


def _earlier_starts(folder: Path, phase: int) -> list[Start]:
    """Returns the earlier starts of a run that continues after `phase`; a run from the beginning renames an earlier
    record."""
    path = folder / FILENAME
    if phase == 0:
        if path.is_file():
            os.replace(path, previous_of(path))
        return []
    try:
        before = RunRecord.read(folder)
    except ValueError:
        return []
    return [start for start in before.starts if start.phase <= phase] if before is not None else []


def now() -> str:
    return datetime.now(UTC).isoformat(timespec='seconds')


def this_start(phase: int) -> Start:
    found = {'python': platform.python_version(), 'chatgpt': __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return Start(at=now(), phase=phase, command=command_line(), git=_git(), versions=found, machine=_machine())


def command_line() -> list[str]:
    """Returns the command line with secrets replaced by ***."""
    words = list(getattr(sys, 'orig_argv', sys.argv))
    shown, hide = [], False
    for word in words:
        name, equals, _ = word.partition('=')
        bare = name.lstrip('-').rpartition('.')[2]
        secret = SECRET.search(bare) is not None
        if hide and not word.startswith('-'):
            shown.append('***')
        else:
            shown.append(f'{name}=***' if secret and equals else without_secrets(word))
        hide = secret and not equals and word.startswith('-')
    return shown


def _git() -> dict[str, Any] | None:
    def git(*words: str) -> str:
        process = subprocess.run(['git', *words], capture_output=True, text=True, timeout=2, check=True)
        return process.stdout.strip()

    try:
        return {'commit': git('rev-parse', 'HEAD'), 'dirty': bool(git('status', '--porcelain', '--untracked-files=no'))}
    except (OSError, subprocess.SubprocessError):
        return None


def _machine() -> dict[str, Any]:
    on_cuda = torch.cuda.is_available()
    pages = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') if hasattr(os, 'sysconf') else None
    return {
        'system': f'{platform.system()} {platform.release()}',
        'processor': _processor(),
        'instructions': str(processor()),
        'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
        'threads': torch.get_num_threads(),
        'memory_gib': round(pages / 2**30, 1) if pages else None,
        'gpus': [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if on_cuda else [],
        'unused_card': unused_card(),
    }


def _processor() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.machine()


def model_facts(bare: Any) -> dict[str, Any]:
    """Returns facts of an unwrapped model: its kind, its source, its number of parameters and of trained ones."""
    config = getattr(getattr(bare, 'model', bare), 'config', None)
    # under tensor parallelism a process holds parts, with the shape of the whole
    sizes = [
        (math.prod(getattr(p, 'whole_shape', p.shape)), p.requires_grad)
        for name, p in bare.named_parameters()
        if 'ref_branch.' not in name  # hydra's copy of the initial weights
    ]
    # weights in 4 bits are buffers with two weights in a byte
    sizes += [(64 * b.numel(), False) for name, b in bare.named_buffers() if name.endswith('.scales')]
    return {
        'kind': getattr(config, 'model_type', None) or type(bare).__name__,
        'source': getattr(config, '_name_or_path', None) or None,
        'parameters': sum(size for size, _ in sizes),
        'trained': sum(size for size, learns in sizes if learns),
    }


def defaults_of(config: Any) -> dict[str, Any]:
    """Returns the defaults of the fields of a settings dataclass that have one."""
    if not is_dataclass(config):
        return {}
    given = {}
    for f in fields(config):
        if f.default is not MISSING:
            given[f.name] = f.default
        elif f.default_factory is not MISSING:
            given[f.name] = f.default_factory()
    return given
