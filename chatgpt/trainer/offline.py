"""Offline training: passes over a fixed list of records. Each method is an `Objective`.

This module holds everything that methods share: order, split over ranks, micro-batches, schedules, logging, evaluation,
stopping and resuming. A logged phase is `log_interval` optimizer steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.batching import collate
from chatgpt.data.formats import choice_facts
from chatgpt.data.tokenize import digest_of, warn_of_bare_prompt
from chatgpt.nn.sweep import SWEEP_TOKENS, Communicator, sweep
from chatgpt.nn.trunk import dropout_off, dropout_on, in_eval_mode
from chatgpt.strategies.base import Strategy
from chatgpt.strategies.registry import prepared_by
from chatgpt.trainer.base import Trainer
from chatgpt.trainer.callbacks.early_stopping import StopOnPlateau
from chatgpt.trainer.experience.reference import Reference
from chatgpt.trainer.fits import check_apart, check_dropout, check_models, check_records
from chatgpt.trainer.metrics import BatchStats, Mean, Metrics, PhaseMetrics
from chatgpt.trainer.objectives.config import SupervisedConfig
from chatgpt.trainer.schedule import permutation, uneven_steps
from chatgpt.trainer.step import Learner, Work, learn_batch
from chatgpt.types import Batch, Sequence


def mean_over(
    strategy: Communicator,
    sequences: SequenceOf[Sequence],
    forward: Callable[[Batch], Tensor],
    max_tokens: int | None,
    shown: Callable[[list[list[int]]], Iterable[list[int]]] = iter,
) -> float:
    """Returns the mean of `forward`, (B,) of a batch, over sequences that all ranks hold. A collective.

    Args:
        shown: iterates over the micro-batches, for example with a progress bar.
    """
    cuts, stats = strategy.sums.share([s.num_tokens for s in sequences], max_tokens or SWEEP_TOKENS), BatchStats()
    for at, numbers in sweep(strategy, shown(cuts), lambda at: collate([sequences[i] for i in at]), forward):
        stats.add({'mean': Mean(numbers[: len(at)].sum(), float(len(at)))})
    return stats.reduced(strategy)['mean']


def of_kind(data: SequenceOf[Any], kind: type[Any]) -> list[Any]:
    """Returns the data as a list. Raises ValueError for a record of another type."""
    for i, record in enumerate(data):
        if not isinstance(record, kind):
            raise ValueError(f'record {i} is a {type(record).__name__} among {kind.__name__}s; train on one kind')
    return list(data)


def check_patience(patience: int | None, max_epochs: int) -> None:
    """Raises ValueError if early stopping cannot end a run earlier: there is at most one measurement per epoch."""
    if patience is not None and max_epochs < patience + 2:
        raise ValueError(
            f'early_stopping_patience={patience} saves nothing with max_epochs={max_epochs}, for it measures once per '
            f'epoch: give at least max_epochs={patience + 2}'
        )


class Objective(ABC):
    """A method of learning from records: their type, weight and columns, and the loss.

    Args:
        config: settings of the method.
    """

    prefix: ClassVar[str]
    """first part of the metric names"""
    model_name: ClassVar[str] = 'actor'
    num_dummies: ClassVar[int] = 1
    """sequences of a dummy batch"""
    uses_dropout: ClassVar[bool] = True
    """False: dropout is off, because the loss compares two models"""

    def check(self, strategy: Strategy, model: nn.Module) -> None:
        """Raises ValueError for a strategy or a (prepared) model that this method cannot train."""

    def callbacks(self) -> list[Any]:
        """Returns callbacks of the method itself."""
        return []

    @abstractmethod
    def records(self, data: SequenceOf[Any]) -> list[Any]:
        """Makes records from the trainer's data; records are kept, or copied where `prepare` adds to them.

        Raises:
            ValueError: data of another type.
        """

    def accept(
        self, train_data: SequenceOf[Any], eval_data: SequenceOf[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        """Returns the records for training and for evaluation."""
        return self.records(train_data), self.records(eval_data) if eval_data else None

    def prepare(self, records: list[Any]) -> None:
        """Computes what each record needs once, before the first step and before an evaluation. The same list on every
        rank."""

    def sequences(self, record: Any) -> list[Sequence]:
        """Returns the sequences of a record, which share a forward."""
        return [record]

    def weight(self, record: Any) -> int:
        """Returns the weight of a record in the divisor: by default the number of tokens that count."""
        return int(record.response_mask.sum())

    def columns(self, records: list[Any]) -> dict[str, Tensor]:
        """Returns the inputs of the loss beside the tokens; see `Batch.columns`. An empty list gives columns of length
        0."""
        return {}

    def totals(self, records: list[Any]) -> dict[str, float]:
        """Returns the totals of a train batch, or of all records of an evaluation; see `Batch.totals`."""
        return {'weight': max(sum(map(self.weight, records)), 1)}

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        """Returns a sum over the records, divided by `batch.totals['weight']`, and its metrics."""

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns further metrics from the means of a phase or an evaluation, such as a perplexity."""
        return {}

    # ------------------------------------------------------------------ common to all methods

    def num_tokens(self, record: Any) -> int:
        """Returns the padded tokens of a record."""
        sequences = self.sequences(record)
        return len(sequences) * max(s.num_tokens for s in sequences)

    def batch(self, records: list[Any], totals: Mapping[str, float], *, packing: bool = True) -> Batch:
        sequences = [s for record in records for s in self.sequences(record)]
        return collate(
            sequences, columns=self.columns(records), totals=totals, pack=packing, num_dummies=self.num_dummies
        )


@dataclass(frozen=True)
class Method:
    """A method of offline training: its settings, and the objective made from them.

    Args:
        config: class of the settings.
        objective: called with the settings and, if the method compares with a reference, a `Reference`.
        compares: needs a reference: an initial model, or the actor with its adapter off.
    """

    config: type[SupervisedConfig]
    objective: Callable[..., Objective]
    compares: bool = False


class OfflineTrainer(Trainer):
    """Trainer that makes passes over `train_data` by a `Method`, evaluated on `eval_data` at the end
    of each `log_interval` steps in which an epoch ends.

    Args:
        strategy, model, optim: as prepared; or a strategy's name, such as 'ddp', to prepare them here.
        train_data, eval_data: data of the objective, the same lists on every rank. `train_data` is None if the trainer
            makes it.
        method: None takes the class's own.
        initial_model: the reference of a method that needs one, as prepared; None takes the actor with its adapter off.
        config: settings of the method, also accepted as keyword arguments.
        callbacks, tokenizer, run_dir: see `Trainer`.

    Raises:
        ValueError: an unknown setting, data that the objective does not take, no data, an unused initial model, or no
            reference.
    """

    config: SupervisedConfig
    lengthened_by = 'max_epochs or max_steps'
    own_method: ClassVar[Method | None] = None
    resumes_any_step: ClassVar[bool] = True
    """False: a run that failed within a phase resumes from the start of the phase"""

    def __init__(
        self,
        strategy: Strategy | str,
        model: nn.Module,
        optim: Optimizer,
        train_data: SequenceOf[Any] | None,
        eval_data: SequenceOf[Any] | None = None,
        *,
        method: Method | None = None,
        initial_model: nn.Module | None = None,
        config: SupervisedConfig | None = None,
        callbacks: SequenceOf[Any] = (),
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
        **settings: Any,
    ) -> None:
        owner, method = type(self).__name__, method or self.own_method
        if method is None:
            raise ValueError(f'{owner} needs to know what is learned: give method=')
        config = method.config.from_dict((config.to_dict() if config is not None else {}) | settings)
        if initial_model is not None and not method.compares:
            raise ValueError(f'{owner} has no reference: leave initial_model out')
        strategy, (model, optim), initial_model = prepared_by(strategy, (model, optim), initial_model)
        assert not isinstance(strategy, str)
        check_apart(strategy, {'actor': model}, {'actor': optim}, initial_model=initial_model)
        check_models(owner, strategy, {'model': model})
        reference = Reference(strategy, model, strategy.unwrap(model), initial_model)
        if method.compares and not reference.exists:
            raise ValueError(
                f'{owner} compares with a reference: pass initial_model, or an actor with lora_rank > 0 and without '
                'trained biases'
            )
        objective = method.objective(config, reference) if method.compares else method.objective(config)
        check_models(owner, strategy, {objective.model_name: model})
        objective.check(strategy, model)
        if objective.uses_dropout:
            check_dropout(strategy.unwrap(model))
        config.validate(strategy.world_size)
        train, for_eval = objective.accept(train_data or [], eval_data)
        self._digest = digest_of(s for record in train for s in objective.sequences(record))
        if train_data is not None and not train:
            raise ValueError(f'{owner} got no training data')
        for given, what in ((train, 'train_data'), (for_eval or [], 'eval_data')):
            check_records(f'{owner}: {what}', map(objective.sequences, given), strategy.unwrap(model))
        name = objective.model_name
        callbacks = [*objective.callbacks(), *callbacks]
        super().__init__(
            strategy, config, {name: model}, {name: optim}, callbacks=callbacks, tokenizer=tokenizer, run_dir=run_dir
        )
        if train:
            warn_of_bare_prompt(objective.sequences(train[0])[0].prompt_ids, tokenizer)
        self.model, self.optim, self.objective, self._reference = model, optim, objective, reference
        self.train_data: SequenceOf[Any] = train
        self.eval_data: SequenceOf[Any] | None = for_eval
        self.batches_done = 0
        self._last_batch = 0
        """number of train batches of the current `fit`"""
        self._order: tuple[tuple[int, ...], SequenceOf[int]] | None = None
        """the order of the present epoch, with what it is a function of"""
        self.epochs_before = 0
        """passes of earlier calls of `fit`: a later one uses other orders"""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {'batches_done': self.batches_done, 'epochs_before': self.epochs_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.batches_done = int(state['batches_done'])
        self.epochs_before = int(state['epochs_before'])

    def fingerprint(self) -> dict[str, Any]:
        facts = {'num_records': len(self.train_data), 'records': self._digest}
        return super().fingerprint() | facts | self._reference.facts()

    def facts(self) -> dict[str, Any]:
        return {
            'method': {'rm': 'reward-model'}.get(self.objective.prefix, self.objective.prefix),
            'data': {'records': len(self.train_data), 'eval_records': len(self.eval_data or ())}
            | choice_facts(self.tokenizer),
        }

    def put_back(self) -> bool:
        """Restores the last phase, or keeps the last optimizer step, from which a run can resume as well:
        `batches_done` counts every step. A phase that only lacks its report counts as done."""
        if not self.resumes_any_step:
            return super().put_back()
        if self._clean is not None and self.steps.done != self._clean[1]:
            self.phase_score = None  # of the weights at the end of the phase
            if self.batches_done % self.config.log_interval == 0 or self.batches_done == self._last_batch:
                self.phase += 1
        return True

    def fit(self) -> None:
        """Runs `max_epochs` passes. After `load_checkpoint` it continues; a second call adds as many again."""
        c = self.config
        self.warn(uneven_steps(len(self.train_data), 'records', c.train_batch_size))
        per_epoch = -(-len(self.train_data) // c.train_batch_size)
        total = per_epoch * c.max_epochs
        if c.max_steps is not None:
            total = min(total, c.max_steps)
        if not self.is_resuming:
            self.epochs_before += -(-self.batches_done // per_epoch)
            self.batches_done = 0
        self.expect_updates(total)
        self._last_batch = total
        self._warn_of_patience(per_epoch, total)
        left = -(-total // c.log_interval) - self.batches_done // c.log_interval if self.batches_done < total else 0
        with self.running(num_phases=self.phase + left):
            for data in (self.train_data, self.eval_data or []):
                self.objective.prepare(list(data))
            while self.batches_done < total and not self.stop_agreed():
                # A phase that an exception interrupted is finished first.
                rest = c.log_interval - self.batches_done % c.log_interval
                self.learn_phase(min(rest, total - self.batches_done), per_epoch, total)

    def _warn_of_patience(self, per_epoch: int, total: int) -> None:
        """Warns of a callback that cannot stop a run early: epochs that end within `log_interval` steps are evaluated
        together."""
        ends = {-(-end // self.config.log_interval) for end in (*range(per_epoch, total, per_epoch), total)}
        for callback in self.callbacks.callbacks if self.eval_data else ():
            if isinstance(callback, StopOnPlateau) and '/val_' in callback.metric and len(ends) < callback.patience + 2:
                self.warn(
                    f'a patience of {callback.patience} saves nothing: {callback.metric} is measured {len(ends)} times '
                    f'in this run, after each log_interval={self.config.log_interval} steps in which an epoch ends'
                )

    def learn_phase(self, num_batches: int, per_epoch: int, total: int) -> None:
        """Runs `num_batches` optimizer steps, evaluates if an epoch or the run (of `total` steps) ends, and logs."""
        c, name, prefix = self.config, self.objective.model_name, self.objective.prefix
        phase, tokens = PhaseMetrics(), 0
        # Dropout reads torch's generator, which is seeded per optimizer step and rank.
        bare = self.strategy.unwrap(self.model)
        if self.objective.uses_dropout:
            dropout_on(bare)
        else:
            dropout_off(bare)
        with self.clock.measure('learn'):
            for _ in range(num_batches):
                epoch, number = divmod(self.batches_done, per_epoch)
                if number == 0:
                    self.callbacks.on_learn_epoch_start(self, epoch)
                records = self._records(epoch, number)
                self.callbacks.on_learn_batch_start(self)
                rates = self.set_learning_rates()
                work = self._work(records)
                result = learn_batch(
                    self.strategy,
                    [work],
                    max_tokens=c.max_tokens_per_batch,
                    max_grad_norm=c.max_grad_norm,
                    where=f'in epoch {epoch + 1}, train batch {number + 1}',
                    pin_memory=c.dataloader_pin_memory,
                    steps=self.steps,
                    draws=(self.strategy.seed, self.num_updates),  # for dropout
                )
                self.batches_done += 1
                self.num_updates += result.stepped
                tokens += sum(map(work.length_of, records))
                metrics = {k.replace(f'{name}_grad_norm', 'grad_norm'): v for k, v in result.metrics.items()}
                phase.add(metrics | {'grad_norm_max': metrics['grad_norm'], 'lr': rates[name]})
                self.callbacks.on_learn_batch_end(self, metrics)
                if number == per_epoch - 1:
                    self.callbacks.on_learn_epoch_end(self, epoch)
        evaluated: dict[str, float] = {}
        # of the whole phase, a part of which may have run before a resume
        begun = (self.batches_done - 1) // c.log_interval * c.log_interval
        ends_epoch = self.batches_done // per_epoch > begun // per_epoch
        if self.eval_data and (ends_epoch or self.batches_done == total):
            evaluated = {f'{prefix}/val_{k}': v for k, v in self.evaluate(self.eval_data).items()}
        learned = phase.result(prefix)
        derived = self.objective.derived({k.split('/', 1)[1]: v for k, v in learned.items()})
        metrics = learned | {f'{prefix}/{k}': v for k, v in derived.items()} | evaluated | self.clock.metrics()
        metrics[f'{prefix}/epoch'] = self.batches_done / per_epoch
        metrics['perf/learn_tokens_per_s'] = tokens / max(self.clock.wall['learn'], 1e-9)
        self.end_phase(metrics)

    def _records(self, epoch: int, number: int) -> list[Any]:
        size = self.config.train_batch_size
        batch = slice(number * size, (number + 1) * size)
        if not self.config.shuffle:
            return list(self.train_data[batch])
        key = len(self.train_data), self.strategy.seed, self.epochs_before + epoch
        if self._order is None or self._order[0] != key:
            self._order = key, permutation(*key)
        return [self.train_data[i] for i in self._order[1][batch]]

    def _work(self, records: list[Any]) -> Work:
        learner = Learner(self.objective.model_name, self.model, self.optim, self.objective.loss)
        make_batch = partial(self.objective.batch, totals=self.objective.totals(records), packing=self.config.packing)
        return Work(records, [learner], make_batch, self.objective.num_tokens)

    @torch.no_grad()
    def evaluate(self, data: SequenceOf[Any]) -> dict[str, float]:
        """Returns means over data of the objective, the same list on every rank: the metrics of its loss, and the
        derived ones."""
        objective, records = self.objective, self.objective.records(data)
        if not records:
            raise ValueError('evaluate: there are no records')
        objective.prepare(records)
        stats = BatchStats()
        limit = self.config.max_tokens_per_batch or SWEEP_TOKENS
        cuts = self.strategy.sums.share([*map(objective.num_tokens, records)], limit)

        def make_batch(positions: list[int]) -> Batch:
            return objective.batch([records[i] for i in positions], totals, packing=self.config.packing)

        with in_eval_mode(self.strategy.unwrap(self.model)):
            totals = objective.totals(records)  # KTO's reference point is computed by the model
            for _, (_, metrics) in sweep(self.strategy, cuts, make_batch, lambda b: objective.loss(self.model, b)):
                stats.add(metrics)
        means = stats.reduced(self.strategy)
        return means | objective.derived(means)
