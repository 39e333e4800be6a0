"""One optimizer step over a global train batch: split over ranks, cut into micro-batches, accumulate, check, step.

A loss is `loss(model, batch) -> (total, metrics)`. `total` is this rank's share of a sum, divided by what counts in the
whole train batch (`Batch.totals`), so neither the cut into micro-batches nor the number of ranks changes a gradient
beyond the order of additions. `Strategy.sums` decides how a batch is cut and in which order gradients are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.batching import moved_together
from chatgpt.strategies.base import Strategy
from chatgpt.trainer.metrics import BatchStats, Mean, Metrics
from chatgpt.trainer.schedule import seed_for
from chatgpt.types import Batch

Loss = Callable[[nn.Module, Batch], tuple[Tensor, Metrics]]


class NonFiniteError(RuntimeError):
    """A loss or a gradient norm was NaN or infinite; the weights are as they were before the step."""


@dataclass
class Learner:
    """A trained model with its optimizer and its loss. `name` ('actor', 'critic', ...) prefixes its metrics."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    loss: Loss


@dataclass
class Work:
    """A global list of records and the models trained on it.

    PPO has one `Work` for actor and critic; PPO-ptx adds a second one, of pretraining text, for the actor.
    """

    records: SequenceOf[Any]
    """the same list on every rank"""
    learners: SequenceOf[Learner]
    """in the order in which they see each micro-batch"""
    make_batch: Callable[[list[Any]], Batch]
    """turns records into a `Batch`, an empty list into a dummy batch, as `collate` does"""
    length_of: Callable[[Any], int] = attrgetter('num_tokens')
    """number of tokens of a record in a padded batch"""

    def rounds(self, strategy: Strategy, max_tokens: int | None) -> list[tuple[int, list[list[Any]]]]:
        """Returns this rank's micro-batches as (number, batches) per round of `Sums.rounds`; the last may be empty."""
        cut = strategy.sums.rounds([self.length_of(r) for r in self.records], max_tokens)
        return [(number, [[self.records[i] for i in batch] for batch in batches]) for number, batches in cut]


@dataclass
class Passes:
    """Passes over a list of records in train batches, by some of the models of a trainer."""

    records: SequenceOf[Any]
    """the same list on every rank"""
    epochs: int
    batch_size: int
    """sequences of a train batch, over all ranks"""
    work: Callable[[list[Any]], list[Work]]
    """returns the work of a train batch"""
    set_rates: Callable[[], dict[str, float]]
    """sets the learning rates of the next optimizer step, and returns them by the name of the model"""
    count: Callable[[bool], None]
    """counts a train batch; its argument says whether the optimizers have stepped"""
    guarded: bool = True
    """a `RatioGuard` may refuse train batches"""


@dataclass
class Steps:
    """Counts optimizer steps, to tell after an exception whether the weights are consistent."""

    done: int = 0
    """finished optimizer steps of all models together"""
    within: bool = False
    """inside a step; stays True after an exception there, since some weights may be updated and others not"""


class BatchResult(NamedTuple):
    metrics: dict[str, float]
    stepped: bool
    """False when the batch was vetoed or a step was skipped by loss scaling"""


def learn_batch(
    strategy: Strategy,
    work: SequenceOf[Work],
    *,
    max_tokens: int | None = None,
    max_grad_norm: float | None = None,
    veto: Callable[[dict[str, float]], bool] | None = None,
    where: str = '',
    pin_memory: bool = False,
    steps: Steps | None = None,
    draws: tuple[int, ...] | None = None,
) -> BatchResult:
    """Runs forward and backward over the micro-batches of a global train batch, then one step of each optimizer.

    Args:
        veto: called with the reduced metrics before any step; if it returns True, the gradients are dropped instead.
        where: added to the error message when a value is not finite.
        steps: counts finished steps.
        draws: torch's generators are seeded from these and the number of the round, for dropout.

    Raises:
        NonFiniteError: a loss or a gradient norm is not finite; names the batch and its samples.
    """
    stats, steps, moved = BatchStats(), steps or Steps(), False
    trained = {id(learner.optimizer): learner for w in work for learner in w.learners}
    losses: list[tuple[Tensor, list[Any]]] = []
    try:
        for number, forwards in _rounds(strategy, work, max_tokens):
            if draws is not None:
                torch.manual_seed(seed_for(*draws, number))
            losses += _accumulate(strategy, forwards, stats, pin_memory)
    except BaseException:
        for learner in trained.values():  # a later call must not add to them
            strategy.discard_gradients(learner.optimizer)
        raise
    reduced = stats.reduced(strategy)
    is_finite = math.isfinite(reduced.pop('loss_sum'))
    if not is_finite or (veto is not None and veto(reduced)):
        for learner in trained.values():
            strategy.discard_gradients(learner.optimizer)
        if not is_finite:
            raise NonFiniteError(_describe(strategy, losses, where))
        return BatchResult(reduced, stepped=False)
    stepped = True
    for learner in trained.values():
        steps.within = True
        norm = strategy.optimizer_step(learner.optimizer, max_norm=max_grad_norm)
        steps.within = False
        reduced[f'{learner.name}_grad_norm'] = norm
        if math.isfinite(norm):
            steps.done += 1
            moved = True
            continue
        if not strategy.numerics.scales_loss:
            steps.within = moved  # another model of this batch has stepped
            for each in trained.values():
                strategy.discard_gradients(each.optimizer)
            raise NonFiniteError(
                f'the gradient norm of the {learner.name} is {norm} {where}; its weights are those before this step. '
                'Lower the learning rate, or compute in bf16 or fp32'
            )
        stepped = False
    return BatchResult(reduced, stepped)


def _accumulate(
    strategy: Strategy, forwards: SequenceOf[tuple[Work, list[Any]]], stats: BatchStats, pin_memory: bool
) -> Iterator[tuple[Tensor, list[Any]]]:
    """Runs forward and backward of each micro-batch; yields its loss and its records."""
    last_of = {id(learner.model): i for i, (w, _) in enumerate(forwards) for learner in w.learners}
    for i, ((w, records), batch) in enumerate(zip(forwards, _batches(strategy, forwards, pin_memory), strict=True)):
        for learner in w.learners:
            with strategy.accumulate(learner.model, last=last_of[id(learner.model)] == i):
                with strategy.autocast():
                    loss, metrics = learner.loss(learner.model, batch)
                strategy.backward(loss, learner.model, learner.optimizer)
            strategy.note_progress('learning')
            stats.add(metrics)
            stats.add({'loss_sum': Mean(loss, 0.0)})
            yield loss.detach(), records


def _batches(strategy: Strategy, forwards: SequenceOf[tuple[Work, list[Any]]], pin_memory: bool) -> Iterable[Batch]:
    """Makes the batches of these forwards, on the device. On a GPU, page-locked batches are copied one by one when they
    are needed, others in one copy that the host waits for once."""
    made = (w.make_batch(records) for w, records in forwards)
    if strategy.device.type == 'cuda' and not pin_memory:
        return moved_together(made, strategy.device)
    return (batch.to(strategy.device, pin_memory=strategy.device.type == 'cuda') for batch in made)


def _rounds(
    strategy: Strategy, work: SequenceOf[Work], max_tokens: int | None
) -> Iterator[tuple[int, list[tuple[Work, list[Any]]]]]:
    """Yields the number and this rank's forwards of each round of a train batch."""
    for parts in zip(*(w.rounds(strategy, max_tokens) for w in work), strict=True):
        yield parts[0][0], [(w, records) for w, (_, batches) in zip(work, parts, strict=True) for records in batches]


def _describe(strategy: Strategy, losses: list[tuple[Tensor, list[Any]]], where: str) -> str:
    """Returns an error message, the same on every rank, that names the samples of micro-batches with a non-finite
    loss."""
    bad = {str(getattr(r, 'index', '?')) for loss, records in losses if not torch.isfinite(loss) for r in records}
    everyone = [name for names in strategy.all_gather_object(sorted(bad)) for name in names]
    samples = f'; samples in it: {", ".join(everyone[:16])}' if everyone else ''
    return f'the loss is not finite {where}{samples}. The weights are those before this step'
