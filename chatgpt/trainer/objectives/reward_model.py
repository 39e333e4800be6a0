"""Reward models from preferences (pairs, or several ranked answers to a prompt) or from labelled text.

One forward scores all answers to a prompt, each once; all their pairs together count as one prompt (Ouyang et al. 2022,
equation 1 and section 3.5).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from chatgpt.data.tokenize import TokenizedLabelled, TokenizedPreference
from chatgpt.functional.losses import pairwise_log_exp_loss, pairwise_log_sigmoid_loss, ranked_pairs, right_order
from chatgpt.nn.trunk import in_eval_mode
from chatgpt.rules import check
from chatgpt.strategies.base import Strategy
from chatgpt.trainer.callbacks.early_stopping import StopOnPlateau
from chatgpt.trainer.callbacks.progress import ProgressBar
from chatgpt.trainer.metrics import Mean, Metrics
from chatgpt.trainer.objectives.config import RewardModelConfig
from chatgpt.trainer.offline import Method, Objective, OfflineTrainer, check_patience, mean_over, of_kind
from chatgpt.trainer.rules import LABELLED_RULES, PAIR_RULES
from chatgpt.trainer.schedule import permutation
from chatgpt.types import Batch, Sequence

_TRUE, _FALSE = (
    ('1', 'true', 'yes', 'pos', 'positive', 'good', 'like'),
    ('0', '-1', 'false', 'no', 'neg', 'negative', 'bad', 'dislike'),
)


class _RewardObjective(Objective):
    prefix = 'rm'
    model_name = 'reward_model'

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config

    def callbacks(self) -> list[Any]:
        patience = self.config.early_stopping_patience
        return [] if patience is None else [StopOnPlateau('rm/val_loss', mode='min', patience=patience)]

    def accept(
        self, train_data: SequenceOf[Any], eval_data: SequenceOf[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        if self.config.early_stopping_patience is not None and not eval_data:
            raise ValueError('early_stopping_patience needs eval_data to measure on')
        check_patience(self.config.early_stopping_patience, self.config.max_epochs)
        train, for_eval = super().accept(train_data, eval_data)
        if train and not any(map(self.weight, train)):
            raise ValueError('RewardModelTrainer: no record has two answers that differ')
        return train, for_eval


class PairwiseObjective(_RewardObjective):
    """−log σ of the difference of scores, over all pairs of a prompt's answers. A record is a prompt with its
    answers."""

    def records(self, data: SequenceOf[Any]) -> list[TokenizedPreference]:
        records = of_kind(data, TokenizedPreference)
        check(self.config, PAIR_RULES)
        for i, record in enumerate(records):
            if self.config.use_margins and record.scores is None:
                raise ValueError(f'use_margins=True, but record {i} has no scores')
        return records

    def sequences(self, record: TokenizedPreference) -> list[Sequence]:
        return record.sequences()

    def weight(self, record: TokenizedPreference) -> int:
        """Returns 1 if the record has a pair, else 0."""
        return int(record.has_pair)

    def columns(self, records: list[TokenizedPreference]) -> dict[str, Tensor]:
        """Returns, per pair, the positions `better` and `worse`, `pair_weight`, and `margin` from the data's scores (0
        without); per sequence `prompt`, 1 at the first answer of a prompt that has pairs."""
        groups: list[int] = []
        ranks: list[float] = []
        scores: list[float] = []
        prompt: list[float] = []
        for number, record in enumerate(records):
            prompt += [float(self.weight(record)), *[0.0] * (len(record.responses) - 1)]
            for rank in record.ranks():
                groups.append(number if rank is not None else -1 - len(groups))  # a group of its own, without pairs
                ranks.append(rank or 0)
            scores += record.scores or [0.0] * len(record.responses)
        pairs = ranked_pairs(torch.tensor(groups, dtype=torch.int64), torch.tensor(ranks))
        data_scores = torch.tensor(scores)
        return {
            'better': pairs.better,
            'worse': pairs.worse,
            'pair_weight': pairs.weights,
            'margin': data_scores[pairs.better] - data_scores[pairs.worse],
            'prompt': torch.tensor(prompt),
        }

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        c, columns = self.config, batch.columns
        scores, weights = model(batch), columns['pair_weight']
        better, worse = scores[columns['better']], scores[columns['worse']]
        if c.loss_fn == 'log_exp':
            losses = pairwise_log_exp_loss(better, worse)
        else:
            losses = pairwise_log_sigmoid_loss(better, worse, columns['margin'] if c.use_margins else None)
        if c.center_rewards_coefficient:
            losses = losses + c.center_rewards_coefficient * (better + worse).square()
        total = (losses * weights).sum() + 0.0 * scores.sum()  # a batch without pairs needs a backward too
        counts = weights > 0
        metrics: Metrics = {
            'loss': Mean(total, columns['prompt'].sum()),
            'accuracy': Mean(right_order(better - worse, counts), counts.sum()),
            'margin': Mean(((better - worse) * counts).sum(), counts.sum()),
            'score_mean': Mean((scores * batch.sequence_mask).sum(), batch.sequence_mask.sum()),
        }
        return total / batch.totals['weight'], metrics


class LabelledObjective(_RewardObjective):
    """Binary cross-entropy with σ(score) as the probability of success. A record is a labelled text."""

    def records(self, data: SequenceOf[Any]) -> list[TokenizedLabelled]:
        records = of_kind(data, TokenizedLabelled)
        check(self.config, LABELLED_RULES)
        for record in records:
            is_success(record.label, self.config.positive_label)
        return records

    def accept(
        self, train_data: SequenceOf[Any], eval_data: SequenceOf[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        train, for_eval = super().accept(train_data, eval_data)
        name = self.config.positive_label
        if name is not None and not any(is_success(record.label, name) for record in train):
            found = ', '.join(sorted({repr(record.label) for record in train})[:5])
            raise ValueError(f'positive_label={name!r} is the label of no record; there are {found}')
        return train, for_eval

    def sequences(self, record: TokenizedLabelled) -> list[Sequence]:
        return [record.sequence]

    def weight(self, record: TokenizedLabelled) -> int:
        return 1

    def columns(self, records: list[TokenizedLabelled]) -> dict[str, Tensor]:
        return {'target': torch.tensor([float(is_success(r.label, self.config.positive_label)) for r in records])}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        scores, target, mask = model(batch), batch.columns['target'], batch.sequence_mask
        total = (F.binary_cross_entropy_with_logits(scores, target, reduction='none') * mask).sum()
        right = ((scores > 0) == (target > 0.5)) & mask
        metrics: Metrics = {
            'loss': Mean(total, mask.sum()),
            'accuracy': Mean(right.float().sum(), mask.sum()),
            'score_mean': Mean((scores * mask).sum(), mask.sum()),
        }
        return total / batch.totals['weight'], metrics


class RewardModelTrainer(OfflineTrainer):
    """Trains a `RewardModel`.

    Metrics: `rm/loss`; for pairs `rm/accuracy` (share of pairs in the right order; equal scores count 1/2),
    `rm/margin` (mean of better − worse) and `rm/score_mean`; for labelled text `rm/accuracy` (share with a score above
    0 exactly for successes). For eval data `rm/val_...`.

    Args:
        train_data, eval_data: `TokenizedPreference` or `TokenizedLabelled` records, all of one type; the same lists on
            every rank.
        reference_data: sequences that get the mean score 0, such as demonstrations; None takes the best answer to each
            training prompt.
        options: `config`, `callbacks`, `tokenizer`, `run_dir` of `OfflineTrainer`, and fields of `RewardModelConfig`.

    Raises:
        ValueError: records of two types, a label that is neither success nor failure, margins without scores, or early
            stopping without eval data.
    """

    config: RewardModelConfig

    def __init__(
        self,
        strategy: Strategy | str,
        model: nn.Module,
        optim: Optimizer,
        train_data: SequenceOf[Any],
        *args: Any,
        reference_data: SequenceOf[Sequence] | None = None,
        **options: Any,
    ) -> None:
        is_labelled = len(train_data) > 0 and isinstance(train_data[0], TokenizedLabelled)
        method = LABELLED if is_labelled else PAIRWISE
        super().__init__(strategy, model, optim, train_data, *args, method=method, **options)
        self.reference_data = reference_data

    def fit(self) -> None:
        """Trains as the base does; then calibrates, if set. Scores of labelled text are logits, which stay as they are
        unless there is `reference_data`."""
        super().fit()
        if self.config.calibrate and (isinstance(self.objective, PairwiseObjective) or self.reference_data):
            self.calibrate()

    @torch.no_grad()
    def calibrate(self, sequences: SequenceOf[Sequence] | None = None) -> float:
        """Subtracts the mean score of reference answers from all scores from now on. Returns that mean.

        Args:
            sequences: None takes `reference_data`, else the best answer to each training prompt, or all labelled texts;
                at most `calibration_samples` of them, sampled with the seed. Given sequences are all read.
        """
        if sequences is None:
            found = list(self.reference_data or self.train_data)
            drawn = permutation(len(found), self.strategy.seed)[: self.config.calibration_samples]
            kept = [found[i] for i in sorted(drawn)]
            sequences = kept if self.reference_data else [self.objective.sequences(r)[0] for r in kept]
        bare: Any = self.strategy.unwrap(self.model)
        chosen = list(sequences)
        if not chosen:
            raise ValueError('calibrate: there is no sequence')

        def shown(cuts: list[list[int]]) -> Iterable[list[int]]:
            bars = (c for c in self.callbacks.callbacks if isinstance(c, ProgressBar))
            return next((bar.over(self, f'calibrate on {len(chosen)} answers', cuts) for bar in bars), cuts)

        with in_eval_mode(bare):
            mean = mean_over(self.strategy, chosen, self.model, self.config.max_tokens_per_batch, shown)
        bare.calibrate(mean)
        return mean


def is_success(label: bool | int | float | str, positive_label: str | None = None) -> bool:
    """Returns True if a label means success.

    Raises:
        ValueError: without `positive_label`, a label that is not one of the known words.
    """

    def plain(value: Any) -> str:
        text = str(value).strip().lower()
        return {'1.0': '1', '0.0': '0', '-1.0': '-1'}.get(text, text)

    text = plain(label)
    if positive_label is not None:
        return text == plain(positive_label)
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f'label {label!r} is neither a success nor a failure; say which one is with positive_label')


PAIRWISE = Method(RewardModelConfig, PairwiseObjective)
LABELLED = Method(RewardModelConfig, LabelledObjective)
