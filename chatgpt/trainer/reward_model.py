"""Reward models from preferences (pairs, or several ranked answers to a prompt) or from labelled text.

All answers to a prompt are scored in one forward, each once, and all their pairs count together as one prompt (Ouyang et al. 2022,
equation 1 and section 3.5). Left out: how text becomes records (`chatgpt.dataset`), and the model itself (`chatgpt.nn.RewardModel`).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from chatgpt.batching import collate_or_filler
from chatgpt.dataset.tokenize import TokenizedLabelled, TokenizedPreference
from chatgpt.functional.losses import pairwise_log_exp_loss, pairwise_log_sigmoid_loss, ranked_pairs
from chatgpt.plan.setup import Task
from chatgpt.trainer.callbacks.early_stopping import StopOnPlateau
from chatgpt.trainer.config import Schedule, SupervisedConfig
from chatgpt.trainer.learning import BatchStats, micro_batches
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.trainer.supervised import OneLossTrainer
from chatgpt.types import Batch, Sequence

LossName = Literal['log_sig', 'log_exp']
_TRUE, _FALSE = ('1', 'true', 'yes', 'pos', 'positive', 'good', 'like'), ('0', '-1', 'false', 'no', 'neg', 'negative', 'bad', 'dislike')


@dataclass(kw_only=True)
class RewardModelConfig(SupervisedConfig):
    """Every setting of `RewardModelTrainer`. One record is a prompt with all its answers, or one labelled text."""

    lr_schedule: Schedule = 'cosine'
    max_epochs: int = 1
    """more than one overfits soon (Ouyang et al. 2022, appendix C.2)"""
    loss_fn: LossName = 'log_sig'
    """−log σ(better − worse), or log(1 + exp(worse − better)): the same function, with another way of rounding"""
    use_margins: bool = False
    """subtract the difference of the data's own scores from that of the model's (Touvron et al. 2023, equation 2)"""
    center_rewards_coefficient: float = 0.0
    """weight of the mean of (better + worse)², which keeps scores near 0 (Eisenstein et al. 2023, equation 2); TRL suggests 0.01"""
    positive_label: str | None = None
    """which label of labelled text is a success; None knows 1, true, yes, pos, positive, good, like and their opposites"""
    calibrate: bool = True
    """at the end make the mean score of reference answers 0 (arXiv 2403.17031); they are the best answers where none are given"""
    early_stopping_patience: int | None = None
    """stop after so many evaluations in a row without a better loss on the held-back data"""

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        self._one_of('loss_fn', ('log_sig', 'log_exp'))
        if self.use_margins and self.loss_fn == 'log_exp':
            raise ValueError("use_margins=True needs loss_fn='log_sig'; the log-exp form has no margin")


class RewardModelTrainer(OneLossTrainer):
    """Trains a `RewardModel`.

    Metrics: `rm/loss`; of pairs `rm/accuracy` (share of pairs in the right order), `rm/margin` (mean of better − worse) and
    `rm/score_mean`; of labelled text `rm/accuracy` (score above 0 where the label is a success). On held-back data they are called
    `rm/val_...`.

    Args:
        train_data, eval_data: `TokenizedPreference` or `TokenizedLabelled` records, all of one kind; the same lists on every rank.
        reference_data: sequences whose mean score becomes 0, such as demonstrations; None takes the best answer to each training prompt.

    Raises:
        ValueError: records of two kinds, a label that is neither success nor failure, margins without scores, or early stopping
            without held-back data.
    """

    prefix = 'rm'
    model_name = 'reward_model'
    config_class = RewardModelConfig
    planned_as: Task | None = 'reward_model'
    config: RewardModelConfig

    def __init__(
        self,
        strategy: Strategy | str,
        model: nn.Module,
        optim: Optimizer,
        train_data: SequenceOf[Any],
        eval_data: SequenceOf[Any] | None = None,
        *,
        reference_data: SequenceOf[Sequence] | None = None,
        config: RewardModelConfig | None = None,
        callbacks: SequenceOf[Any] = (),
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        merged = self.config_class.from_dict((config.to_dict() if config is not None else {}) | kwargs)
        if merged.early_stopping_patience is not None:
            if not eval_data:
                raise ValueError('early_stopping_patience needs eval_data to measure on')
            callbacks = [*callbacks, StopOnPlateau('rm/val_loss', mode='min', patience=merged.early_stopping_patience)]
        super().__init__(
            strategy, model, optim, train_data, eval_data, config=merged, callbacks=callbacks, tokenizer=tokenizer, run_dir=run_dir
        )
        self.reference_data = reference_data
        self.is_labelled = isinstance(train_data[0], TokenizedLabelled)
        self._check_records([*train_data, *(eval_data or ())])
        if not any(map(_counts, train_data)):
            raise ValueError('RewardModelTrainer: no record has two answers that differ')

    def _check_records(self, records: list[Any]) -> None:
        kind = TokenizedLabelled if self.is_labelled else TokenizedPreference
        for i, record in enumerate(records):
            if not isinstance(record, kind):
                raise ValueError(f'record {i} is a {type(record).__name__} among {kind.__name__}s; train on one kind')
            if isinstance(record, TokenizedLabelled):
                is_success(record.label, self.config.positive_label)
            elif self.config.use_margins and record.scores is None:
                raise ValueError(f'use_margins=True, but record {i} has no scores')

    def fit(self) -> None:
        """As in the base; then calibrates, where that is asked for."""
        super().fit()
        if self.config.calibrate and not self._stop_requested_by_signal:
            self.calibrate()

    @property
    def _stop_requested_by_signal(self) -> bool:
        return self._signals.received is not None

    # ------------------------------------------------------------------ the loss

    def longest(self) -> int:
        return max(num_tokens(record) // len(answers_of(record)) for record in self.train_data)

    def weight_of(self, record: Any) -> int:
        return _counts(record)

    def collate(self, records: list[Any]) -> Batch:
        return collate_answers(records)

    def length_of(self, record: Any) -> int:
        return num_tokens(record)

    def loss_sum(self, batch: Batch, records: list[Any], stats: BatchStats) -> Tensor:
        return (self._labelled_loss if self.is_labelled else self._pair_loss)(batch, records, stats)

    def _pair_loss(self, batch: Batch, records: list[TokenizedPreference], stats: BatchStats) -> Tensor:
        c = self.config
        scores = self.model(batch)
        pairs, margins = pairs_of(records, scores.device)
        better, worse = scores[pairs.better], scores[pairs.worse]
        if c.loss_fn == 'log_exp':
            losses = pairwise_log_exp_loss(better, worse)
        else:
            losses = pairwise_log_sigmoid_loss(better, worse, margins if c.use_margins else None)
        if c.center_rewards_coefficient:
            losses = losses + c.center_rewards_coefficient * (better + worse).square()
        total = (losses * pairs.weights).sum() + 0.0 * scores.sum()  # without a pair the forward still has a backward
        count = torch.tensor(float(len(pairs.better)))
        stats.mean('loss', total, float(sum(_counts(r) for r in records)))
        stats.mean('accuracy', (better > worse).float().sum(), count)
        stats.mean('margin', (better - worse).sum(), count)
        stats.mean('score_mean', scores.sum() if records else scores.sum() * 0.0, float(len(scores) if records else 0))
        return total

    def _labelled_loss(self, batch: Batch, records: list[TokenizedLabelled], stats: BatchStats) -> Tensor:
        """Binary cross-entropy with σ(score) as the probability of a success."""
        scores = self.model(batch)
        targets = [float(is_success(r.label, self.config.positive_label)) for r in records]
        target = torch.tensor(targets or [0.0], device=scores.device)
        weight = 1.0 if records else 0.0
        total = F.binary_cross_entropy_with_logits(scores, target, reduction='sum') * weight
        stats.mean('loss', total, float(len(records)))
        stats.mean('accuracy', ((scores > 0) == (target > 0.5)).float().sum() * weight, float(len(records)))
        stats.mean('score_mean', scores.sum() * weight, float(len(records)))
        return total

    # ------------------------------------------------------------------ calibration

    @torch.no_grad()
    def calibrate(self, sequences: SequenceOf[Sequence] | None = None) -> float:
        """Subtract the mean score of reference answers from every score from now on; that mean, before.

        Args:
            sequences: None takes `reference_data`, else the best answer to each training prompt, or all labelled texts.
        """
        chosen = list(sequences or self.reference_data or [answers_of(r)[0] for r in self.train_data])
        bare: Any = self.strategy.unwrap(self.model)
        was_training = bare.training
        bare.eval()
        stats = BatchStats()
        for micro in micro_batches(chosen, self.strategy, self.config.max_tokens_per_batch or 16384, lambda s: s.num_tokens):
            with self.strategy.autocast():
                scores = self.model(collate_or_filler(micro).to(self.strategy.device))
            stats.mean('score_mean', scores[: len(micro)].sum(), float(len(micro)))
        bare.train(was_training)
        mean = stats.reduced(self.strategy)['score_mean']
        bare.calibrate(mean)
        return mean


def is_success(label: bool | int | float | str, positive_label: str | None = None) -> bool:
    """Whether a label means a success.

    Raises:
        ValueError: it is neither of `positive_label` and another one, nor one of the known words.
    """
    text = str(label).strip().lower()
    if positive_label is not None:
        return text == positive_label.strip().lower()
    text = {'1.0': '1', '0.0': '0', '-1.0': '-1'}.get(text, text)
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f'label {label!r} is neither a success nor a failure; say which one is with positive_label')


def answers_of(record: TokenizedPreference | TokenizedLabelled) -> list[Sequence]:
    """The sequences of a record, best first."""
    return [record.sequence] if isinstance(record, TokenizedLabelled) else record.sequences()


def collate_answers(records: list[Any]) -> Batch:
    """All answers of all records, one after another; a zero-weight row when there are none."""
    return collate_or_filler([s for r in records for s in answers_of(r)])


def num_tokens(record: TokenizedPreference | TokenizedLabelled) -> int:
    """Padded tokens of a record: its answers stay in one forward."""
    answers = answers_of(record)
    return len(answers) * max(s.num_tokens for s in answers)


def pairs_of(records: list[TokenizedPreference], device: torch.device) -> tuple[Any, Tensor]:
    """`ranked_pairs` over the rows of `collate_answers` (see `TokenizedPreference.ranks`), and each pair's margin (P,) by the data's scores
    (0 without)."""
    groups: list[int] = []
    ranks: list[float] = []
    scores: list[float] = []
    for number, record in enumerate(records):
        for rank in record.ranks():
            groups.append(number if rank is not None else -1 - len(groups))  # alone in its group: no pair
            ranks.append(rank or 0)
        scores += record.scores or [0.0] * len(record.responses)
    pairs = ranked_pairs(torch.tensor(groups, dtype=torch.int64), torch.tensor(ranks))
    data_scores = torch.tensor(scores)
    margins = data_scores[pairs.better] - data_scores[pairs.worse]
    return type(pairs)(*(t.to(device) for t in pairs)), margins.to(device)


def _counts(record: TokenizedPreference | TokenizedLabelled) -> int:
    """Whether a record has anything to learn from."""
    return 1 if isinstance(record, TokenizedLabelled) else int(record.has_pair)
