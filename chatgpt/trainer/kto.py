"""KTO: learning from answers that are each just good or bad (Ethayarajh et al. 2024). Left out: pairs (`preference`)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chatgpt.batching import collate_or_filler
from chatgpt.dataset.tokenize import TokenizedLabelled, TokenizedPreference
from chatgpt.functional.preference import kto_loss
from chatgpt.trainer.learning import BatchStats, Work, micro_batches
from chatgpt.trainer.preference import AnswerTrainer, Pair, ReferenceConfig
from chatgpt.trainer.reward_model import is_success
from chatgpt.types import Batch, Sequence


@dataclass(kw_only=True)
class KTOConfig(ReferenceConfig):
    """Every setting of `KTOTrainer`. A record is one judged answer."""

    train_batch_size: int = 8
    """answers of one optimizer step, all ranks together; at least 2, for each is compared with another's prompt"""
    desirable_weight: float = 1.0
    """λ_D; the paper keeps λ_D n_D / (λ_U n_U) between 1 and 4/3"""
    undesirable_weight: float = 1.0
    """λ_U"""
    positive_label: str | None = None
    """which label is a success; None knows true, 1, good, positive and their opposites"""


@dataclass(kw_only=True)
class Judged:
    """An answer and its judgement."""

    sequence: Sequence
    is_desirable: bool
    ref_logp: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.sequence.num_tokens


class KTOTrainer(AnswerTrainer):
    """Metrics `kto/...`: `loss`, `reward_chosen` and `reward_rejected` (mean implicit reward β (log π − log π_ref) of desirable and
    undesirable answers), `margin` (their difference over the batch), `kl` (z0, nats).

    z0 is estimated in every train batch from answers put under another prompt, over all ranks, and is a constant.

    Args:
        train_data, eval_data: `TokenizedLabelled` or `Judged` records, or preferences, whose best answer is desirable and whose others are
            not.
    """

    prefix = 'kto'
    config_class = KTOConfig
    config: KTOConfig
    needs_reference = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get('config')
        self._positive_label = kwargs.get('positive_label', given.positive_label if given is not None else None)
        super().__init__(*args, **kwargs)

    def records_of(self, data: SequenceOf[Any]) -> list[Any]:
        records: list[Judged] = []
        for record in data:
            if isinstance(record, Judged):
                records.append(record)
            elif isinstance(record, TokenizedLabelled):
                records.append(Judged(sequence=record.sequence, is_desirable=is_success(record.label, self._positive_label)))
            elif isinstance(record, TokenizedPreference):
                records += [Judged(sequence=s, is_desirable=i == 0) for i, s in enumerate(record.sequences())]
            elif isinstance(record, Pair):
                records += [Judged(sequence=record.chosen, is_desirable=True), Judged(sequence=record.rejected, is_desirable=False)]
            else:
                raise ValueError(f'KTOTrainer learns from labelled answers or preferences, not from a {type(record).__name__}')
        return records

    def _fill(self, records: list[Any]) -> None:
        assert self.reference is not None
        todo = [r for r in records if r.ref_logp is None]
        if todo:
            values = self.reference.of([r.sequence for r in todo], self.config.max_tokens_per_batch or 16384)
            for record, value in zip(todo, values, strict=True):
                record.ref_logp = value

    def work_of(self, records: list[Judged], divisor: int) -> Work:
        self._reference_point = self._estimate(records)
        return super().work_of(records, divisor)

    def collate(self, records: list[Judged]) -> Batch:
        return collate_or_filler([r.sequence for r in records])

    @torch.no_grad()
    def _estimate(self, records: list[Judged]) -> float:
        """z0 = max(0, mean of log π − log π_ref over answers under another prompt), over all ranks."""
        assert self.reference is not None
        crossed = [
            Sequence(prompt_ids=other, response_ids=r.sequence.response_ids, response_mask=r.sequence.response_mask)
            for r, other in zip(records, self._other_prompts(records), strict=True)
        ]
        stats = BatchStats()
        for micro in micro_batches(crossed, self.strategy, self.config.max_tokens_per_batch, lambda s: s.num_tokens):
            batch = collate_or_filler(micro).to(self.strategy.device)
            reference = self.reference(batch)
            with self.strategy.autocast():
                logps = self.logps(batch)
            stats.mean('log_ratio', (logps - reference)[: len(micro)].sum(), float(len(micro)))
        return max(stats.reduced(self.strategy)['log_ratio'], 0.0)

    def _other_prompts(self, records: list[Judged]) -> list[Tensor]:
        """For each record the next prompt that is not its own: of these records, else of the training data. All have one prompt: that."""
        prompts = [r.sequence.prompt_ids for r in records]
        if all(torch.equal(prompts[0], p) for p in prompts):
            everywhere = (r.sequence.prompt_ids for r in self.train_data)
            return [next((p for p in everywhere if not torch.equal(p, prompts[0])), prompts[0])] * len(prompts)
        others: list[Tensor] = []
        other = next(p for p in prompts if not torch.equal(p, prompts[-1]))
        for own, following in zip(reversed(prompts), reversed([*prompts[1:], prompts[0]]), strict=True):
            other = other if torch.equal(own, following) else following
            others.append(other)
        return others[::-1]

    def loss_sum(self, batch: Batch, records: list[Any], stats: BatchStats) -> Tensor:
        c = self.config
        reference = self._reference_of(batch, records)
        logps = self.logps(batch)
        desirable = torch.tensor([r.is_desirable for r in records] or [True], device=logps.device)
        per_answer = kto_loss(
            logps - reference, desirable, self._reference_point, beta=c.beta, desirable_weight=c.desirable_weight,
            undesirable_weight=c.undesirable_weight,
        )  # fmt: skip
        weight = 1.0 if records else 0.0
        total = per_answer.sum() * weight
        rewards = c.beta * (logps - reference).detach() * weight
        good = desirable & bool(records)
        stats.mean('loss', total, float(len(records)))
        stats.mean('reward_chosen', rewards[good].sum(), good.sum())
        stats.mean('reward_rejected', rewards[~desirable].sum(), (~desirable).sum())
        stats.mean('kl', torch.tensor(self._reference_point * len(records)), float(len(records)))
        return total

    def _reference_of(self, batch: Batch, records: list[Any]) -> Tensor:
        assert self.reference is not None
        if self._precomputes:
            values = [r.ref_logp for r in records] or [0.0] * batch.num_sequences
            return torch.tensor(values, dtype=torch.float32, device=batch.input_ids.device)
        return self.reference(batch)

    def after_evaluation(self, metrics: dict[str, float]) -> dict[str, float]:
        chosen, rejected = (next((v for k, v in metrics.items() if k.endswith(f'/reward_{n}')), None) for n in ('chosen', 'rejected'))
        if chosen is None or rejected is None:
            return metrics
        prefix = next(k for k in metrics if k.endswith('/reward_chosen')).split('/')[0]
        return metrics | {f'{prefix}/margin': chosen - rejected}
