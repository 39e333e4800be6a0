"""Training checkpoints: everything that a resume needs, in one folder that any strategy and world size can read.

    actor/<parameter>              weights, fp32 masters
    actor_optim/<parameter>/<slot> optimizer states
    rng/<rank>/<generator>         torch's, CUDA's, Python's and numpy's global ones, for user code and dropout;
                                   the library itself samples from counters
    <group>/...                    tensors of callbacks, under the name that the callback gives them
    state/...                      tensors of state.json: samples that were generated ahead (`max_staleness`), schedule
    state.json                     counters, KL controller, running moments, hyperparameters, settings,
                                   callbacks' states

The manifest's meta records the owner of each group of pieces (`owners`): MODELS, OPTIMIZERS, RNG, or a callback by
class and number among those of its class ('EMA.0'). A group is loaded by its owner, whatever its name. If two owners
have groups of the same name, the second is stored as `<group>@<owner>`.

A run of the command line loads frozen weights again from the folder or the hub that they came from, as it does with
the initial and the reward model. Its checkpoints do not hold them; state.json has their checksums (`left_out`), which a
resume compares. Checkpoints of a trainer made in Python hold all weights.

Checkpoints are written between phases, when the replay buffer is empty, so they hold no experience.
"""

from __future__ import annotations

import json
import math
import platform
import random
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chatgpt.monitor.run_folder.lines import previous_of
from chatgpt.nn.weights import reloaded_names
from chatgpt.strategies import Strategy
from chatgpt.strategies.checkpoint import (
    CUT_SHORT,
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    Piece,
    TensorReader,
    claim_folder,
    latest,
    list_checkpoints,
    pieces_of,
    recover,
    step_folder,
    step_of,
)
from chatgpt.trainer.callbacks.base import TrainerView
from chatgpt.trainer.sample_queue import Schedule
from chatgpt.trainer.schedule import hyperparameters

MODELS, OPTIMIZERS, RNG, STATE = 'models', 'optimizers', 'rng', 'state'
"""owners of groups that do not belong to a callback"""


@dataclass(frozen=True)
class Saving:
    """A checkpoint that may still be written in the background."""

    path: Path
    writer: CheckpointWriter
    meta: dict[str, Any]
    phase: int
    steps: int
    """finished optimizer steps"""

    def commit(self, trainer: TrainerView) -> None:
        if not self.writer.committed:
            self.writer.commit(meta=self.meta)
        if step_of(self.path) is not None and trainer.strategy.is_rank_0:
            # the folder of an interrupted phase is out of date now
            shutil.rmtree(self.path.with_name(CUT_SHORT), ignore_errors=True)


def begin_checkpoint(
    trainer: TrainerView, path: str | Path | None, *, steps: int, score: float | None = None, background: bool = False
) -> Saving:
    """See `Trainer.save_checkpoint`. `score` is for `prune(keep_best=...)`: higher is better."""
    strategy = trainer.strategy
    score = trainer.phase_score if score is None else score
    if path is None:
        if trainer.checkpoint_dir is None:
            raise ValueError('save_checkpoint needs a path, or a trainer with a run_dir or SaveCheckpoint(path=...)')
        path = step_folder(trainer.checkpoint_dir, trainer.phase)
    path = Path(path)
    optimizers = {name: strategy.optimizer_state(optimizer) for name, optimizer in trainer.optimizers().items()}
    tensors: dict[str, torch.Tensor] = {}
    state = {
        'trainer': _without_tensors(trainer.checkpoint_state(), tensors),
        'optimizers': {name: meta for name, (meta, _) in optimizers.items()},
        'fingerprint': as_json(trainer.fingerprint()),
        'layout': layout_of(trainer),
        'left_out': {name: _left_out(trainer, name) for name in trainer.models()},
    }
    processes = strategy.processes
    writer = CheckpointWriter(
        path, rank=processes.rank, all_gather_object=processes.all_gather_object, background=background
    )
    with writer:
        owners: dict[str, str] = {'rng': RNG}
        for name, model in trainer.models().items():
            owners[name] = MODELS
            left = state['left_out'][name]
            writer.add(f'{name}/', (piece for piece in strategy.model_pieces(model) if piece.name not in left))
        for name, (_, pieces) in optimizers.items():
            owners[f'{name}_optim'] = OPTIMIZERS
            writer.add(f'{name}_optim/', pieces)
        for owner, group, pieces in trainer.callbacks.owned_pieces(trainer):
            name = f'{group}@{owner}' if group in owners else group
            owners[name] = owner
            writer.add(f'{name}/', pieces)
        writer.add('rng/', _rng_pieces(strategy.rank) if strategy.ranks.leads else ())
        if tensors:
            owners['state'] = STATE
            writer.add('state/', pieces_of(tensors) if strategy.ranks.leads and strategy.is_rank_0 else ())
        writer.add_json('state.json', state)
        kind = {'kind': 'training', 'method': trainer.facts()['method']}
        saving = Saving(
            path, writer, kind | {'phase': trainer.phase, 'score': score, 'owners': owners}, trainer.phase, steps
        )
        if not background:
            writer.commit(saving.meta)
    return saving


def _left_out(trainer: TrainerView, name: str) -> dict[str, int]:
    """Returns the checksums of a model's weights that a resume loads from where they came from. Nothing is left out of
    a run that has read a whole checkpoint, for its frozen weights may have been trained before."""
    if trainer.left_out is None:
        return {}
    model = trainer.models()[name]
    # A model without an optimizer may be one that is overwritten in training.
    names = set(reloaded_names(trainer.strategy.unwrap(model))) if name in trainer.optimizers() else set()
    if name not in trainer.left_out:
        trainer.left_out[name] = _checksums(trainer.strategy, model, names)
    elif not names.issuperset(trainer.left_out[name]):  # some are trained since
        trainer.left_out[name] = {}
    return trainer.left_out[name]


def _checksums(strategy: Strategy, model: nn.Module, names: Container[str]) -> dict[str, int]:
    """Returns the sum of each named tensor's fp32 bits, the same on any layout. A collective."""
    own: Counter[str] = Counter()
    for piece in strategy.model_pieces(model):
        if piece.name in names:
            data = piece.data.detach()
            bits = data.float().view(torch.int32) if data.is_floating_point() else data.view(torch.uint8)
            own[piece.name] += int(bits.sum(dtype=torch.int64))
    total: Counter[str] = Counter()
    for sums in strategy.processes.all_gather_object(dict(own)):
        total.update(sums)
    return dict(total)


def _check_left_out(trainer: TrainerView, name: str, left: Mapping[str, int], folder: Path) -> None:
    if not left:
        return
    model = trainer.models()[name]
    found = _checksums(trainer.strategy, model, left)
    if wrong := [weight for weight, checksum in left.items() if found.get(weight) != checksum]:
        place = reloaded_names(trainer.strategy.unwrap(model)).get(wrong[0], 'its source')
        raise CheckpointError(
            f'{folder}: the checkpoint does not hold the frozen weights of the {name}, and those of {place} are others '
            f'now ({len(wrong)} of {len(left)} tensors differ, first {wrong[0]}): give the model that the run began '
            'with, unchanged'
        )


def _without_tensors(state: Any, tensors: dict[str, torch.Tensor], where: str = '') -> Any:
    """Returns `state` with {'tensor': name} for each tensor, and adds these to `tensors`."""
    if isinstance(state, torch.Tensor):
        tensors[where] = state
        return {'tensor': where}
    if isinstance(state, Mapping):
        return {k: _without_tensors(v, tensors, f'{where}/{k}' if where else str(k)) for k, v in state.items()}
    if isinstance(state, list):
        return [_without_tensors(v, tensors, f'{where}/{i}') for i, v in enumerate(state)]
    return state


def _with_tensors(state: Any, reader: TensorReader) -> Any:
    """Inverts `_without_tensors`."""
    if isinstance(state, Mapping):
        name = state.get('tensor')
        if len(state) == 1 and isinstance(name, str) and name in reader.names():
            shape = reader.shape(name)
            return reader.read(name, 0, math.prod(shape)).reshape(shape).clone()
        return {key: _with_tensors(value, reader) for key, value in state.items()}
    return [_with_tensors(value, reader) for value in state] if isinstance(state, list) else state


def load_checkpoint(trainer: TrainerView, path: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """See `Trainer.load_checkpoint`. Returns the folder and the fingerprint of the run that wrote it, or None."""
    strategy = trainer.strategy
    folder = strategy.run_on_rank0(lambda: _find(trainer, path))
    if folder is None:
        return None
    processes = strategy.processes
    reader, fault = _opened(folder, processes.rank, processes.world_size)
    reasons = [reason for reason in processes.all_gather_object(fault) if reason]
    if reasons:
        earlier = strategy.run_on_rank0(lambda: _whole_before(folder))
        raise CheckpointError(
            reasons[0] + (f'; the newest whole one before it is taken with --resume {earlier}' if earlier else '')
        )
    assert reader is not None
    if reader.meta.get('kind') != 'training':
        raise CheckpointError(
            f'{folder}: holds {reader.meta.get("kind")!r}, not a training checkpoint; use strategy.load_model for '
            'weights'
        )
    state = reader.json()
    owners: dict[str, str] = reader.meta['owners']
    _check_method(trainer, reader, state['trainer'], owners)
    for name, model in trainer.models().items():
        part = reader.sub(f'{name}/')
        left = state.get('left_out', {}).get(name, {})
        part.left_out = frozenset(left)
        strategy.load_model_pieces(model, part)
        _check_left_out(trainer, name, left, folder)
        if trainer.left_out is not None:
            trainer.left_out[name] = left
    for name, optimizer in trainer.optimizers().items():
        chosen = [hyperparameters(group) for group in optimizer.param_groups]
        strategy.load_optimizer_state(optimizer, state['optimizers'][name], reader.sub(f'{name}_optim/'))
        for settings, values in zip(optimizer.param_groups, chosen, strict=True):
            # Settings of this run take precedence over the checkpoint's; `report_changes` warns about differences.
            settings.update(values)
    for name, owner in sorted(owners.items()):
        if owner in (MODELS, OPTIMIZERS, RNG, STATE):
            continue
        group = name.removesuffix(f'@{owner}')
        if (
            not trainer.callbacks.load_owned_pieces(trainer, owner, group, reader.sub(f'{name}/'))
            and strategy.is_rank_0
        ):
            kind = owner.partition('.')[0]
            warnings.warn(
                f'{folder}: {group} is of a callback that this run does not have, {kind}; it is left out', stacklevel=3
            )
    trainer.load_state_dict(_with_tensors(state['trainer'], reader.sub('state/')))
    trainer.phase_score = reader.meta.get('score')
    if layout_of(trainer) == state['layout']:
        _restore_rng(reader, strategy.rank)
    return folder, state['fingerprint']


def schedules(folder: str | Path) -> list[Schedule]:
    """Returns the schedule of each rank in a checkpoint of a stream; see `Stream.replay`."""
    reader = CheckpointReader(Path(folder))
    saved = reader.json()['trainer'].get('schedule', [])
    return [Schedule.of(_with_tensors(state, reader.sub('state/'))) for state in saved]


def report_changes(trainer: TrainerView) -> None:
    """Warns about settings and data that differ from those of the loaded checkpoint. Called when the run's data are
    known."""
    if trainer.saved_fingerprint is None or not trainer.strategy.is_rank_0:
        return
    changes = list(differences(trainer.saved_fingerprint, as_json(trainer.fingerprint())))
    if changes:
        warnings.warn(f'resumed from {trainer.resumed_from} under changed settings: {"; ".join(changes)}', stacklevel=3)


def differences(old: Any, new: Any, where: str = '') -> Iterator[str]:
    """Yields 'config.kl_coef 0.1 → 0.2' for every leaf that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        # A checkpoint may lack a whole part, which is then not compared.
        for key in sorted(set(old) & set(new) if not where else set(old) | set(new)):
            yield from differences(old.get(key), new.get(key), f'{where}.{key}' if where else str(key))
    elif old != new:
        yield f'{where} {old!r} → {new!r}'


def layout_of(trainer: TrainerView) -> dict[str, Any]:
    """Returns what must be equal for a resumed run to continue bit for bit."""
    strategy = trainer.strategy
    return {
        'strategy': type(strategy).__name__,
        'world_size': strategy.world_size,
        'device': strategy.device.type,
        'precision': str(strategy.numerics.dtype),
        'threads': torch.get_num_threads(),
        'torch': torch.__version__,
        'python': platform.python_version(),
        **({'processes': processes} if (processes := strategy.processes.world_size) != strategy.world_size else {}),
    }


def locked_folder(trainer: TrainerView) -> Path | None:
    """Returns the folder whose lock guards the checkpoints: the run's, or their own if they lie outside of it."""
    root, run_dir = trainer.checkpoint_dir, trainer.run_dir
    inside = run_dir is not None and (root is None or run_dir.absolute() in root.absolute().parents)
    return run_dir if inside else root


def _find(trainer: TrainerView, path: str | Path) -> Path | None:
    if str(path) == 'auto':
        root = trainer.checkpoint_dir
        if root is None:
            raise ValueError("resume 'auto' needs a run_dir to look in, or SaveCheckpoint(path=...)")
        if not root.is_dir():
            return None
        with claim_folder(locked_folder(trainer) or root):  # unfinished ones may be of a run that is writing them
            recover(root)
        return latest(root)
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f'{path}: no such checkpoint folder')
    if step_of(path) is not None or (path / 'manifest.json').is_file():
        return path
    found = latest(path) or latest(path / 'checkpoints')
    if found is None:
        raise CheckpointError(f'{path}: no whole checkpoint in this folder')
    return found


def _check_method(
    trainer: TrainerView, reader: CheckpointReader, state: Mapping[str, Any], owners: Mapping[str, str]
) -> None:
    """Raises CheckpointError for a checkpoint of other models, or of a trainer with other counters."""
    stored = {name for name, owner in owners.items() if owner in (MODELS, OPTIMIZERS)}
    members = {*trainer.models(), *(f'{name}_optim' for name in trainer.optimizers())}
    own, method = trainer.facts()['method'], reader.meta.get('method')
    counters = trainer.state_dict().keys() - state.keys()
    # PPO and related methods resume from each other's checkpoints, with a warning about what changed
    other = 'batches_done' in state and method not in (None, own)
    if set(trainer.models()) <= stored <= members and not counters and not other:
        return
    models = ' and '.join(sorted(name for name, owner in owners.items() if owner == MODELS))
    of = f'of {method}' if method else 'of another method'
    raise CheckpointError(
        f'{reader.folder}: a checkpoint {of} (it holds {models}), and this run is {own} (it trains '
        f'{" and ".join(sorted(trainer.models()))}). Go on with the method and models that the checkpoint is of, or '
        'start from the model that it trained with --pretrain'
    )


def _opened(folder: Path, process: int, num_processes: int) -> tuple[CheckpointReader | None, str | None]:
    """Returns the reader, or what is wrong with this process's share of the files."""
    try:
        reader = CheckpointReader(folder, verify=False)
        reader.verify(process, num_processes)
    except (CheckpointError, OSError) as error:
        return None, str(error)
    return reader, None


def set_later_aside(trainer: TrainerView) -> None:
    """Renames checkpoints of phases after that of the resume, which `--resume auto` would take. Call it on rank 0."""
    root = trainer.checkpoint_dir
    for path in list_checkpoints(root) if root is not None else ():
        if (step_of(path) or 0) > trainer.phase:
            aside = previous_of(path)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def _whole_before(folder: Path) -> Path | None:
    """Returns the newest undamaged checkpoint of an earlier step next to `folder`, or None."""
    step = step_of(folder)
    if step is None:
        return None
    earlier = [path for path in list_checkpoints(folder.parent) if (step_of(path) or 0) < step]
    return next((path for path in reversed(earlier) if _opened(path, 0, 1)[1] is None), None)


def generator_states() -> dict[str, torch.Tensor]:
    """Returns the states of this process's global generators: torch's as its bytes, the others as JSON in bytes."""
    states = {'torch': torch.get_rng_state(), 'python': _bytes(random.getstate())}
    if torch.cuda.is_available():
        states['cuda'] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get('numpy')) is not None:
        states['numpy'] = _bytes(numpy.random.get_state(legacy=False))
    return states


def set_generator_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restores states from `generator_states`; generators without a state are not changed."""
    if 'torch' in states:
        torch.set_rng_state(states['torch'])
    if 'cuda' in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states['cuda'])
    if 'python' in states:
        version, numbers, gauss = json.loads(bytes(states['python'].tolist()))
        random.setstate((version, tuple(numbers), gauss))
    if 'numpy' in states:
        import numpy

        numpy.random.set_state(json.loads(bytes(states['numpy'].tolist())))


def _rng_pieces(rank: int) -> Iterable[Piece]:
    for kind, state in generator_states().items():
        yield Piece(f'{rank}/{kind}', (len(state),), 0, len(state), state)


def _bytes(state: Any) -> torch.Tensor:
    """Encodes as JSON, which keeps integers of any size and every bit of a float; arrays become lists."""
    return torch.tensor(list(json.dumps(state, default=lambda array: array.tolist()).encode()), dtype=torch.uint8)


def _restore_rng(reader: CheckpointReader, rank: int) -> None:
    stored = {name.rpartition('/')[2] for name in reader.names() if name.startswith(f'rng/{rank}/')}

    def read(kind: str) -> torch.Tensor:
        name = f'rng/{rank}/{kind}'
        return reader.read(name, 0, reader.shape(name)[0]).clone()

    set_generator_states({kind: read(kind) for kind in stored})


def as_json(value: Any) -> Any:
    """Returns the value as JSON would return it: tuples become lists."""
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    return value
