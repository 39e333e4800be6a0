"""Metrics and sample texts in TensorBoard. Needs the optional package `tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatgpt.trainer.callbacks.base import Callback, TrainerView, check_interval, need_package
from chatgpt.trainer.callbacks.samples import format_table, rows_of


class TensorBoard(Callback):
    """Writes every metric of every learning phase as a scalar, and a table of samples as text.

    Args:
        log_dir: folder of the event files; None means `run_dir/tensorboard`.
        samples_every: learning phases between tables of samples.
        num_rows: rows of a table; 0 writes none.

    Raises:
        ImportError: the package is missing; names the command that installs it.
    """

    def __init__(self, log_dir: str | Path | None = None, *, samples_every: int = 10, num_rows: int = 4) -> None:
        need_package('tensorboard', 'TensorBoard()')
        self.log_dir = Path(log_dir) if log_dir is not None else None
        self.samples_every = check_interval('samples_every', samples_every)
        self.num_rows = num_rows
        self._writer: Any = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        if self.log_dir is None and trainer.run_dir is None:
            raise ValueError('TensorBoard() has nowhere to write: give it log_dir, or the trainer a run_dir')
        self._open(trainer)

    def _open(self, trainer: TrainerView) -> None:
        self._close()
        folder = (
            self.log_dir if self.log_dir is not None else trainer.run_dir / 'tensorboard' if trainer.run_dir else None
        )
        if folder is None or not trainer.strategy.is_rank_0:
            return
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an interrupted run wrote beyond the checkpoint that this one took up.
        self._writer = SummaryWriter(str(folder), purge_step=trainer.phase + 1 if trainer.phase else None)

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        if self._writer is None:
            return
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        if self.num_rows and trainer.last_experiences and (step == 1 or step % self.samples_every == 0):
            rows = rows_of(trainer.last_experiences, self.num_rows, trainer.tokenizer)
            table = format_table(rows, ('score', 'kl', 'prompt', 'response'), width=2000)
            indented = '\n'.join(f'    {line}' for line in table.splitlines())  # Markdown: as it is
            self._writer.add_text('samples', indented, step)
        self._writer.flush()

    def on_fit_end(self, trainer: TrainerView) -> None:
        self._close()

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
