"""Checks of the folders of a run and of its trained model, before any weight is loaded: earlier contents, permissions,
free space.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from chatgpt.launch.config_values import read_file
from chatgpt.launch.relaunch import is_restart
from chatgpt.launch.runs import Run
from chatgpt.monitor.publish import check_push
from chatgpt.monitor.run_folder.record import RunRecord
from chatgpt.strategies.checkpoint import claim_folder, latest

MODEL_FILES = ('config.json', 'adapter_config.json', '*.safetensors', 'pytorch_model*.bin')
UPLOADED = ('README.md', 'LICENSE', 'LICENSE.md', 'LICENSE.txt', '.gitattributes')
"""files that may be in a model's folder before the model is written, and are uploaded with it"""
MIB = 2**20


def final_folder(run: Run, name: str) -> Path:
    """Returns the folder of the trained model `name`: actor, reward_model or critic. A critic beside an actor is in the
    folder of the run, or without one in that of the actor, with '-critic' behind its name."""
    beside = name == 'critic' and run.trained != 'critic'
    if beside and not run.save_path:
        return Path(f'{run.model_path}-critic')
    return Path(run.save_path, name) if beside or not run.model_path else Path(run.model_path)


def check_resume(args: Run) -> None:
    """Sets `args.resume` to 'auto' if the launcher has restarted the run.

    Raises:
        ValueError: if a run that does not resume would write into a folder with checkpoints or a trained model.
    """
    if args.resume and args.resume != 'auto' and not Path(args.resume).is_dir():
        raise ValueError(f"--resume {args.resume}: there is no such folder; give a checkpoint's folder, or auto")
    found = latest(Path(args.save_path, 'checkpoints'))
    if is_restart(args.save_path) and (found is not None or not args.resume):
        args.resume = 'auto'
    if not args.resume and found is not None and _has_ended(args):
        raise ValueError(
            f'{args.save_path} holds a complete run: give the model in it as --pretrain with another --save_path, or '
            'go on with --resume auto and a setting that makes the run longer'
        )
    if not args.resume and found is not None:
        raise ValueError(
            f'{args.save_path} holds checkpoints of an earlier run, up to {found.name}: go on with --resume auto, or '
            'choose another --save_path'
        )
    check_not_replaced(args, resumes=bool(args.resume) and (found is not None or is_restart(args.save_path)))


def _has_ended(run: Run) -> bool:
    """Returns True if the run in the folder has ended and its model was written."""
    try:
        record = RunRecord.read(run.save_path)
    except ValueError:
        return False
    place = final_folder(run, run.trained)
    written = any(True for pattern in MODEL_FILES for _ in place.glob(pattern))
    return record is not None and record.status == 'ended' and written


def check_not_replaced(run: Run, *, resumes: bool) -> None:
    """Raises ValueError if the trained model would replace an existing one. A run that resumes may replace its own."""
    own = resumes and recorded_destination(run) == run.model_path
    for name in ('actor', 'reward_model', 'critic'):
        place = final_folder(run, name)
        for flag in ('pretrain', 'reward_model', 'critic_from', 'tokenizer'):
            source = getattr(run, flag, None)
            if source and Path(source).is_dir() and Path(source).resolve() == place.resolve():
                raise ValueError(
                    f'the trained model would replace --{flag} {source}: choose another --save_path or --model_path'
                )
        found = next((path.name for pattern in MODEL_FILES for path in place.glob(pattern)), None)
        if found is None or own:
            continue
        if run.model_path and name != 'critic':
            raise ValueError(
                f'--model_path {place} holds a model already ({found}): choose another folder, or remove it'
            )
        raise ValueError(
            f'{run.save_path} holds the trained model of an earlier run, {place.name}/, and no checkpoints to go on '
            f'from: choose another --save_path, or remove {place}'
        )


def recorded_destination(run: Run) -> str | None:
    """Returns the model_path in the config.yaml of the run's folder."""
    record = Path(run.save_path, 'config.yaml')
    return (read_file(record) or {}).get('model_path') if record.is_file() else None


def check_destination(run: Run, config: Any, name: str) -> None:
    """Checks on rank 0, which writes them, the folders of the run and of its trained model, and the permission to
    upload the model if push_to_hub is set.

    Raises:
        ValueError: if a folder cannot be created or written, has too little free space, or may not be uploaded.
        CheckpointError: if another run holds the folder; names its process and host.
    """
    if os.environ.get('RANK', '0') != '0':
        return
    folder, place = Path(run.save_path), final_folder(run, name)
    with _removed_if_new(folder, f'cannot write to {folder}'):
        claim_folder(folder).close()
    try_model_folder(place, config, run)
    if run.push_to_hub is not None:
        own = bool(run.resume) and recorded_destination(run) == run.model_path
        check_upload(place, run.push_to_hub, own=own)


def check_upload(folder: Path, repo_id: str, *, own: bool = False) -> None:
    """Raises ValueError for a model's folder with other files, which would be uploaded too, and see `check_push`.
    `own`: the folder was written by an earlier start of this run."""
    others = [] if own or not folder.is_dir() else sorted(p.name for p in folder.iterdir() if p.name not in UPLOADED)
    if others:
        raise ValueError(
            f'push_to_hub={repo_id!r} uploads the folder of the trained model as a whole, and {folder} holds '
            f'{others[0]}{f" and {len(others) - 1} more" if others[1:] else ""}: give a new folder'
        )
    check_push(repo_id)


def try_model_folder(place: Path, config: Any, run: Run) -> None:
    """Checks on rank 0 that a model of `config` can be written to a folder. Leaves nothing behind.

    Raises:
        ValueError: if the folder cannot be created or written, or has too little free space for the model.
    """
    if os.environ.get('RANK', '0') != '0':
        return
    if place.is_file():
        raise ValueError(f'cannot write the trained model to {place}: it is a file')
    with _removed_if_new(place, f'cannot write the trained model to {place}'):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b'\0')  # an empty file can be written even if a quota is used up
            file.flush()
    needed = _parameters_of(config, run.trust_remote_code) * (2 if run.save_dtype in ('bf16', 'fp16') else 4)
    free = shutil.disk_usage(next(p for p in (place.absolute(), *place.absolute().parents) if p.is_dir())).free
    if free < needed:
        raise ValueError(
            f'the trained model takes {needed / MIB:.1f} MiB, and {place} has {free / MIB:.1f} MiB free; free some, or '
            'choose another --save_path or --model_path'
        )


@contextmanager
def _removed_if_new(folder: Path, problem: str) -> Iterator[None]:
    """Removes the folder and its files at the end if it did not exist before; turns an OSError into a ValueError."""
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        yield
        for file in folder.iterdir() if folder in new else ():
            file.unlink()
    except OSError as error:
        raise ValueError(f'{problem}: {error.strerror}') from None
    finally:
        for made in new:
            with suppress(OSError):  # it was not created, or another process has written to it
                made.rmdir()


def _parameters_of(config: Any, trust_remote_code: bool) -> int:
    """Returns the number of all weights; 0 if the model cannot be built on the meta device."""
    import torch
    import transformers

    from chatgpt.nn.layouts import layout_of

    try:
        with torch.device('meta'):
            make = getattr(transformers, layout_of(config).language_model)
            model = make.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:
        return 0  # for example an encoder; loading it reports any error
    return sum(p.numel() for p in model.parameters())
