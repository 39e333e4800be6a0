"""An exponential moving average of the actor's weights, in fp32 and sharded over the ranks.

    average ← decay · average + (1 − decay) · weights        after every optimizer step

Sources: Polyak & Juditsky 1992; DeepSpeed-Chat's actor EMA. Each rank averages the pieces that it would write into a
checkpoint, so any strategy and world size works, and a resume may change them.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from chatgpt.nn.loading import trained_dtype
from chatgpt.strategies.checkpoint import Piece, TensorReader, write_checkpoint
from chatgpt.trainer.callbacks.base import Callback, TrainerView


class EMA(Callback):
    """Averages a model's weights and, at the end, writes them as a Hugging Face folder: that of a reward model before
    its calibration.

    Training checkpoints hold the average as `<model>_ema/`. After a resume from one without it, the average starts from
    the weights, with a warning.

    Args:
        decay: weight of the old average, in [0, 1); DeepSpeed-Chat uses 0.992.
        model: its name in `trainer.models()`; None takes 'actor', else the only one.
        path: folder of the final average; None means `run_dir/<model>_ema`, or no folder without a run_dir.
        dtype: of the weights in that folder, as in `Trainer.save_pretrained`.

    Raises:
        ValueError: a decay out of range, or a model that the trainer does not have.
    """

    def __init__(
        self,
        decay: float = 0.992,
        *,
        model: str | None = None,
        path: str | Path | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f'EMA: decay={decay} must lie in [0, 1)')
        self.decay, self.model, self.path, self.dtype = decay, model, path, dtype
        self._pieces: dict[tuple[str, int], Piece] = {}
        """by name and start: this rank's part of the average, on the CPU; fp32 for floating-point weights"""
        self._num_updates: int | None = None

    def _name(self, trainer: TrainerView) -> str:
        models = trainer.models()
        name = self.model or ('actor' if 'actor' in models else next(iter(models)))
        if name not in models:
            raise ValueError(f'EMA: the trainer has no model {name!r}; it has {", ".join(models)}')
        return name

    def _own(self, trainer: TrainerView) -> Iterator[Piece]:
        return iter(trainer.strategy.model_pieces(trainer.models()[self._name(trainer)]))

    def on_fit_start(self, trainer: TrainerView) -> None:
        if self._name(trainer) == 'critic' and getattr(trainer.config, 'critic_apart', False):
            raise ValueError('EMA: a critic that learns in passes of its own cannot be averaged; leave model out')
        if not self._pieces:
            self._pieces = {(p.name, p.start): _copied(p) for p in self._own(trainer)}
        self._num_updates = trainer.num_updates

    def on_learn_batch_start(self, trainer: TrainerView) -> None:
        if self._num_updates is None:  # `step` of a trainer, outside of `fit`
            self.on_fit_start(trainer)

    @torch.no_grad()
    def on_learn_batch_end(self, trainer: TrainerView, metrics: dict[str, float]) -> None:
        if trainer.num_updates == self._num_updates:  # the step was skipped
            return
        self._num_updates = trainer.num_updates
        for piece in self._own(trainer):
            average = self._pieces[piece.name, piece.start].data
            current = piece.data.detach().to(average.device, average.dtype)
            if average.is_floating_point():
                average.lerp_(current, 1.0 - self.decay)
            else:
                average.copy_(current)

    def on_fit_end(self, trainer: TrainerView) -> None:
        path = self.path or (trainer.run_dir / f'{self._name(trainer)}_ema' if trainer.run_dir is not None else None)
        if path is not None:
            self.save_pretrained(trainer, path)

    # ------------------------------------------------------------------ in checkpoints

    def checkpoint_pieces(self, trainer: TrainerView) -> dict[str, list[Piece]]:
        return {f'{self._name(trainer)}_ema': list(self._pieces.values())} if self._pieces else {}

    def load_checkpoint_pieces(self, trainer: TrainerView, name: str, reader: TensorReader) -> bool:
        if name != f'{self._name(trainer)}_ema':
            return False
        self._pieces = {}
        for piece in self._own(trainer):
            stored = reader.read(piece.name, piece.start, piece.stop)
            self._pieces[piece.name, piece.start] = _copied(piece._replace(data=stored))
        return True

    def on_resume(self, trainer: TrainerView, path: Path) -> None:
        if not self._pieces and trainer.strategy.is_rank_0:
            warnings.warn(
                f'{path} has no average of the {self._name(trainer)}: EMA starts from its weights', stacklevel=2
            )

    # ------------------------------------------------------------------ as a model

    @contextmanager
    def averaged(self, trainer: TrainerView, scratch: str | Path) -> Iterator[None]:
        """Context in which the model has the average as its weights; afterwards the exact weights return. A collective.

        `scratch` is a folder shared by all ranks that holds the weights meanwhile.
        """
        strategy, model = trainer.strategy, trainer.models()[self._name(trainer)]
        scratch = Path(scratch)
        try:
            for part, pieces in (('weights', list(self._own(trainer))), ('average', list(self._pieces.values()))):
                write_checkpoint(
                    scratch / part,
                    {'': pieces},
                    meta={'kind': 'model'},
                    rank=strategy.processes.rank,
                    all_gather_object=strategy.processes.all_gather_object,
                )
            try:
                strategy.load_model(model, scratch / 'average')
                yield
            finally:
                strategy.load_model(model, scratch / 'weights')
                strategy.barrier()  # another rank may still be reading
        finally:
            if strategy.is_rank_0:
                shutil.rmtree(scratch, ignore_errors=True)

    def save_pretrained(self, trainer: TrainerView, path: str | Path) -> None:
        """Writes the average as a Hugging Face folder. Call it on every rank."""
        path, strategy = Path(path), trainer.strategy
        model = trainer.models()[self._name(trainer)]
        dtype = self.dtype or trained_dtype(strategy.unwrap(model))  # a full model may have wider weights
        with (
            self.averaged(trainer, path.with_name(f'.{path.name}.tmp')),
            strategy.full_model(model, dtype=torch.float32, on_disk=path.parent) as full,
        ):
            strategy.run_on_rank0(
                lambda: cast(Any, full).save_pretrained(path, tokenizer=trainer.tokenizer, dtype=dtype)
            )


def _copied(piece: Piece) -> Piece:
    data: Any = piece.data.detach()
    return piece._replace(data=data.to('cpu', torch.float32 if data.is_floating_point() else data.dtype, copy=True))
