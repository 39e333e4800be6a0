"""Callbacks: hooks that a trainer calls as it goes, and state that travels in checkpoints.

Every hook runs on every rank, in step, so a callback may do collective work (save, evaluate); what writes or prints
does so on rank 0 only.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

from chatgpt.names import hint

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from chatgpt.strategies.base import Strategy
    from chatgpt.strategies.checkpoint import Piece, TensorReader
    from chatgpt.types import Batch, Experience

Mode = Literal['max', 'min']


class TrainerView(Protocol):
    """What callbacks, checkpoints and saved models see of a trainer. `chatgpt.trainer.Trainer` is one."""

    @property
    def strategy(self) -> Strategy: ...
    @property
    def config(self) -> Any: ...
    @property
    def callbacks(self) -> CallbackList: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def run_dir(self) -> Path | None: ...
    @property
    def checkpoint_dir(self) -> Path | None: ...
    @property
    def phase(self) -> int:
        """Learning phases done."""

    @property
    def num_phases(self) -> int | None:
        """Number of the last phase of this `fit`, where it is known."""

    @property
    def num_updates(self) -> int:
        """Optimizer steps done."""

    @property
    def total_updates(self) -> int | None: ...
    @property
    def last_experiences(self) -> list[Experience]: ...
    @property
    def resumed_from(self) -> Path | None: ...
    @property
    def scorer(self) -> Any:
        """What scores responses, a `Scorer`; None where nothing does."""

    @property
    def saved_fingerprint(self) -> dict[str, Any] | None: ...
    def models(self) -> Mapping[str, nn.Module]: ...
    def optimizers(self) -> Mapping[str, Optimizer]: ...
    def fingerprint(self) -> dict[str, Any]: ...
    def facts(self) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def checkpoint_state(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def save_checkpoint(self, path: str | Path | None = None, *, score: float | None = None) -> Path: ...
    def standing_checkpoint(self) -> Path | None: ...
    def put_back(self) -> bool: ...
    def request_stop(self) -> None: ...


class Callback:
    """Subclass it and override the hooks you need; all of them do nothing by default.

    A run is: fit start, then phases, then fit end. A phase of an online trainer collects (make-experience hooks, with
    the episode hooks of the timesteps inside) and learns (epoch and batch hooks); others only learn. `on_phase_end`
    closes it.

    `order` sorts the callbacks of a run, low first; of equal ones the first given comes first. Below 0: adds metrics
    that others log. 0: logs. Above 0: saves what the others have become.
    """

    order: ClassVar[int] = 0

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Before the first phase, after a resume."""

    def on_fit_end(self, trainer: TrainerView) -> None:
        """After the last phase, also when the run was asked to stop; not after an exception."""

    def on_episode_start(self, trainer: TrainerView, episode: int) -> None:
        """Before the first timestep of episode number `episode`, counted from 0."""

    def on_episode_end(self, trainer: TrainerView, episode: int) -> None:
        """After the last timestep of that episode."""

    def on_make_experience_start(self, trainer: TrainerView) -> None:
        """Before a phase's first timestep is collected."""

    def on_make_experience_end(self, trainer: TrainerView, experiences: list[Experience]) -> None:
        """After all of them are scored; `experiences` are those of all ranks, ordered by sample index."""

    def on_learn_epoch_start(self, trainer: TrainerView, epoch: int) -> None:
        """Before pass number `epoch` over the data, counted from 0 (in each phase where a trainer collects)."""

    def on_learn_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        """After that pass."""

    def on_learn_batch_start(self, trainer: TrainerView) -> None:
        """Before the first forward of a train batch."""

    def on_policy_output(self, trainer: TrainerView, batch: Batch, output: Any) -> None:
        """After the policy's forward over a micro-batch of experience that is learned, before its loss.

        `output` is a `PolicyOutput` whose tensors still carry gradients: `detach()` what is kept. Under a dummy batch,
        which `batch.sequence_mask` tells, too. Rows of experience are told by the column `index`.
        """

    def on_learn_batch_end(self, trainer: TrainerView, metrics: dict[str, float]) -> None:
        """After its optimizer step; `metrics` are of this train batch, over all ranks, without a phase prefix."""

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        """After learning phase number `step`, counted from 1, with its metrics as docs/metrics.md names them.

        A callback may add metrics to the dict; the callbacks after it see them, and the metrics file holds them.
        """

    def on_log(
        self,
        trainer: TrainerView,
        stats: dict[str, float],
        batch: Mapping[str, SequenceOf[Any]],
        rewards: list[float],
        columns_to_log: list[str],
    ) -> None:
        """The user of a step-wise trainer called `log_stats`: rows of `batch`, by column, with their rewards."""

    def on_checkpoint(self, trainer: TrainerView, path: Path) -> None:
        """After a training checkpoint was written to `path`."""

    def on_resume(self, trainer: TrainerView, path: Path) -> None:
        """After the trainer took up the checkpoint at `path`; its counters are those of the checkpoint."""

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """The run is ending with `error`. Other ranks may be elsewhere: no collective work here."""

    def checkpoint_pieces(self, trainer: TrainerView) -> dict[str, list[Piece]]:
        """Tensors that a resumed run needs: {group: this rank's pieces}, the same groups on every rank. A group may
        have any name."""
        return {}

    def load_checkpoint_pieces(self, trainer: TrainerView, name: str, reader: TensorReader) -> bool:
        """Take up a group that `checkpoint_pieces` gave; False when it is not taken up. Only this callback's own are
        offered."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""


def _each(hook: Callable[..., None]) -> Callable[..., None]:
    """That hook of every callback of a list, in their order."""

    @wraps(hook)
    def call(self: CallbackList, *args: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook.__name__)(*args, **kwargs)

    return call


class CallbackList(Callback):
    """Several callbacks as one, in their order.

    Raises:
        ValueError: something in the list is not a callback; says where and what.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        given = list(callbacks)
        for i, callback in enumerate(given):
            if isinstance(callback, type):
                raise ValueError(
                    f'callbacks[{i}] is the class {callback.__name__}, not an object of it; write '
                    f'{callback.__name__}(...)'
                )
            if not isinstance(callback, Callback):
                raise ValueError(
                    f'callbacks[{i}] is a {type(callback).__name__}; derive it from chatgpt.trainer.callbacks.Callback'
                )
        self.callbacks = sorted(given, key=lambda c: c.order)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self.callbacks)

    def __len__(self) -> int:
        return len(self.callbacks)

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Each callback with a name that is the same in a run and in its resume: class and number among its likes."""
        seen: dict[str, int] = {}
        for callback in self.callbacks:
            kind = type(callback).__name__
            yield f'{kind}.{seen.setdefault(kind, 0)}', callback
            seen[kind] += 1

    def state_dict(self) -> dict[str, Any]:
        return {name: state for name, callback in self._named() if (state := callback.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Callbacks that the checkpoint does not know keep their fresh state; states without a callback are left
        alone."""
        for name, callback in self._named():
            if name in state:
                callback.load_state_dict(state[name])

    def owned_pieces(self, trainer: TrainerView) -> Iterator[tuple[str, str, list[Piece]]]:
        """(owner, group, pieces) of every callback; a checkpoint records the owner, who is given the group back."""
        for owner, callback in self._named():
            for group, pieces in callback.checkpoint_pieces(trainer).items():
                yield owner, group, pieces

    def load_owned_pieces(self, trainer: TrainerView, owner: str, group: str, reader: TensorReader) -> bool:
        """Give a group to its owner; False where it is not there, or does not accept it."""
        return any(
            callback.load_checkpoint_pieces(trainer, group, reader) for name, callback in self._named() if name == owner
        )

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """A callback that fails here must not hide the error that ended the run: its own becomes a warning."""
        for callback in self.callbacks:
            try:
                callback.on_exception(trainer, error)
            except Exception as second:
                warnings.warn(
                    f'{type(callback).__name__}.on_exception failed: {type(second).__name__}: {second}', stacklevel=2
                )


for _name, _hook in list(vars(Callback).items()):
    if _name.startswith('on_') and _name not in vars(CallbackList):
        setattr(CallbackList, _name, _each(_hook))


def say(text: str) -> None:
    """Print a line to stdout without tearing a progress bar; what its encoding lacks is written as an escape."""
    from tqdm import tqdm

    encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
    tqdm.write(text.encode(encoding, 'backslashreplace').decode(encoding))


def need_package(package: str, who: str) -> None:
    """ImportError with the command that installs it, unless the package is there. It is not imported."""
    if find_spec(package) is None:
        raise ImportError(
            f"{who} needs the package {package}: pip install {package}, or from a checkout pip install '.[{package}]'"
        )


def check_interval(name: str, value: int) -> int:
    """`value` when it is a positive whole number, else a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'{name}={value!r} must be a whole number of learning phases, at least 1')
    return value


def check_mode(mode: str) -> None:
    """ValueError unless 'max' or 'min'."""
    if mode not in get_args(Mode):
        raise ValueError(f'mode={mode!r} is not known; choose "max" or "min"')


def metric_value(metrics: Mapping[str, float], name: str) -> float | None:
    """The metric, or None for an `eval/` or `.../val_` one that this phase has not measured.

    Raises:
        ValueError: no phase has a metric of that name; lists the nearest.
    """
    if name in metrics:
        return float(metrics[name])
    if name.startswith('eval/') or '/val_' in name:
        return None
    there = hint(name, metrics) or f'; there are {", ".join(sorted(metrics)[:8])}'
    raise ValueError(f'there is no metric {name!r} in this run{there}; see docs/metrics.md')
