"""The base of trainers that only learn: passes over a fixed list of records.

A subclass says what a record weighs and what its loss is; everything else (order, split over ranks, micro-batches, schedules,
logging, evaluation, stopping and resuming) is here. One logged phase is `log_interval` optimizer steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.batching import collate_or_filler
from chatgpt.plan.of_run import common_fields
from chatgpt.plan.setup import Setup, Task
from chatgpt.trainer.base import Trainer
from chatgpt.trainer.config import SupervisedConfig
from chatgpt.trainer.learning import BatchStats, TrainedModel, Work, learn_batch, micro_batches, permutation, seed_for
from chatgpt.trainer.ppo_metrics import PhaseMetrics
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.trainer.strategies.named import prepared_by
from chatgpt.types import Batch


class SupervisedTrainer(Trainer):
    """Passes over `train_data`, evaluated on `eval_data` at the end of every epoch.

    Args:
        strategy, model, optim: as prepared; or a strategy's name, such as 'ddp', and a model and optimizer that it prepares here.
        train_data, eval_data: records, the same lists on every rank.
        config: see `SupervisedConfig`; its fields are also accepted as keyword arguments.
    """

    prefix: str
    """first part of the metric names"""
    model_name = 'model'
    config_class: type[SupervisedConfig] = SupervisedConfig
    config: SupervisedConfig
    planned_as: Task | None = None
    """the planner's task, where it knows this kind of trainer"""

    def __init__(
        self,
        strategy: Strategy | str,
        model: nn.Module,
        optim: Optimizer,
        train_data: SequenceOf[Any],
        eval_data: SequenceOf[Any] | None = None,
        *,
        config: SupervisedConfig | None = None,
        callbacks: SequenceOf[Any] = (),
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        merged = self.config_class.from_dict((config.to_dict() if config is not None else {}) | kwargs)
        strategy, (model, optim) = prepared_by(strategy, (model, optim))
        train_data, eval_data = self.accept(strategy, model, merged, train_data, eval_data)
        if len(train_data) == 0:
            raise ValueError(f'{type(self).__name__} got no training data')
        self.model, self.optim = model, optim
        self.train_data, self.eval_data = train_data, eval_data
        super().__init__(strategy, merged, callbacks=callbacks, tokenizer=tokenizer, run_dir=run_dir)
        self.batches_done = 0
        self.epochs_before = 0
        """passes of earlier calls of `fit`, whose orders are not repeated"""

    def accept(
        self, strategy: Strategy, model: nn.Module, config: Any, train_data: SequenceOf[Any], eval_data: SequenceOf[Any] | None
    ) -> tuple[SequenceOf[Any], SequenceOf[Any] | None]:
        """Check what was given, before anything else; the records to train and to evaluate on."""
        return train_data, eval_data

    def longest(self) -> int:
        """Tokens of the longest training sequence."""
        return max(record.num_tokens for record in self.train_data)

    def memory_setup(self) -> Setup | None:
        if self.planned_as is None:
            return None
        model = self.strategy.unwrap(self.model)
        fields = common_fields(self.strategy, self.config, model, self.optim, self.planned_as)
        return Setup(**fields, max_prompt_tokens=1, max_new_tokens=max(self.longest() - 1, 1))

    @abstractmethod
    def work(self, records: list[Any]) -> list[Work]:
        """What one global train batch trains; called once per batch, so normalisers can be set here."""

    @abstractmethod
    def evaluation_work(self, records: list[Any]) -> Work:
        """How held-back records are measured: the same losses, run without gradients."""

    def after_evaluation(self, metrics: dict[str, float]) -> dict[str, float]:
        """Derived numbers, such as a perplexity; `metrics` are the means of what the losses recorded."""
        return metrics

    def models(self) -> Mapping[str, nn.Module]:
        return {self.model_name: self.model}

    def optimizers(self) -> Mapping[str, Optimizer]:
        return {self.model_name: self.optim}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {'batches_done': self.batches_done, 'epochs_before': self.epochs_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.batches_done = int(state['batches_done'])
        self.epochs_before = int(state['epochs_before'])

    def put_back(self) -> bool:
        """`batches_done` follows every optimizer step, so a run goes on from any. A phase that only lacked its report counts as done."""
        if self._clean is not None and self.steps.done != self._clean[1] and self.batches_done % self.config.log_interval == 0:
            self.phase += 1
        return True

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {'num_records': len(self.train_data)}

    def fit(self) -> None:
        """Run `max_epochs` passes. After `load_checkpoint` it goes on where it was; a second call adds as many again."""
        c = self.config
        per_epoch = -(-len(self.train_data) // c.train_batch_size)
        total = per_epoch * c.max_epochs
        if c.max_steps is not None:
            total = min(total, c.max_steps)
        if not self.is_resuming:
            self.epochs_before += -(-self.batches_done // per_epoch)
            self.batches_done = 0
            self.fit_updates = self.num_updates
        self.is_resuming = False
        self.total_updates = self.fit_updates + total
        with self.running(num_phases=self.phase + -(-total // c.log_interval) - self.batches_done // c.log_interval):
            while self.batches_done < total and not self.stop_agreed():
                rest = c.log_interval - self.batches_done % c.log_interval  # a phase that an exception cut short is ended first
                self._phase(min(rest, total - self.batches_done), per_epoch, total)

    def _phase(self, num_batches: int, per_epoch: int, total: int) -> None:
        c, phase, tokens = self.config, PhaseMetrics(), 0
        extra: dict[str, float] = {}
        self.training_mode()
        with self.clock.measure('learn'):
            for _ in range(num_batches):
                epoch, number = divmod(self.batches_done, per_epoch)
                if number == 0:
                    self.callbacks.on_learn_epoch_start(self, epoch)
                records = self._records(epoch, number)
                self.callbacks.on_learn_batch_start(self)
                rates = self.set_learning_rates()
                work = self.work(records)
                torch.manual_seed(seed_for(self.strategy.seed, self.batches_done, self.strategy.rank))  # for dropout
                result = learn_batch(
                    self.strategy,
                    work,
                    max_tokens=c.max_tokens_per_batch,
                    max_grad_norm=c.max_grad_norm,
                    where=f'in epoch {epoch + 1}, train batch {number + 1}',
                    pin_memory=c.dataloader_pin_memory,
                    packing=c.packing,
                    steps=self.steps,
                )
                self.batches_done += 1
                self.num_updates += result.stepped
                tokens += sum(w.length_of(r) for w in work for r in w.records)
                metrics = {k.replace(f'{self.model_name}_grad_norm', 'grad_norm'): v for k, v in result.metrics.items()}
                phase.add(metrics | {'lr': rates[self.model_name]})
                self.callbacks.on_learn_batch_end(self, metrics)
                if number == per_epoch - 1:
                    self.callbacks.on_learn_epoch_end(self, epoch)
        if self.eval_data and (self.batches_done % per_epoch < num_batches or self.batches_done == total):
            extra = {f'{self.prefix}/val_{k}': v for k, v in self.evaluate(self.eval_data).items()}
        metrics = self.after_evaluation(phase.result(self.prefix)) | extra | self.clock.metrics()
        metrics[f'{self.prefix}/epoch'] = self.batches_done / per_epoch
        metrics['perf/learn_tokens_per_s'] = tokens / max(self.clock.wall['learn'], 1e-9)
        self.end_phase(metrics)

    def _records(self, epoch: int, number: int) -> list[Any]:
        size = self.config.train_batch_size
        order = (
            permutation(len(self.train_data), self.strategy.seed, self.epochs_before + epoch)
            if self.config.shuffle
            else list(range(len(self.train_data)))
        )
        return [self.train_data[i] for i in order[number * size : (number + 1) * size]]

    def training_mode(self) -> None:
        """Dropout as the model's config says. It draws from torch's generator, so that is seeded per optimizer step and rank."""
        self.strategy.unwrap(self.model).train()

    @torch.no_grad()
    def evaluate(self, data: SequenceOf[Any]) -> dict[str, float]:
        """Means over `data` of what the losses record, and what `after_evaluation` derives."""
        bare = self.strategy.unwrap(self.model)
        was_training = bare.training
        bare.eval()
        stats = BatchStats()
        work = self.evaluation_work(list(data))
        for micro in micro_batches(work.records, self.strategy, self.config.max_tokens_per_batch or 16384, work.length_of):
            batch = work.collate(micro)
            if not self.config.packing:
                batch.packing = None
            batch = batch.to(self.strategy.device)
            for part in work.parts:
                with self.strategy.autocast():
                    part.loss(batch, micro, stats)
        bare.train(was_training)
        metrics = {f'x/{k}': v for k, v in stats.reduced(self.strategy).items()}
        return {k.split('/', 1)[1]: v for k, v in self.after_evaluation(metrics).items()}


class OneLossTrainer(SupervisedTrainer):
    """Base of those whose train batch is one `Work` with one loss: a sum over the records, divided by what counts in the batch."""

    @abstractmethod
    def loss_sum(self, batch: Batch, records: list[Any], stats: BatchStats) -> Tensor:
        """The loss of a micro-batch, not divided; see `TrainedModel.loss`."""

    @abstractmethod
    def weight_of(self, record: Any) -> int:
        """What a record adds to the divisor."""

    def collate(self, records: list[Any]) -> Batch:
        return collate_or_filler(records)

    def length_of(self, record: Any) -> int:
        """Padded tokens of a record."""
        return record.num_tokens

    def work(self, records: list[Any]) -> list[Work]:
        return [self.work_of(records, max(sum(map(self.weight_of, records)), 1))]

    def evaluation_work(self, records: list[Any]) -> Work:
        return self.work_of(records, 1)

    def work_of(self, records: list[Any], divisor: int) -> Work:
        def loss(batch: Batch, micro: list[Any], stats: BatchStats) -> Tensor:
            return self.loss_sum(batch, micro, stats) / divisor

        return Work(records, [TrainedModel(self.model_name, self.model, self.optim, loss)], self.collate, self.length_of)
