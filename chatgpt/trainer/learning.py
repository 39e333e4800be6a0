"""One optimizer step over a global train batch: split over ranks, cut into micro-batches, accumulate, check, step.

Every trainer uses `learn_batch` with its own `TrainedModel` parts; what differs between PPO, SFT, reward models and offline RL is the loss
function of a part. A loss is a rank's share of a sum, divided by the global number of what counts, so neither the cut into
micro-batches nor the number of ranks changes a gradient beyond the order of additions.

Left out: where the records come from, and when to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.batching import align, cut_by_tokens, split_over_ranks
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.types import Batch


class NonFiniteError(RuntimeError):
    """A loss or a gradient norm was NaN or infinite; the weights are as they were before the step."""


class BatchStats:
    """Numbers of one train batch that add up over micro-batches and ranks: weighted means, maxima and minima.

    Tensors stay on the device until `reduced`, which is the one place that waits for it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._extremes: dict[str, Tensor] = {}

    def mean(self, name: str, total: Tensor, weight: Tensor | float) -> None:
        """Add `total` (a sum) with its `weight`; the mean is the sum of totals over the sum of weights."""
        total = total.detach().double()
        weight = torch.as_tensor(weight, dtype=torch.float64, device=total.device)
        if name in self._sums:
            old_total, old_weight = self._sums[name]
            total, weight = total + old_total, weight + old_weight
        self._sums[name] = (total, weight)

    def add(self, name: str, total: Tensor) -> None:
        """Add `total` to a plain sum: a mean without weight."""
        self.mean(name, total, 0.0)

    def maximum(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self._extremes[name] = torch.maximum(self._extremes[name], value) if name in self._extremes else value

    def minimum(self, name: str, value: Tensor) -> None:
        """Kept as the maximum of the negative, so that one reduction serves both; `reduced` turns it back."""
        self.maximum('-' + name, -value)

    def reduced(self, strategy: Strategy) -> dict[str, float]:
        """The numbers over all ranks. Every rank must have added the same names."""
        result: dict[str, float] = {}
        if self._sums:
            names = sorted(self._sums)
            flat = torch.stack([torch.stack(self._sums[name]) for name in names]).to(strategy.device)
            for name, (total, weight) in zip(names, strategy.all_reduce(flat, op='sum').tolist(), strict=True):
                result[name] = total / weight if weight else total
        if self._extremes:
            names = sorted(self._extremes)
            flat = torch.stack([self._extremes[name] for name in names]).to(strategy.device)
            for name, value in zip(names, strategy.all_reduce(flat, op='max').tolist(), strict=True):
                result[name.removeprefix('-')] = -value if name.startswith('-') else value
        return result


@dataclass
class TrainedModel:
    """A model that learns, with its optimizer and its loss.

    Args:
        name: 'actor', 'critic', ...; names the metrics.
        loss: (batch on the device, its records, stats) → this rank's share of the loss, a scalar with gradient. `records` is
            empty in a zero-weight turn, in which the forward must still run.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Batch, list[Any], BatchStats], Tensor]


@dataclass
class Work:
    """A global list of records and the models that learn from it.

    PPO is one `Work` for actor and critic; PPO-ptx adds a second, of pretraining text, for the actor.

    Args:
        records: the same list on every rank.
        collate: turns records into a `Batch`; must turn an empty list into a zero-weight one.
        length_of: tokens a record takes in a padded batch.
    """

    records: SequenceOf[Any]
    parts: SequenceOf[TrainedModel]
    collate: Callable[[list[Any]], Batch]
    length_of: Callable[[Any], int]


@dataclass
class Steps:
    """How far the weights of a trainer have come: what of them is whole when an exception ends the run."""

    done: int = 0
    """optimizer steps finished, of all models together"""
    within: bool = False
    """inside one; stays True when an exception came from there, which leaves some weights moved and others not"""


@dataclass
class BatchResult:
    """What one train batch gave. `stepped` is False when it was vetoed or its step was skipped by loss scaling."""

    metrics: dict[str, float]
    stepped: bool


def micro_batches(
    records: SequenceOf[Any], strategy: Strategy, max_tokens: int | None, length_of: Callable[[Any], int]
) -> list[list[Any]]:
    """This rank's micro-batches of a global train batch; as many as on any other rank, the last ones maybe empty."""
    lengths = [length_of(r) for r in records]
    shares = split_over_ranks(lengths, strategy.world_size)
    cuts = [[[share[j] for j in cut] for cut in cut_by_tokens([lengths[i] for i in share], max_tokens)] for share in shares]
    return [[records[i] for i in cut] for cut in align(cuts)[strategy.rank]]


def learn_batch(
    strategy: Strategy,
    work: SequenceOf[Work],
    *,
    max_tokens: int | None = None,
    max_grad_norm: float | None = None,
    veto: Callable[[dict[str, float]], bool] | None = None,
    where: str = '',
    pin_memory: bool = False,
    packing: bool = True,
    steps: Steps | None = None,
) -> BatchResult:
    """Forward and backward over the micro-batches of a global train batch, then one step of each optimizer.

    Args:
        veto: sees the reduced metrics before any step; True drops the gradients instead.
        where: named in the error when something is not finite.
        packing: leave padding out where batch and model can; False runs every row at full width.
        steps: counts the steps that are finished.

    Raises:
        NonFiniteError: a loss or a gradient norm is not finite; names the batch and its samples.
    """
    stats = BatchStats()
    losses: list[tuple[Tensor, list[Any]]] = []
    turns = [(w, micro) for w in work for micro in micro_batches(w.records, strategy, max_tokens, w.length_of)]
    last_turn = {id(part.model): i for i, (w, _) in enumerate(turns) for part in w.parts}
    for i, (w, micro) in enumerate(turns):
        batch = w.collate(micro)
        if not packing:
            batch.packing = None
        batch = _to_device(batch, strategy.device, pin_memory)
        for part in w.parts:
            with strategy.accumulate(part.model, last=last_turn[id(part.model)] == i):
                with strategy.autocast():
                    loss = part.loss(batch, micro, stats)
                strategy.backward(loss, part.model, part.optimizer)
            strategy.note_progress('learning')
            losses.append((loss.detach(), micro))
            stats.add('loss_sum', loss)
    trained = {id(part.optimizer): part for w in reversed(work) for part in reversed(w.parts)}
    metrics = stats.reduced(strategy)
    if not math.isfinite(metrics.pop('loss_sum')):
        _discard(strategy, trained.values())
        raise NonFiniteError(_describe(strategy, losses, where))
    if veto is not None and veto(metrics):
        _discard(strategy, trained.values())
        return BatchResult(metrics, stepped=False)
    stepped, steps = True, steps or Steps()
    for part in reversed(trained.values()):
        steps.within = True
        norm = strategy.optimizer_step(part.optimizer, max_norm=max_grad_norm)
        steps.within = False
        metrics[f'{part.name}_grad_norm'] = norm
        if not math.isfinite(norm):
            if not strategy.uses_loss_scaling:
                raise NonFiniteError(
                    f'the gradient norm of the {part.name} is {norm} {where}; its weights are those before this step. '
                    'Lower the learning rate, or compute in bf16 or fp32'
                )
            stepped = False
        else:
            steps.done += 1
    return BatchResult(metrics, stepped)


def _to_device(batch: Batch, device: torch.device, pin_memory: bool) -> Batch:
    if pin_memory and device.type == 'cuda':
        for name in Batch.__slots__:
            if isinstance(value := getattr(batch, name), Tensor):
                setattr(batch, name, value.pin_memory().to(device, non_blocking=True))
    return batch.to(device)


def _discard(strategy: Strategy, parts: Iterable[TrainedModel]) -> None:
    for part in parts:
        strategy.discard_gradients(part.optimizer)


def _describe(strategy: Strategy, losses: list[tuple[Tensor, list[Any]]], where: str) -> str:
    """One sentence that names the samples whose micro-batch had a loss that is not finite, the same on every rank."""
    bad: list[str] = []
    for loss, micro in losses:
        if not torch.isfinite(loss):
            bad += [str(getattr(r, 'index', '?')) for r in micro]
    everyone = [name for names in strategy.all_gather_object(sorted(set(bad))) for name in names]
    samples = f'; samples in it: {", ".join(everyone[:16])}' if everyone else ''
    return f'the loss is not finite {where}{samples}. The weights are those before this step'


def flat(records: SequenceOf[Any], field: str, batch: Batch, *, fill: float = 0.0) -> Tensor:
    """A per-token field of several records as one (N,) fp32 tensor on the batch's device; `fill` for a filler batch."""
    device = batch.action_ids.device
    if not records:
        return torch.full((batch.num_actions,), fill, device=device)
    return torch.cat([getattr(r, field) for r in records]).to(device)


def train_batches(num_items: int, batch_size: int, *, key: tuple[int, ...], shuffle: bool = True) -> Iterator[list[int]]:
    """Positions of each global train batch of one epoch; the last may be short. The order is a function of `key` alone."""
    order = permutation(num_items, *key) if shuffle else list(range(num_items))
    for start in range(0, num_items, batch_size):
        yield order[start : start + batch_size]


def seed_for(*key: int) -> int:
    """A 63-bit seed from a tuple of integers, such as (seed, phase, epoch); near keys give unrelated seeds (splitmix64)."""
    word = 0xFFFFFFFFFFFFFFFF
    state = 0x9E3779B97F4A7C15
    for part in key:
        state = ((state ^ (part & word)) + 0x9E3779B97F4A7C15) & word
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & word
        state ^= state >> 31
    return state >> 1


def generator_for(*key: int) -> torch.Generator:
    """A CPU generator seeded by `seed_for(*key)`."""
    return torch.Generator().manual_seed(seed_for(*key))


def permutation(num_items: int, *key: int) -> list[int]:
    """A permutation that is a function of `key`, the same on every rank and device."""
    return torch.randperm(num_items, generator=generator_for(*key)).tolist()
