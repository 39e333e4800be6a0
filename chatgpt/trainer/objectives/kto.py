"""KTO: learning from answers labelled good or bad (Ethayarajh et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.data.tokenize import TokenizedLabelled, TokenizedPreference
from chatgpt.functional.losses import sequence_logprobs
from chatgpt.functional.preference import kto_loss
from chatgpt.nn.layouts import remaining_positions
from chatgpt.trainer.experience.reference import Reference
from chatgpt.trainer.metrics import Mean, Metrics
from chatgpt.trainer.objectives.config import KTOConfig
from chatgpt.trainer.objectives.pairs import AgainstReference, Pair
from chatgpt.trainer.objectives.reward_model import is_success
from chatgpt.trainer.offline import Method, Objective, OfflineTrainer, mean_over
from chatgpt.types import Batch, Sequence


@dataclass(kw_only=True)
class LabelledAnswer:
    """An answer with its label."""

    sequence: Sequence
    is_desirable: bool
    ref_logp: float | None = None


class KTOObjective(Objective):
    """Objective of KTO. z0 is estimated in every train batch from answers paired with another prompt, over all ranks,
    and is a constant of the loss."""

    prefix = 'kto'
    uses_dropout = False

    def __init__(self, config: KTOConfig, reference: Reference) -> None:
        self.config = config
        self.model, self.strategy, self.reference_model = reference.actor, reference.strategy, reference
        self.reference = AgainstReference(reference, config)
        self.prompts: list[Tensor] = []
        """prompts of the training data, for a batch with only one prompt"""

    def records(self, data: SequenceOf[Any]) -> list[LabelledAnswer]:
        records: list[LabelledAnswer] = []
        for record in data:
            if isinstance(record, LabelledAnswer):
                records.append(replace(record))  # `prepare` fills it in, for this reference
            elif isinstance(record, TokenizedLabelled):
                good = is_success(record.label, self.config.positive_label)
                records.append(LabelledAnswer(sequence=record.sequence, is_desirable=good))
            elif isinstance(record, TokenizedPreference):
                records += answers_of(record)
            elif isinstance(record, Pair):
                records.append(LabelledAnswer(sequence=record.chosen, is_desirable=True))
                records.append(LabelledAnswer(sequence=record.rejected, is_desirable=False))
            else:
                raise ValueError(
                    f'KTOTrainer learns from labelled answers or preferences, not from a {type(record).__name__}'
                )
        return records

    def accept(
        self, train_data: SequenceOf[Any], eval_data: SequenceOf[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        train, for_eval = super().accept(train_data, eval_data)
        if train:
            check_both_kinds('KTOTrainer', (r.is_desirable for r in train))
        self.prompts = [r.sequence.prompt_ids for r in train]
        return train, for_eval

    def prepare(self, records: list[LabelledAnswer]) -> None:
        todo = [r for r in records if r.ref_logp is None] if self.reference.precomputes else []
        if todo:
            for record, value in zip(todo, self.reference.of([r.sequence for r in todo]), strict=True):
                record.ref_logp = value

    def sequences(self, record: LabelledAnswer) -> list[Sequence]:
        return [record.sequence]

    def weight(self, record: LabelledAnswer) -> int:
        return 1

    def columns(self, records: list[LabelledAnswer]) -> dict[str, Tensor]:
        """Returns `desirable` per sequence, and the positions of both kinds, `good` and `bad`: the host knows an index,
        while a mask would make it wait for the device."""
        kinds = [r.is_desirable for r in records]
        return {
            'desirable': torch.tensor(kinds, dtype=torch.bool),
            'good': torch.tensor([i for i, good in enumerate(kinds) if good], dtype=torch.int64),
            'bad': torch.tensor([i for i, good in enumerate(kinds) if not good], dtype=torch.int64),
        } | self.reference.column([r.ref_logp for r in records])

    def totals(self, records: list[LabelledAnswer]) -> dict[str, float]:
        return super().totals(records) | {'z0': self._reference_point(records)}

    @torch.no_grad()
    def _reference_point(self, records: list[LabelledAnswer]) -> float:
        """Returns z0 = max(0, mean of log π − log π_ref over answers paired with another prompt), over all ranks. A
        prompt that does not fit into the model's positions with that answer is cut on the left."""
        config, crossed = getattr(getattr(self.reference_model.bare, 'model', None), 'config', None), []
        for r, other in zip(records, self._other_prompts(records), strict=True):
            room = None if config is None else remaining_positions(config, len(r.sequence.response_ids))
            cut = 0 if room is None else max(len(other) - max(room, 1), 0)
            crossed.append(replace(r.sequence, prompt_ids=other[cut:]))

        def log_ratios(batch: Batch) -> Tensor:
            reference = self.reference_model.sums(batch)
            return _logps(self.model, batch) - reference

        return max(mean_over(self.strategy, crossed, log_ratios, self.config.max_tokens_per_batch), 0.0)

    def _other_prompts(self, records: list[LabelledAnswer]) -> list[Tensor]:
        """Returns, for each record, the next prompt that differs from its own, from these records or else from the
        training data; its own if all are the same."""
        prompts = [r.sequence.prompt_ids for r in records]
        if all(torch.equal(prompts[0], p) for p in prompts):
            return [next((p for p in self.prompts if not torch.equal(p, prompts[0])), prompts[0])] * len(prompts)
        others: list[Tensor] = []
        other = next(p for p in prompts if not torch.equal(p, prompts[-1]))
        for own, following in zip(reversed(prompts), reversed([*prompts[1:], prompts[0]]), strict=True):
            other = other if torch.equal(own, following) else following
            others.append(other)
        return others[::-1]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        c, mask, z0 = self.config, batch.sequence_mask, batch.totals['z0']
        reference = self.reference.logps(batch)
        logps = _logps(model, batch)
        desirable = batch.columns['desirable']
        per_answer = kto_loss(
            logps - reference,
            desirable,
            z0,
            beta=c.beta,
            desirable_weight=c.desirable_weight,
            undesirable_weight=c.undesirable_weight,
        )
        total, count = (per_answer * mask).sum(), mask.sum()
        rewards = c.beta * (logps - reference).detach() * mask
        metrics: Metrics = {
            'loss': Mean(total, count),
            'reward_chosen': Mean(rewards[batch.columns['good']].sum(), (mask & desirable).sum(), of_some=True),
            'reward_rejected': Mean(rewards[batch.columns['bad']].sum(), (mask & ~desirable).sum(), of_some=True),
            'kl': Mean((count.double() * z0).float(), count),
        }
        return total / batch.totals['weight'], metrics

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {'margin': metrics['reward_chosen'] - metrics['reward_rejected']}


def answers_of(record: TokenizedPreference) -> list[LabelledAnswer]:
    """Returns a preference's answers: those of the highest rank as desirable, the others as undesirable. None without a
    difference in rank; a repeated answer counts once."""
    if not record.has_pair:
        return []
    ranked = zip(record.ranks(), record.sequences(), strict=True)
    return [LabelledAnswer(sequence=s, is_desirable=rank == 0) for rank, s in ranked if rank is not None]


def check_both_kinds(source: Any, desirable: Iterable[bool]) -> None:
    """Raises ValueError for answers that are all good or all bad: training would only raise, or only lower, their
    log-probs."""
    labels = list(desirable)
    good = sum(labels)
    if good in (0, len(labels)):
        raise ValueError(
            f'{source}: KTO needs good and bad answers, and there are {good} good and {len(labels) - good} bad ones: '
            'add some of the other kind, name the good label with positive_label, or train on the good ones with sft'
        )


def _logps(model: nn.Module, batch: Batch) -> Tensor:
    return sequence_logprobs(model(batch).logprobs, batch.action_mask, batch.action_rows, batch.num_sequences)


KTO = Method(KTOConfig, KTOObjective, compares=True)


class KTOTrainer(OfflineTrainer):
    """Trains an `Actor` by KTO. Metrics `kto/...`: `loss`, `reward_chosen` and `reward_rejected` (mean implicit reward
    β (log π − log π_ref) of desirable and undesirable answers), `margin` (their difference over the batch), `kl` (z0,
    nats).

    Args:
        train_data, eval_data: `TokenizedLabelled` or `LabelledAnswer` records, or preferences, with the best answers as
            desirable and the others as undesirable.
        options: as for `DPOTrainer`, with the fields of `KTOConfig`.
    """

    config: KTOConfig

    own_method = KTO
