"""Settings of llm-on-ray and ColossalAI without a single counterpart here (workers, length of training, batch per
worker, part of a data set), translated into ours.

Other names for the same thing are in `chatgpt.names`. Left out: where the words come from (`config_file`), and the
launchers, which look for the workers themselves (`config_values.peek`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatgpt.launch.arguments import processes_here, world_size_from_env
from chatgpt.launch.runs import DataRun, PPORun, RewardRun, Run

OF_ALL = {
    'preprocessing_num_workers': int,
    'num_training_workers': int | None,
    'resources_per_worker': dict[str, float] | None,
}
OF_PPO = {'epochs': int | None, 'training_iteration': int | None}
OF_DATA = {'batch_size': int | None, 'gradient_accumulation_steps': int}
OF_REWARD = {'subset': str | None, 'test': bool}
TRIAL = 100
"""records of a run with `test`"""


def their_settings(cls: type[Run]) -> dict[str, Any]:
    """Names and types, beside the fields of `cls`."""
    kinds = ((PPORun, OF_PPO), (DataRun, OF_DATA), (RewardRun, OF_REWARD))
    return OF_ALL | {name: kind for run, settings in kinds if issubclass(cls, run) for name, kind in settings.items()}


def in_our_words(
    values: Mapping[str, Any], cls: type[Run], before: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a run's fields, and what is asked of its processes (`meet`).

    Args:
        before: what was said of the run that is resumed, which stands unless `values` say otherwise.

    Raises:
        ValueError: a value out of range, two that contradict each other, one that cannot be honoured.
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
    return ours, {name: theirs[name] for name in OF_ALL if name in theirs}


def _length(theirs: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """How long PPO trains: passes over the prompts, or phases of one timestep; it learns after every timestep."""
    given = [name for name in OF_PPO if name in theirs]
    if len(given) > 1:
        raise ValueError('epochs and training_iteration both say how long to train; give one')
    for why in given:
        length = {'num_episodes': theirs[why], 'max_timesteps': None if why == 'epochs' else 1, 'update_timesteps': 1}
        for name, value in length.items():
            if name in said and said[name] != value:
                raise ValueError(f'{why}={theirs[why]} and {name}={said[name]} both say how long to train; give one')
        return length
    return {}


def _batch(
    theirs: Mapping[str, Any], said: Mapping[str, Any], cls: type[Run], before: Mapping[str, Any]
) -> dict[str, Any]:
    """The batch of all ranks from that of one, whose `gradient_accumulation_steps` forwards hold `batch_size` records
    each."""
    steps = theirs.get('gradient_accumulation_steps', 1)
    if 'batch_size' not in theirs:
        if steps > 1:
            raise ValueError('gradient_accumulation_steps cuts a step into forwards of batch_size: give batch_size too')
        return {}
    if 'train_batch_size' in said:
        raise ValueError(
            f'batch_size={theirs["batch_size"]} and train_batch_size={said["train_batch_size"]} both say how large a '
            'batch is; give one'
        )
    known = {**before, **said}
    ranks = world_size_from_env() // max(known.get('tensor_parallel', 1), 1)  # what leaves a rest is refused later
    size = {'train_batch_size': theirs['batch_size'] * steps * max(ranks, 1)}
    if steps > 1:
        size['max_tokens_per_batch'] = theirs['batch_size'] * cls(max_len=known.get('max_len')).max_tokens  # type: ignore[call-arg, attr-defined]
    return size


def _part(
    theirs: Mapping[str, Any], said: Mapping[str, Any], cls: type[Run], before: Mapping[str, Any]
) -> dict[str, Any]:
    """A folder of a data set, and a trial that learns from `TRIAL` records."""
    part = dict[str, Any]()
    if theirs.get('subset'):
        if not said.get('dataset'):
            raise ValueError(f'subset={theirs["subset"]} is a folder of a data set: give dataset too')
        between = '/' if Path(said['dataset']).is_dir() else ':'
        part['dataset'] = f'{said["dataset"]}{between}{theirs["subset"]}'
    if theirs.get('test'):
        if said.get('max_steps') is not None:
            raise ValueError(f'test and max_steps={said["max_steps"]} both say how long to train; give one')
        size = {**before, **said}.get('train_batch_size') or cls().train_batch_size  # type: ignore[attr-defined]
        part['max_steps'] = -(-TRIAL // size)
    return part


def meet(num_training_workers: int | None = None, resources_per_worker: Mapping[str, float] | None = None) -> None:
    """See that there are as many processes as asked for, and give this one the threads that it is to have.

    Raises:
        ValueError: there are more or fewer; a GPU is asked for and there is none.
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
