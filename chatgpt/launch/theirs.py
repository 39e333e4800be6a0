"""Translates settings of llm-on-ray and ColossalAI that have no single counterpart here: workers, length of training,
batch per worker, part of a data set.

Other names of single settings are in `chatgpt.names`. Launchers read the number of workers themselves, with `peek` of
`chatgpt.launch.__main__`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatgpt.launch.arguments import processes_here, world_size_from_env
from chatgpt.launch.runs import DataRun, PPORun, RewardRun, Run

RUN_NAMES = {
    'preprocessing_num_workers': int,
    'num_training_workers': int | None,
    'resources_per_worker': dict[str, float] | None,
}
PPO_NAMES = {'epochs': int | None, 'training_iteration': int | None}
DATA_NAMES = {'batch_size': int | None, 'gradient_accumulation_steps': int}
REWARD_NAMES = {'subset': str | None, 'test': bool}
TRIAL = 100
"""number of records of a run with `test`"""


def their_settings(cls: type[Run]) -> dict[str, Any]:
    """Returns names and types of these settings for runs of `cls`."""
    kinds = ((PPORun, PPO_NAMES), (DataRun, DATA_NAMES), (RewardRun, REWARD_NAMES))
    return RUN_NAMES | {
        name: kind for run, settings in kinds if issubclass(cls, run) for name, kind in settings.items()
    }


def to_our_settings(
    values: Mapping[str, Any], cls: type[Run], before: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of a run's fields, and the arguments of `check_processes`.

    Args:
        before: settings of the run that is resumed; `values` take precedence.

    Raises:
        ValueError: for a value out of range, two that contradict each other, or one that is not supported.
    """
    ours = {name: value for name, value in values.items() if name not in their_settings(cls)}
    theirs = {name: value for name, value in values.items() if name not in ours and value is not None}
    for name, value in theirs.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f'{name}={value} must be at least 1')
    if (workers := theirs.pop('preprocessing_num_workers', 1)) != 1:
        raise ValueError(f'preprocessing_num_workers={workers} cannot be honoured: data is read by one process')
    ours |= _length(theirs, ours) | _batch(theirs, ours, cls, before or {})
    ours |= _part(theirs, ours, cls, before or {})
    return ours, {name: theirs[name] for name in RUN_NAMES if name in theirs}


def _length(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Translates the length of PPO: passes over the prompts, or phases; each phase has one timestep."""
    given = [name for name in PPO_NAMES if name in theirs]
    if len(given) > 1:
        raise ValueError('epochs and training_iteration both say how long to train; give one')
    for why in given:
        length = {'num_episodes': theirs[why], 'max_timesteps': None if why == 'epochs' else 1, 'update_timesteps': 1}
        for name, value in length.items():
            if name in ours and ours[name] != value:
                raise ValueError(f'{why}={theirs[why]} and {name}={ours[name]} both say how long to train; give one')
        return length
    return {}


def _batch(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], cls: type[Run], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Translates `batch_size` and `gradient_accumulation_steps`, which are per rank, into the batch of all ranks."""
    steps = theirs.get('gradient_accumulation_steps', 1)
    if 'batch_size' not in theirs:
        if steps > 1:
            raise ValueError('gradient_accumulation_steps cuts a step into forwards of batch_size: give batch_size too')
        return {}
    if 'train_batch_size' in ours:
        raise ValueError(
            f'batch_size={theirs["batch_size"]} and train_batch_size={ours["train_batch_size"]} both say how large a '
            'batch is; give one'
        )
    known = {**before, **ours}
    of_rank = max(known.get('tensor_parallel', 1), 1) * max(known.get('sequence_parallel', 1), 1)
    ranks = world_size_from_env() // of_rank  # a remainder is an error later
    size = {'train_batch_size': theirs['batch_size'] * steps * max(ranks, 1)}
    if steps > 1:
        size['max_tokens_per_batch'] = theirs['batch_size'] * cls(max_len=known.get('max_len')).max_tokens  # type: ignore[call-arg, attr-defined]
    return size


def _part(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], cls: type[Run], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Translates `subset`, a folder of a data set, and `test`, a run on `TRIAL` records."""
    part = dict[str, Any]()
    if theirs.get('subset'):
        if not ours.get('dataset'):
            raise ValueError(f'subset={theirs["subset"]} is a folder of a data set: give dataset too')
        between = '/' if Path(ours['dataset']).is_dir() else ':'
        part['dataset'] = f'{ours["dataset"]}{between}{theirs["subset"]}'
    if theirs.get('test'):
        if ours.get('max_steps') is not None:
            raise ValueError(f'test and max_steps={ours["max_steps"]} both say how long to train; give one')
        size = {**before, **ours}.get('train_batch_size') or cls().train_batch_size  # type: ignore[attr-defined]
        part['max_steps'] = -(-TRIAL // size)
    return part


def check_processes(
    num_training_workers: int | None = None, resources_per_worker: Mapping[str, float] | None = None
) -> None:
    """Checks the number of processes and sets the threads of this one.

    Raises:
        ValueError: if the number differs, or a GPU is requested and there is none.
    """
    wanted, world_size, resources = num_training_workers, world_size_from_env(), resources_per_worker or {}
    if wanted is not None and wanted != world_size:
        raise ValueError(
            f'num_training_workers={wanted}, but {world_size} process{"es were" if world_size > 1 else " was"} '
            f'started; launch with: torchrun --nproc-per-node={wanted} script.py ..., or python -m chatgpt.launch '
            'script.py ..., or leave it out'
        )
    if not resources:
        return
    import torch

    for name in resources:
        if name not in ('CPU', 'GPU'):
            raise ValueError(f'resources_per_worker: {name!r} is not known; there are CPU and GPU')
    if resources.get('GPU', 0) > 0 and not torch.cuda.is_available():
        raise ValueError(
            f'resources_per_worker asks for {resources["GPU"]:g} GPU, and this machine has none; leave GPU out'
        )
    if 'CPU' in resources:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
        torch.set_num_threads(max(1, min(int(resources['CPU']), cores // processes_here())))
