"""Where a run leaves its checkpoints and its trained model, tried before any weight is loaded: what is there, rights,
and room.

Left out: writing it (`recipes.finish`).
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
from chatgpt.strategies.checkpoint import claim_folder, latest

MODEL_FILES = ('config.json', 'adapter_config.json', '*.safetensors', 'pytorch_model*.bin')
UPLOADED = ('README.md', 'LICENSE', 'LICENSE.md', 'LICENSE.txt', '.gitattributes')
"""what may lie in a model's folder before it is written, and is uploaded with it"""
MIB = 2**20


def final_folder(run: Run, name: str) -> Path:
    """The folder of the trained model; `name` says what it is: actor or reward_model."""
    return Path(run.model_path or Path(run.save_path, name))


def check_resume(args: Run) -> None:
    """A run goes on when that was asked for, or its launcher has restarted it.

    It never mixes its checkpoints with an earlier one's, nor replaces that one's trained model.
    """
    if args.resume and args.resume != 'auto' and not Path(args.resume).is_dir():
        raise ValueError(f"--resume {args.resume}: there is no such folder; give a checkpoint's folder, or auto")
    found = latest(Path(args.save_path, 'checkpoints'))
    if is_restart(args.save_path) and (found is not None or not args.resume):
        args.resume = 'auto'
    if not args.resume and found is not None:
        raise ValueError(
            f'{args.save_path} holds checkpoints of an earlier run, up to {found.name}: go on with --resume auto, or '
            'choose another --save_path'
        )
    check_not_replaced(args, goes_on=bool(args.resume) and (found is not None or is_restart(args.save_path)))


def check_not_replaced(run: Run, *, goes_on: bool) -> None:
    """Raises ValueError where the trained model would replace one that is there. A run that goes on may replace its
    own."""
    own = goes_on and recorded_destination(run) == run.model_path
    for name in ('actor', 'reward_model'):
        place = final_folder(run, name)
        for flag in ('pretrain', 'reward_model', 'tokenizer'):
            source = getattr(run, flag, None)
            if source and Path(source).is_dir() and Path(source).resolve() == place.resolve():
                raise ValueError(
                    f'the trained model would replace --{flag} {source}: choose another --save_path or --model_path'
                )
        found = next((path.name for pattern in MODEL_FILES for path in place.glob(pattern)), None)
        if found is None or own:
            continue
        if run.model_path:
            raise ValueError(
                f'--model_path {place} holds a model already ({found}): choose another folder, or remove it'
            )
        raise ValueError(
            f'{run.save_path} holds the trained model of an earlier run, {place.name}/, and no checkpoints to go on '
            f'from: choose another --save_path, or remove {place}'
        )


def recorded_destination(run: Run) -> str | None:
    """The model_path that this run's folder says it was started with."""
    record = Path(run.save_path, 'config.yaml')
    return (read_file(record) or {}).get('model_path') if record.is_file() else None


def check_destination(run: Run, config: Any, name: str) -> None:
    """Try the run's folder and the trained model's, and whether that may be uploaded where this is asked for. Only rank
    0 looks, which is the one that writes.

    Raises:
        ValueError: one cannot be made or written, or has no room for the whole model; or it may not be uploaded.
            CheckpointError: another run holds the folder, with its process and host.
    """
    if os.environ.get('RANK', '0') != '0':
        return
    folder, place = Path(run.save_path), final_folder(run, name)
    with _leaving_nothing(folder, f'cannot write to {folder}'):
        claim_folder(folder).release()
    try_model_folder(place, config, trust_remote_code=run.trust_remote_code)
    if run.push_to_hub is not None:
        own = bool(run.resume) and recorded_destination(run) == run.model_path
        check_upload(place, run.push_to_hub, own=own)


def check_upload(folder: Path, repo_id: str, *, own: bool = False) -> None:
    """Raises ValueError for a model's folder with files that nobody asked to have uploaded, and see `check_push`.
    `own`: the folder is this run's, from an earlier start."""
    others = [] if own or not folder.is_dir() else sorted(p.name for p in folder.iterdir() if p.name not in UPLOADED)
    if others:
        raise ValueError(
            f'push_to_hub={repo_id!r} uploads the folder of the trained model as a whole, and {folder} holds '
            f'{others[0]}{f" and {len(others) - 1} more" if others[1:] else ""}: give a new folder'
        )
    check_push(repo_id)


def try_model_folder(place: Path, config: Any, *, trust_remote_code: bool = False) -> None:
    """Find out on rank 0 whether a model of `config` can be written to a folder. Nothing new is left there.

    Raises:
        ValueError: it cannot be made or written, or has no room for the whole model.
    """
    if os.environ.get('RANK', '0') != '0':
        return
    if place.is_file():
        raise ValueError(f'cannot write the trained model to {place}: it is a file')
    with _leaving_nothing(place, f'cannot write the trained model to {place}'):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b'\0')  # an empty file fits where a quota is used up
            file.flush()
    needed = _bytes_of(config, trust_remote_code)
    free = shutil.disk_usage(next(p for p in (place.absolute(), *place.absolute().parents) if p.is_dir())).free
    if free < needed:
        raise ValueError(
            f'the trained model takes {needed / MIB:.1f} MiB, and {place} has {free / MIB:.1f} MiB free; free some, or '
            'choose another --save_path or --model_path'
        )


@contextmanager
def _leaving_nothing(folder: Path, problem: str) -> Iterator[None]:
    """What is made inside is removed where the folder was not there. An error of the system is a ValueError."""
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        yield
        for file in folder.iterdir() if folder in new else ():
            file.unlink()
    except OSError as error:
        raise ValueError(f'{problem}: {error.strerror}') from None
    finally:
        for made in new:
            with suppress(OSError):  # it was not made, or somebody has put something there
                made.rmdir()


def _bytes_of(config: Any, trust_remote_code: bool) -> int:
    """Of all weights in fp32; 0 where the model cannot be built without them."""
    import torch
    import transformers

    from chatgpt.nn.layouts import layout_of

    try:
        with torch.device('meta'):
            make = getattr(transformers, layout_of(config).language_model)
            model = make.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:
        return 0  # not buildable as a causal LM, for example an encoder; loading it will report any error
    return sum(4 * p.numel() for p in model.parameters())
