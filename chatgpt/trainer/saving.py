"""Saves a prepared model as a Hugging Face folder with a card, under any strategy; keeps the weights when that fails;
uploads the folder."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from chatgpt.monitor.publish import NUM_SAMPLES, ModelFacts, check_push, push_folder, write_card
from chatgpt.monitor.run_folder import RunFolder
from chatgpt.monitor.run_folder.reading import is_run
from chatgpt.nn.critic import Critic
from chatgpt.nn.loading import trained_dtype
from chatgpt.nn.lora import lora_layers
from chatgpt.nn.peft_format import export_peft
from chatgpt.nn.reward_model import RewardModel
from chatgpt.strategies.base import Strategy
from chatgpt.trainer.callbacks import Evaluator, rows_of
from chatgpt.trainer.callbacks.base import TrainerView
from chatgpt.trainer.callbacks.run_record import describe, model_facts


class SaveError(RuntimeError):
    """A trained model could not be written to its folder; the message names where its weights are instead."""


def save_pretrained(
    strategy: Strategy, model: nn.Module, path: str | Path, *, tokenizer: Any = None, dtype: torch.dtype | None = None
) -> None:
    """Writes the full weights (adapters merged) as a folder that `transformers` loads, with a model card. Call it on
    every rank.

    Args:
        dtype: of the weights in the files; None: `chatgpt.nn.loading.trained_dtype`.
    """
    _write_weights(strategy, model, path, tokenizer, dtype)
    strategy.run_on_rank0(lambda: _write_card(path, strategy.unwrap(model), _facts_of(strategy.unwrap(model))))


def save_adapter(model: nn.Module, path: str | Path, *, base_model: str | None = None) -> None:
    """Writes only the adapters of a model, in PEFT's format, with a card.

    Args:
        model: whole, not sharded.
        base_model: name or folder of the model that they belong to; None: where the model was loaded from.
    """
    export_peft(model, path, base_model=base_model)
    rank = next(iter(lora_layers(model).values())).r
    facts = _facts_of(model)
    _write_card(path, model, replace(facts, source=base_model or facts.source, rank=int(cast(Any, rank))))


def save_trained(
    trainer: TrainerView,
    path: str | Path,
    *,
    model: str | None = None,
    card_samples: int = NUM_SAMPLES,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a trainer's model with its tokenizer and a card. Call it on every rank.

    Args:
        model: name of the model, such as 'critic'; None: the first.
        card_samples: number of generated texts that the card shows.
        dtype: as in `save_pretrained`.

    Raises:
        SaveError: the model could not be written. Its weights are then in the last checkpoint of the run or in
            another folder, which the message names.
    """
    trained = trained_model(trainer, model)
    new = trainer.strategy.run_on_rank0(lambda: not Path(path).exists())  # the same branch on every rank
    try:
        _write_weights(trainer.strategy, trained, path, trainer.tokenizer, dtype)
    except Exception as error:
        reason = ' '.join(str(error).split()) or type(error).__name__
        if new:  # a part of a folder would pass for a model
            trainer.strategy.run_on_rank0(lambda: shutil.rmtree(path, ignore_errors=True))
        where = _rescued(trainer, trained, Path(path), dtype)
        raise SaveError(f'{path}: the trained model could not be written ({reason}); {where}') from error
    write_card_of(trainer, path, model=model, card_samples=card_samples)


def trained_model(trainer: TrainerView, name: str | None) -> nn.Module:
    """Returns a trained model, as prepared; None: the first. Raises ValueError for a name that the trainer lacks."""
    models = trainer.models()
    if name is not None and name not in models:
        raise ValueError(f'this trainer has no model {name!r}; it has {", ".join(models)}')
    return models[name] if name is not None else next(iter(models.values()))


def push_trained(
    strategy: Strategy, write: Callable[[Path], None], repo_id: str, *, near: Path | None = None, **options: Any
) -> str:
    """Writes a model into a new folder, uploads it and returns its address. Call it on every rank.

    Args:
        write: writes the model's files, on every rank.
        near: where the folder is made; None: the system's temporary folder. It is kept when the upload fails.
        options: arguments of `chatgpt.monitor.publish.push_folder`.

    Raises:
        ValueError: an upload is not permitted; nothing is written.
        PushError: the upload failed; names the folder of the model and the command that uploads it later.
    """

    def make() -> tuple[str, Path]:
        full = check_push(repo_id, token=options.get('token'))
        return full, Path(tempfile.mkdtemp(prefix='upload-', dir=near)) / full.rpartition('/')[2]

    full, folder = strategy.run_on_rank0(make)
    write(folder)
    address: str = strategy.run_on_rank0(lambda: push_folder(folder, full, **options))
    strategy.run_on_rank0(lambda: shutil.rmtree(folder.parent))
    return address


def _write_weights(
    strategy: Strategy, model: nn.Module, path: str | Path, tokenizer: Any, dtype: torch.dtype | None
) -> None:
    dtype = dtype or trained_dtype(strategy.unwrap(model))
    more = {} if dtype is None else {'dtype': dtype}
    with strategy.full_model(model, dtype=torch.float32, on_disk=Path(path).parent) as full:
        strategy.run_on_rank0(lambda: cast(Any, full).save_pretrained(path, tokenizer=tokenizer, **more))


# ---------------------------------------------------------------------- the card


def write_card_of(
    trainer: TrainerView,
    path: str | Path,
    *,
    model: str | None = None,
    card_samples: int = NUM_SAMPLES,
    **more: Any,
) -> None:
    """Writes the card of a trainer's model into its folder; `model` is its name, None the first. Call it on every rank.
    `more`: fields of `ModelFacts`."""

    def write() -> None:
        bare = trainer.strategy.unwrap(trained_model(trainer, model))
        _write_card(path, bare, replace(_facts_of_run(trainer, bare), **more), card_samples)

    trainer.strategy.run_on_rank0(write)


def _write_card(path: str | Path, bare: nn.Module, facts: ModelFacts, num_samples: int = NUM_SAMPLES) -> None:
    """Writes the card. A failure is only a warning, since the model itself is saved."""
    role = 'reward_model' if isinstance(bare, RewardModel) else 'critic' if isinstance(bare, Critic) else 'actor'
    try:
        write_card(path, facts, role=cast(Any, role), num_samples=num_samples)
    except Exception as error:
        warnings.warn(f'{path}: the model is saved without a card ({type(error).__name__}: {error})', stacklevel=2)


def _facts_of(bare: nn.Module) -> ModelFacts:
    facts = model_facts(bare)
    return ModelFacts(source=facts['source'], parameters=facts['parameters'], family=facts['kind'])


def _facts_of_run(trainer: TrainerView, bare: nn.Module) -> ModelFacts:
    """Reads the facts from the run folder, or from the trainer if there is none or it has not trained yet."""
    facts = _facts_of(bare)
    if trainer.run_dir is not None and trainer.phase and is_run(trainer.run_dir):
        known = {name: getattr(facts, name) for name in ('source', 'parameters', 'family')}
        facts = ModelFacts.of(RunFolder(trainer.run_dir), **known)
        return facts if facts.record is not None else replace(facts, record=describe(trainer))
    rows = rows_of(trainer.last_experiences, NUM_SAMPLES, trainer.tokenizer)
    evaluations = [c for c in trainer.callbacks if isinstance(c, Evaluator) and c.last_step is not None]
    return replace(
        facts,
        record=describe(trainer) if trainer.phase else None,
        eval=[{'step': c.last_step, **c.last} for c in evaluations],
        samples=[{'step': trainer.phase, **row} for row in rows],
    )


# ---------------------------------------------------------------------- when it fails


def _rescued(trainer: TrainerView, model: nn.Module, path: Path, dtype: torch.dtype | None) -> str:
    """Returns a message that names where the weights are, after writing them elsewhere if no checkpoint holds them."""
    strategy = trainer.strategy
    standing = strategy.run_on_rank0(trainer.standing_checkpoint)
    if standing is not None:
        return (
            f'its weights are in the checkpoint {standing}: going on from there (--resume {standing}) writes it '
            'without further training'
        )
    problems = []
    for make in (lambda: trainer.run_dir, lambda: Path(tempfile.mkdtemp(prefix='chatgpt-'))):
        other = None
        try:
            folder = strategy.run_on_rank0(make)
            if folder is None or strategy.run_on_rank0((folder / f'rescued-{path.name}').exists):
                continue
            other = folder / f'rescued-{path.name}'
            _write_weights(strategy, model, other, trainer.tokenizer, dtype)
            return f'it was written to {other} instead'
        except Exception as error:
            if other is not None:
                strategy.run_on_rank0(partial(shutil.rmtree, other, ignore_errors=True))
            problems.append(' '.join(str(error).split()))
    return f'and nowhere else: {"; ".join(problems)}. The weights are lost with this process'
