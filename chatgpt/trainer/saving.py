"""Writing a prepared model as a Hugging Face folder, whatever strategy holds its weights; and what is done when that
fails.

Left out: training checkpoints (`checkpointing`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from chatgpt.trainer.callbacks.base import TrainerView
from chatgpt.trainer.strategies.base import Strategy


class SaveError(RuntimeError):
    """A trained model could not be written where it should be; says where its weights are instead."""


def save_pretrained(strategy: Strategy, model: nn.Module, path: str | Path, *, tokenizer: Any = None) -> None:
    """Write the full fp32 weights (adapters folded in) as a folder that `transformers` loads. Call it on every rank."""
    with strategy.full_model(model, dtype=torch.float32, on_disk=Path(path).parent) as full:
        strategy.run_on_rank0(lambda: cast(Any, full).save_pretrained(path, tokenizer=tokenizer))


def save_trained(trainer: TrainerView, path: str | Path) -> None:
    """Write a trainer's first model with its tokenizer. Call it on every rank.

    Raises:
        SaveError: it could not be written. Its weights are then in the checkpoint of the run's end, or in another
            folder; says which.
    """
    try:
        _write(trainer, path)
    except Exception as error:
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise SaveError(
            f'{path}: the trained model could not be written ({reason}); {_rescued(trainer, Path(path))}'
        ) from error


def _write(trainer: TrainerView, path: str | Path) -> None:
    save_pretrained(trainer.strategy, next(iter(trainer.models().values())), path, tokenizer=trainer.tokenizer)


def _rescued(trainer: TrainerView, path: Path) -> str:
    """Where the weights are; they are written elsewhere first if no checkpoint holds them."""
    strategy = trainer.strategy
    standing = strategy.run_on_rank0(trainer.standing_checkpoint)
    if standing is not None:
        return (
            f'its weights are in the checkpoint {standing}: going on from there (--resume {standing}) writes it '
            'without further training'
        )
    problems = []
    for make in (lambda: trainer.run_dir, lambda: Path(tempfile.mkdtemp(prefix='chatgpt-'))):
        try:
            folder = strategy.run_on_rank0(make)
            if folder is None or (other := folder / f'rescued-{path.name}').exists():
                continue
            _write(trainer, other)
            return f'it was written to {other} instead'
        except Exception as error:
            problems.append(' '.join(str(error).split()))
    return f'and nowhere else: {"; ".join(problems)}. The weights are lost with this process'
