"""The common base of DPO, SFT and reward models of TRL 0.12 to 1.12: arguments, number of steps, training, logging and
evaluation. The methods are in `pairs` and `sft`."""

from __future__ import annotations

import dataclasses
import math
import time
from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.trainer_utils import TrainOutput

from chatgpt.data import load_preferences, note_model
from chatgpt.names import hint
from chatgpt_compat.trl import arguments
from chatgpt_compat.trl.arguments import ARGUMENTS, Entry, TrainingArguments, text_of, warned
from chatgpt_compat.trl.training import (
    LaterTrainer,
    clipping,
    from_transformers,
    max_length_of,
    refuse,
    resolved,
    strategy_of,
    tokenizer_of,
)

UNSUPPORTED = ARGUMENTS | {'activation_offloading': warned('a matter of memory, without influence on numbers')}
"""unsupported argument → reason"""

REASONS = {
    'data_collator': 'records are batched here: give rows of text. Rows of prompt and completion count the completion '
    'alone, assistant_only_loss=True the answers of messages',
    'compute_metrics': 'evaluation measures the loss and its companions',
    'compute_loss_func': 'write an Objective (docs/extend/objective.md)',
    'preprocess_logits_for_metrics': 'see compute_metrics',
    'optimizer_cls_and_kwargs': 'give optimizers=(optimizer, None)',
    'quantization_config': 'models are trained in whole weights',
    'model_init': 'give the model',
    'infinite': 'give max_steps',
}
"""unsupported argument of a constructor → what to do instead"""


@dataclass(kw_only=True)
class OfflineArguments(TrainingArguments):
    """Arguments that all three configs have."""

    max_length: int | None = 1024
    model_init_kwargs: dict | str | None = None
    dataset_num_proc: int | None = None
    pad_to_multiple_of: int | None = None
    pad_token: str | None = None
    activation_offloading: bool = False
    trust_remote_code: InitVar[bool] = False  # not a command-line flag: ModelConfig has that

    def __post_init__(self, trust_remote_code: bool) -> None:  # type: ignore[override]
        super().__post_init__()
        self.trust_remote_code = trust_remote_code  # type: ignore[attr-defined]


class Plan(NamedTuple):
    """Numbers of optimizer steps of a run over a list of records."""

    batch_size: int
    per_epoch: int
    total: int
    log_every: int
    eval_every: int | None
    save_every: int | None
    log_interval: int
    """steps of one learning phase, a divisor of the other intervals"""


def plan_of(args: Any, num_records: int, world_size: int) -> Plan:
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * world_size
    per_epoch = math.ceil(num_records / batch_size)
    total = args.max_steps if args.max_steps > 0 else max(math.ceil(args.num_train_epochs * per_epoch), 1)

    def when(strategy: str, steps: float | None, default: int) -> int | None:
        if (choice := text_of(args, strategy)) == 'no':
            return None
        return per_epoch if choice == 'epoch' else arguments.every(steps, default, total)

    log_every = when('logging_strategy', args.logging_steps, 10) or total
    eval_every = when('eval_strategy', args.eval_steps, log_every)
    save_every = when('save_strategy', args.save_steps, 500)
    interval = math.gcd(*(n for n in (log_every, eval_every, save_every) if n is not None))
    return Plan(batch_size, per_epoch, total, log_every, eval_every, save_every, interval)


class OfflineLaterTrainer(LaterTrainer):
    """Base of the trainers of DPO, SFT and reward models; `inner` is an `OfflineTrainer`.

    Args:
        model: a transformers model, trained in place; a PEFT model; or a name or folder.
        data_collator: not supported.
        processing_class: the tokenizer, in older versions `tokenizer`; None loads the model's own.
        optimizers: (an optimizer over the model's parameters, None).
        **older: arguments of the config that older versions take in the trainer.

    Raises:
        ValueError: an argument is missing or not supported; raised before the model is changed.
    """

    CONFIG: ClassVar[type]
    OURS: ClassVar[tuple[Any, Any]]
    """this library's trainer and its config"""
    NAMES: ClassVar[Mapping[str, str]]
    """TRL's name of a metric → this library's without prefix"""
    UNSUPPORTED: ClassVar[Mapping[str, Entry]] = UNSUPPORTED
    """unsupported argument of the config → reason"""
    model: Any
    before_0_12: bool
    """True if the constructor got `tokenizer` or arguments of the config: texts became tokens differently then"""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        callbacks: SequenceOf[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        tokenizer: Any = None,
        **older: Any,
    ) -> None:
        owner = self.CONFIG.__name__.replace('Config', 'Trainer')
        older['data_collator'] = data_collator
        refuse(owner, {name: (older.pop(name), why) for name, why in REASONS.items() if name in older})
        if model is None or train_dataset is None:
            raise ValueError(f'{owner}: {"model" if model is None else "train_dataset"} is needed')
        if optimizers[1] is not None:
            raise ValueError(
                'optimizers: a scheduler cannot be taken over; give (optimizer, None) and lr_scheduler_type'
            )
        self.before_0_12 = tokenizer is not None or bool(older)
        args = resolved(
            with_older_arguments(owner, args, self.CONFIG, older), self.CONFIG, 'trainer_output', self.UNSUPPORTED
        )
        self.check_arguments(args)
        words = tokenizer_of(processing_class, tokenizer, model)
        if getattr(args, 'eos_token', None) is not None:
            words.eos_token = args.eos_token
        super().__init__(args, words, callbacks, strategy_of(args))
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

        trained, frozen = self.make_models(model, peft_config)
        note_model(words, trained.model.config)
        records = self.records(train_dataset)
        self.plan = plan = plan_of(args, len(records), self.strategy.world_size)
        trainer_class, config_class = self.OURS
        config = config_class(
            train_batch_size=plan.batch_size,
            max_epochs=max(math.ceil(plan.total / plan.per_epoch), 1),
            max_steps=plan.total,
            log_interval=plan.log_interval,
            max_grad_norm=clipping(args),
            dataloader_pin_memory=args.dataloader_pin_memory,
            **arguments.schedule(args, plan.total),
            **self.settings(),
        )
        optimizer = optimizers[0] or arguments.make_optimizer(args, self.strategy, trained)
        trained, optimizer = self.strategy.prepare((trained, optimizer))
        self.inner = trainer_class(
            self.strategy,
            trained,
            optimizer,
            records,
            config=config,
            callbacks=self.our_callbacks(plan.save_every and plan.save_every // plan.log_interval),
            tokenizer=words,
            run_dir=args.output_dir,
            **{name: self.strategy.prepare(model) for name, model in frozen.items()},
        )
        self._eval_records: dict[int, tuple[Any, list[Any]]] = {}
        self.state.max_steps, self.state.num_train_epochs = plan.total, config.max_epochs
        self._waiting: list[tuple[int, dict[str, float]]] = []
        self._losses: list[tuple[int, float]] = []
        self.bridge.notify('on_init_end')

    @classmethod
    def keywords(cls) -> set[str]:
        return super().keywords() | {f.name for f in dataclasses.fields(cls.CONFIG)}

    def check_arguments(self, args: Any) -> None:
        """Raises ValueError for values that the method does not support; may set an argument from its synonym."""

    @abstractmethod
    def make_models(self, model: Any, peft_config: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the Actor or RewardModel to train and a dict of frozen models by our trainer's arguments, not
        prepared. Sets `self.model`."""

    def settings(self) -> dict[str, Any]:
        """Returns fields of our config in addition to those of every trainer."""
        return {}

    def records(self, dataset: Any) -> list[Any]:
        """Returns the records of a dataset for the objective, here preferences."""
        limit = max_length_of(self.args, 'max_length', self.model)
        return load_preferences(dataset, self.processing_class, max_length=limit)[0]

    # ------------------------------------------------------------------ training

    def train(self, resume_from_checkpoint: bool | str | None = None, **unknown: Any) -> TrainOutput:
        """Trains and returns transformers' (global_step, training_loss, metrics). Raises ValueError for other arguments
        of transformers' `train`."""
        if any(value is not None for value in unknown.values()):
            raise ValueError(f'train: {", ".join(unknown)} cannot be honoured here; leave it out')
        self.resume(resume_from_checkpoint)
        start, before = time.perf_counter(), self.inner.batches_done
        self.inner.fit()
        seconds, steps = time.perf_counter() - start, self.inner.batches_done - before
        loss = sum(n * value for n, value in self._losses) / max(sum(n for n, _ in self._losses), 1)
        metrics = {
            'train_runtime': seconds,
            'train_samples_per_second': steps * self.plan.batch_size / seconds,
            'train_steps_per_second': steps / seconds,
            'train_loss': loss,
            'epoch': self._epoch(),
        }
        self.state.log_history.append({**metrics, 'step': self.state.global_step})
        return TrainOutput(self.state.global_step, loss, metrics)

    def _epoch(self) -> float:
        return self.inner.batches_done / self.plan.per_epoch

    def before_training(self) -> None:
        if self.args.eval_on_start and self.eval_dataset is not None:
            self.evaluate()

    def after_batch(self, metrics: Mapping[str, float]) -> None:
        self.state.global_step, self.state.epoch = self.inner.batches_done, self._epoch()
        self.bridge.notify('on_step_end')

    def after_phase(self, metrics: dict[str, float]) -> None:
        """Logs every `logging_steps`, and evaluates at the evaluation interval."""
        step, plan = self.inner.batches_done, self.plan
        last = step == plan.total
        count = step % plan.log_interval or plan.log_interval
        prefix = self.inner.objective.prefix
        self._losses.append((count, metrics[f'{prefix}/loss']))
        self._waiting.append((count, self._trl_metrics(metrics, f'{prefix}/')))
        if step % plan.log_every == 0 or last:
            total = sum(n for n, _ in self._waiting)
            means = {k: sum(n * v[k] for n, v in self._waiting) / total for k in self._waiting[0][1]}
            logs = means | {
                'grad_norm': metrics[f'{prefix}/grad_norm'],
                'learning_rate': metrics[f'{prefix}/lr'],
                'epoch': self._epoch(),
            }
            self._waiting.clear()
            self.log(logs)
            metrics.update(logs)
        ends = last and text_of(self.args, 'eval_strategy') == 'epoch'  # the run's end is that of its last epoch
        if self.eval_dataset is not None and plan.eval_every and (step % plan.eval_every == 0 or ends):
            metrics.update(self.evaluate())

    def _trl_metrics(self, ours: Mapping[str, float], prefix: str = '') -> dict[str, float]:
        return {name: ours[prefix + own] for name, own in self.NAMES.items() if prefix + own in ours}

    # ------------------------------------------------------------------ evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = 'eval'
    ) -> dict[str, float]:
        """Returns and logs the metrics over a dataset or a dict of datasets, as `<prefix>_<name>`.
        Raises ValueError if there is no dataset."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if data is None:
            raise ValueError('evaluate: there is no eval_dataset; give it here or to the trainer')
        if isinstance(data, Mapping) and not hasattr(data, 'column_names'):
            results: dict[str, float] = {}
            for name, part in data.items():
                results |= self.evaluate(part, metric_key_prefix=f'{metric_key_prefix}_{name}')
            return results
        if id(data) not in self._eval_records:  # records cache what is computed once
            self._eval_records[id(data)] = (data, self.inner.objective.records(self.records(data)))
        records = self._eval_records[id(data)][1]
        start = time.perf_counter()
        found = self._trl_metrics(self.inner.evaluate(records))
        seconds = time.perf_counter() - start
        result = {f'{metric_key_prefix}_{name}': value for name, value in found.items()}
        result[f'{metric_key_prefix}_runtime'] = seconds
        result[f'{metric_key_prefix}_samples_per_second'] = len(records) / max(seconds, 1e-9)
        result['epoch'] = self._epoch()
        self.log(result)
        self.bridge.notify('on_evaluate', metrics=result)
        self._note_best(result)
        return result

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        """Sets `state.best_metric`, which transformers' EarlyStoppingCallback compares the next evaluation with."""
        name, state = self.args.metric_for_best_model or '', self.state
        value = metrics.get(name if name.startswith('eval_') else f'eval_{name}')
        sign = 1 if self.args.greater_is_better else -1
        if value is not None and (state.best_metric is None or sign * value > sign * state.best_metric):
            state.best_metric, state.best_global_step = value, state.global_step


def is_real(row: Mapping[str, Any], ending: str = '') -> Tensor:
    """Returns the mask (S,) bool of a tokenized row's `attention_mask<ending>`; without one every token is real."""
    mask = row.get(f'attention_mask{ending}')
    return torch.ones(len(row[f'input_ids{ending}'])).bool() if mask is None else torch.as_tensor(mask).bool()


def with_older_arguments(owner: str, args: Any, config_class: type, older: Mapping[str, Any]) -> Any:
    """Returns `args` with the constructor's arguments of older versions. Raises ValueError for an unknown name."""
    given = {name: value for name, value in older.items() if value is not None}
    if not given:
        return args
    known = {f.name for f in dataclasses.fields(config_class)}
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f'{owner} has no argument {unknown[0]!r}{hint(unknown[0], sorted(known))}')
    if args is None:
        return config_class(**given)
    if not isinstance(args, TrainingArguments):  # which has no place for them
        args = from_transformers(args, config_class)
    for name, value in given.items():
        setattr(args, name, value)
    return args
