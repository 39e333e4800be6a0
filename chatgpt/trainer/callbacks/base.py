"""Callbacks: hooks of a trainer, with state in checkpoints.

Every hook runs on every rank at the same point, so a callback may run collectives (save, evaluate). Only rank 0 writes
and prints.
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
    """Interface of a trainer for callbacks, checkpoints and saved models; `chatgpt.trainer.Trainer` implements it."""

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
        """Finished learning phases."""

    @property
    def num_phases(self) -> int | None:
        """Number of the last phase of this `fit`, if known."""

    @property
    def num_updates(self) -> int:
        """Finished optimizer steps."""

    @property
    def total_updates(self) -> int | None: ...
    @property
    def last_experiences(self) -> list[Experience]:
        """Those of the last phase, as in `on_make_experience_end`."""

    phase_score: float | None
    """the score of the present phase's checkpoint, for keeping the best; higher is better"""

    @property
    def resumed_from(self) -> Path | None: ...
    @property
    def scorer(self) -> Any:
        """The `Scorer` of responses; None if there is none."""

    @property
    def saved_fingerprint(self) -> dict[str, Any] | None: ...
    @property
    def left_out(self) -> dict[str, dict[str, int]] | None:
        """By model, checksums of the weights that its checkpoints do not hold; None: they hold all."""

    def models(self) -> Mapping[str, nn.Module]: ...
    def optimizers(self) -> Mapping[str, Optimizer]: ...
    def fingerprint(self) -> dict[str, Any]: ...
    def facts(self) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def checkpoint_state(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def save_checkpoint(
        self, path: str | Path | None = None, *, score: float | None = None, background: bool = False
    ) -> Path: ...
    def finish_saving(self, *, wait: bool = True) -> None: ...
    def standing_checkpoint(self) -> Path | None: ...
    def put_back(self) -> bool: ...
    def request_stop(self) -> None: ...


class Callback:
    """Base class of callbacks, with hooks that do nothing.

    A run is: fit start, then phases, then fit end. A phase of an online trainer collects (make-experience hooks, with
    the episode hooks of the timesteps inside) and learns (epoch and batch hooks); others only learn. `on_phase_end`
    ends it.

    `order` sorts the callbacks of a run, low first, equal ones in the given order. Below 0: adds metrics that others
    log. 0: logs. Above 0: saves the state of the others.
    """

    order: ClassVar[int] = 0

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Called before the first phase, after a resume."""

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Called after the last phase, also after a requested stop, but not after an exception."""

    def on_episode_start(self, trainer: TrainerView, episode: int) -> None:
        """Called before the first timestep of episode number `episode`, counted from 0."""

    def on_episode_end(self, trainer: TrainerView, episode: int) -> None:
        """Called after the last timestep of that episode."""

    def on_make_experience_start(self, trainer: TrainerView) -> None:
        """Called before a phase's first timestep is collected."""

    def on_make_experience_end(self, trainer: TrainerView, experiences: list[Experience]) -> None:
        """Called after all timesteps are scored.

        Args:
            experiences: those of all ranks, ordered by sample index. Another rank's have scores, groups and masks, but
                no texts and no numbers of tokens: `chatgpt.nn.records.fetched`, on all ranks, returns some whole.
        """

    def on_learn_epoch_start(self, trainer: TrainerView, epoch: int) -> None:
        """Called before pass number `epoch` over the data, counted from 0 (in each phase of an online trainer)."""

    def on_learn_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        """Called after that pass."""

    def on_learn_batch_start(self, trainer: TrainerView) -> None:
        """Called before the first forward of a train batch."""

    def on_policy_output(self, trainer: TrainerView, batch: Batch, output: Any) -> None:
        """Called after the policy's forward over a micro-batch of experience in learning, before its loss.

        `output` is a `PolicyOutput` with gradients: `detach()` kept tensors. Dummy batches are included;
        `batch.sequence_mask` is False in them. The column `index` holds the sample index of each row.
        """

    def on_learn_batch_end(self, trainer: TrainerView, metrics: dict[str, float]) -> None:
        """Called after its optimizer step; `metrics` are of this train batch, over all ranks, without a phase
        prefix."""

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        """Called after learning phase number `step`, counted from 1, with its metrics (docs/metrics.md).

        A callback may add metrics to the dict; later callbacks get them, and the metrics file holds them.
        """

    def on_log(
        self,
        trainer: TrainerView,
        stats: dict[str, float],
        batch: Mapping[str, SequenceOf[Any]],
        rewards: list[float],
        columns_to_log: list[str],
    ) -> None:
        """Called by `log_stats` of a step-wise trainer: rows of `batch`, by column, with their rewards."""

    def on_checkpoint(self, trainer: TrainerView, path: Path) -> None:
        """Called after a training checkpoint is written to `path`."""

    def on_resume(self, trainer: TrainerView, path: Path) -> None:
        """Called after the trainer has loaded the checkpoint at `path`, counters included."""

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Called before the run ends with `error`. Other ranks may be at another point: run no collective."""

    def checkpoint_pieces(self, trainer: TrainerView) -> dict[str, list[Piece]]:
        """Returns the tensors of a checkpoint: {group: this rank's pieces}, the same groups on every rank, with any
        names."""
        return {}

    def load_checkpoint_pieces(self, trainer: TrainerView, name: str, reader: TensorReader) -> bool:
        """Loads a group of this callback's `checkpoint_pieces`. Returns False if it does not."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of a checkpoint, as JSON types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a result of `state_dict`."""


def _each(hook: Callable[..., None]) -> Callable[..., None]:
    """Returns a method that calls the hook of every callback of a list, in order."""

    @wraps(hook)
    def call(self: CallbackList, *args: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook.__name__)(*args, **kwargs)

    return call


class CallbackList(Callback):
    """A list of callbacks as one, in order.

    Raises:
        ValueError: an element that is not a callback; names it.
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
        """Yields each callback with a name that a resume repeats: class and number among those of the class."""
        seen: dict[str, int] = {}
        for callback in self.callbacks:
            kind = type(callback).__name__
            yield f'{kind}.{seen.setdefault(kind, 0)}', callback
            seen[kind] += 1

    def state_dict(self) -> dict[str, Any]:
        return {name: state for name, callback in self._named() if (state := callback.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the states of known callbacks; other callbacks keep their fresh state, and other states are ignored."""
        for name, callback in self._named():
            if name in state:
                callback.load_state_dict(state[name])

    def owned_pieces(self, trainer: TrainerView) -> Iterator[tuple[str, str, list[Piece]]]:
        """Yields (owner, group, pieces) of every callback; a resume returns the group to its owner."""
        for owner, callback in self._named():
            for group, pieces in callback.checkpoint_pieces(trainer).items():
                yield owner, group, pieces

    def load_owned_pieces(self, trainer: TrainerView, owner: str, group: str, reader: TensorReader) -> bool:
        """Passes a group to its owner. Returns False if there is no owner or it does not load the group."""
        return any(
            callback.load_checkpoint_pieces(trainer, group, reader) for name, callback in self._named() if name == owner
        )

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Calls the hooks; an exception in one becomes a warning, so that it does not hide `error`."""
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
    """Prints a line to stdout without breaking a progress bar; characters that its encoding lacks are escaped."""
    from tqdm import tqdm

    encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
    tqdm.write(text.encode(encoding, 'backslashreplace').decode(encoding))


def need_package(package: str, owner: str) -> None:
    """Raises ImportError with the install command if the package is missing. Does not import it."""
    if find_spec(package) is None:
        raise ImportError(
            f"{owner} needs the package {package}: pip install {package}, or from a checkout pip install '.[{package}]'"
        )


def check_interval(name: str, value: int) -> int:
    """Returns `value`; raises ValueError unless it is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'{name}={value!r} must be a whole number of learning phases, at least 1')
    return value


def check_mode(mode: str) -> None:
    """Raises ValueError unless `mode` is 'max' or 'min'."""
    if mode not in get_args(Mode):
        raise ValueError(f'mode={mode!r} is not known; choose "max" or "min"')


def metric_value(metrics: Mapping[str, float], name: str) -> float | None:
    """Returns the metric, or None for one of evaluations or of docs/metrics.md that this phase did not measure.

    Raises:
        ValueError: an unknown name, or a metric of a method with names of its own; lists the nearest.
    """
    from chatgpt.monitor.report.page import meanings  # reads a file

    if name in metrics:
        return float(metrics[name])
    family = name.partition('/')[0] + '/'
    of_this_run = name in meanings() and any(other.startswith(family) for other in metrics)
    if of_this_run or family == 'eval/' or '/val_' in name:
        others = [other for other in metrics if other.startswith(family)]
        if not of_this_run and (similar := hint(name, others)):
            text = f'no evaluation of this phase measured {name!r}; if it is misspelt, {similar[2:]}'
            warnings.warn(text, stacklevel=2)
        return None
    there = hint(name, metrics) or f'; there are {", ".join(sorted(metrics)[:8])}'
    raise ValueError(f'there is no metric {name!r} in this run{there}; see docs/metrics.md')
