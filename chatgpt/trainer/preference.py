"""Preference optimisation without rollouts: DPO and its relatives, ORPO, SimPO. KTO, which needs no pairs, is in `kto`.

Each trainer is a loss over the log-probs of a pair's two answers, which go through one forward. Where a loss compares with a
reference, that is the frozen copy given, or the actor with its adapter off. Left out: how text becomes records (`chatgpt.dataset`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.batching import collate_or_filler, filler
from chatgpt.dataset.tokenize import TokenizedPreference
from chatgpt.functional import preference as losses
from chatgpt.functional.losses import sequence_logprobs
from chatgpt.nn.dropout import dropout_off
from chatgpt.trainer.config import SupervisedConfig
from chatgpt.trainer.learning import BatchStats, micro_batches
from chatgpt.trainer.ppo_setup import has_reference
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.trainer.strategies.named import prepared_by
from chatgpt.trainer.supervised import OneLossTrainer
from chatgpt.types import Batch, Sequence

DPOLoss = Literal['sigmoid', 'ipo', 'cdpo', 'robust', 'hinge']


@dataclass(kw_only=True)
class Pair:
    """Two answers to one prompt, and the reference's log-probs of them where they are known."""

    chosen: Sequence
    rejected: Sequence
    ref_chosen: float | None = None
    ref_rejected: float | None = None

    @property
    def num_tokens(self) -> int:
        """Padded, as both stand in one batch."""
        return 2 * max(self.chosen.num_tokens, self.rejected.num_tokens)


def pairs_of(records: SequenceOf[TokenizedPreference | Pair]) -> list[Pair]:
    """Every pair of answers that differ in rank (`TokenizedPreference.ranks`), of each prompt. Pairs share the answers' `Sequence`s."""
    pairs: list[Pair] = []
    for record in records:
        if isinstance(record, Pair):
            pairs.append(record)
            continue
        ranked = [(rank, answer) for rank, answer in zip(record.ranks(), record.sequences(), strict=True) if rank is not None]
        pairs += [Pair(chosen=a, rejected=b) for (better, a), (worse, b) in combinations(ranked, 2) if better != worse]
    return pairs


@dataclass(kw_only=True)
class PreferenceConfig(SupervisedConfig):
    """What the preference trainers have in common. A record is a pair."""

    max_epochs: int = 1


@dataclass(kw_only=True)
class ReferenceConfig(PreferenceConfig):
    """Of those that compare with a reference."""

    beta: float = 0.1
    """how strongly the policy is held to the reference (Rafailov et al. 2023)"""
    precompute_ref_logprobs: bool = True
    """the reference's log-probs once, before the first step; False computes them with every batch"""


@dataclass(kw_only=True)
class DPOConfig(ReferenceConfig):
    """Every setting of `DPOTrainer`."""

    loss_type: DPOLoss = 'sigmoid'
    """'sigmoid' is DPO (Rafailov et al. 2023), 'ipo' Azar et al. 2023, 'cdpo' Mitchell 2023, 'robust' Chowdhury et al. 2024, 'hinge'
    Zhao et al. 2023"""
    label_smoothing: float | None = None
    """share of labels assumed to be flipped, of 'cdpo' and 'robust' (None: 0.1); the other losses have none"""

    @property
    def flipped_share(self) -> float:
        return 0.1 if self.label_smoothing is None else self.label_smoothing

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        self._one_of('loss_type', get_args(DPOLoss))
        if self.label_smoothing is not None and self.loss_type not in ('cdpo', 'robust'):
            raise ValueError(
                f'label_smoothing={self.label_smoothing} belongs to the losses cdpo and robust, not to {self.loss_type!r}; choose one of '
                'them, or leave it out'
            )


@dataclass(kw_only=True)
class ORPOConfig(PreferenceConfig):
    """Every setting of `ORPOTrainer`."""

    weight: float = 0.1
    """λ of the odds-ratio term (Hong et al. 2024)"""


@dataclass(kw_only=True)
class SimPOConfig(PreferenceConfig):
    """Every setting of `SimPOTrainer`."""

    beta: float = 2.0
    """of the mean log-prob per token (Meng et al. 2024, whose range is 2 to 2.5)"""
    gamma: float = 1.0
    """target margin (Meng et al. 2024: 0.3 to 1.6)"""


class ReferenceModel:
    """Log-probs of sequences under a reference: a frozen model, or the actor with its adapter or trained branch off.

    Raises:
        ValueError: there is neither.
    """

    def __init__(self, strategy: Strategy, actor: nn.Module, initial_model: nn.Module | None, name: str) -> None:
        self.strategy, self.actor, self.initial_model = strategy, actor, initial_model
        if initial_model is None and not has_reference(strategy.unwrap(actor)):
            raise ValueError(f'{name} compares with a reference: pass initial_model, or an actor with lora_rank > 0')

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """(B,) sums over the tokens that count, of a batch on the device."""
        bare: Any = self.strategy.unwrap(self.actor)
        with bare.reference() if self.initial_model is None else nullcontext(), self.strategy.autocast():
            out = (self.initial_model or self.actor)(batch)
        return sequence_logprobs(out.logprobs, batch.action_mask, batch.action_rows, batch.num_sequences)

    def of(self, sequences: list[Sequence], max_tokens: int) -> list[float]:
        """Of any number of sequences, the same list on every rank; computed in shares, and once where one object stands several times."""
        first = {id(s): i for i, s in reversed(list(enumerate(sequences)))}
        mine: list[tuple[int, float]] = []
        for micro in micro_batches(sorted(first.values()), self.strategy, max_tokens, lambda i: sequences[i].num_tokens):
            values = self(collate_or_filler([sequences[i] for i in micro]).to(self.strategy.device)).tolist()
            mine += zip(micro, values, strict=False)
        found = dict(pair for rank in self.strategy.all_gather_object(mine) for pair in rank)
        return [found[first[id(s)]] for s in sequences]


class AnswerTrainer(OneLossTrainer):
    """Base of the trainers over judged answers, with a reference where the loss compares with one.

    Args:
        initial_model: the frozen reference, as prepared, where the loss has one.
    """

    model_name = 'actor'
    needs_reference: ClassVar[bool] = False

    def __init__(
        self,
        strategy: Strategy | str,
        actor: nn.Module,
        optim: Optimizer,
        train_data: SequenceOf[Any],
        eval_data: SequenceOf[Any] | None = None,
        *,
        initial_model: nn.Module | None = None,
        config: Any = None,
        callbacks: SequenceOf[Any] = (),
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        if initial_model is not None and not self.needs_reference:
            raise ValueError(f'{name} has no reference: leave initial_model out')
        strategy, (actor, optim), initial_model = prepared_by(strategy, (actor, optim), initial_model)
        self.reference = ReferenceModel(strategy, actor, initial_model, name) if self.needs_reference else None
        train, held_back = self.records_of(train_data), self.records_of(eval_data or [])
        if train_data and not train:
            raise ValueError(f'{name}: no record has two answers that differ')
        super().__init__(
            strategy, actor, optim, train, held_back or None, config=config, callbacks=callbacks, tokenizer=tokenizer, run_dir=run_dir,
            **kwargs,
        )  # fmt: skip

    @abstractmethod
    def records_of(self, data: SequenceOf[Any]) -> list[Any]:
        """Records from whatever the trainer takes."""

    def training_mode(self) -> None:
        """Dropout off: policy and reference are compared."""
        dropout_off(self.strategy.unwrap(self.model))

    def fit(self) -> None:
        for data in (self.train_data, self.eval_data or []):
            self._add_reference(list(data))
        super().fit()

    def evaluate(self, data: SequenceOf[Any]) -> dict[str, float]:
        """Means over any records that the trainer takes, the same list on every rank."""
        records = self.records_of(data)
        self._add_reference(records)
        return super().evaluate(records)

    def _add_reference(self, records: list[Any]) -> None:
        """Write the reference's log-probs into the records that do not have them, where they are to be precomputed."""
        if self._precomputes:
            bare = self.strategy.unwrap(self.model)
            was_training = bare.training
            dropout_off(bare)  # under LoRA the reference is this very model
            self._fill(records)
            bare.train(was_training)

    @abstractmethod
    def _fill(self, records: list[Any]) -> None:
        """Write the reference's log-probs into those that lack them."""

    def weight_of(self, record: Any) -> int:
        return 1

    def logps(self, batch: Batch, *, average: bool = False) -> Tensor:
        """(B,) log-probs of a batch's answers under the actor."""
        out = self.model(batch)
        return sequence_logprobs(out.logprobs, batch.action_mask, batch.action_rows, batch.num_sequences, average=average)

    @property
    def _precomputes(self) -> bool:
        """Whether every record that reaches a loss has the reference's log-probs."""
        return bool(getattr(self.config, 'precompute_ref_logprobs', False))


class PreferenceTrainer(AnswerTrainer):
    """Base of the trainers over pairs. A subclass has one method: the loss of each pair.

    Metrics, under the trainer's own prefix: `loss`; `accuracy` (share of pairs whose chosen answer has the higher implicit reward),
    `margin`, `reward_chosen`, `reward_rejected` (implicit rewards); `logp_chosen`, `logp_rejected` (nats per answer).

    Args:
        train_data, eval_data: `TokenizedPreference` records or `Pair`s, the same lists on every rank.
        initial_model: the frozen reference, as prepared, where the loss has one.
    """

    average: ClassVar[bool] = False
    """log-probs are means per token instead of sums"""

    @abstractmethod
    def pair_loss(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, and implicit rewards of chosen and rejected, each (B,), from log-probs (B,); without a reference those are zeros."""

    def records_of(self, data: SequenceOf[Any]) -> list[Any]:
        return list(pairs_of(data))

    def collate(self, records: list[Pair]) -> Batch:
        """Chosen, rejected, chosen, ...; a filler pair when there are none."""
        return collate_or_filler([s for p in records for s in (p.chosen, p.rejected)] or [filler(), filler()])

    def _fill(self, records: list[Any]) -> None:
        assert self.reference is not None
        todo = [pair for pair in records if pair.ref_chosen is None]
        if not todo:
            return
        sequences = [s for pair in todo for s in (pair.chosen, pair.rejected)]
        values = self.reference.of(sequences, self.config.max_tokens_per_batch or 16384)
        for pair, chosen, rejected in zip(todo, values[::2], values[1::2], strict=True):
            pair.ref_chosen, pair.ref_rejected = chosen, rejected

    def loss_sum(self, batch: Batch, records: list[Pair], stats: BatchStats) -> Tensor:
        reference = self._reference_of(batch, records)
        logps = self.logps(batch, average=self.average)
        chosen, rejected = logps[::2], logps[1::2]
        per_pair, reward_chosen, reward_rejected = self.pair_loss(chosen, rejected, reference[::2], reference[1::2])
        count = float(len(records))
        weight = 1.0 if records else 0.0  # a filler pair has a forward and no say
        total = per_pair.sum() * weight
        stats.mean('loss', total, count)
        stats.mean('accuracy', (reward_chosen > reward_rejected).float().sum() * weight, count)
        for name, values in (
            ('margin', reward_chosen - reward_rejected), ('reward_chosen', reward_chosen), ('reward_rejected', reward_rejected),
            ('logp_chosen', chosen), ('logp_rejected', rejected),
        ):  # fmt: skip
            stats.mean(name, values.detach().sum() * weight, count)
        return total

    def _reference_of(self, batch: Batch, records: list[Pair]) -> Tensor:
        if self.reference is None or not records:
            if self.reference is not None and not self._precomputes:
                self.reference(batch)  # a collective under a sharded strategy
            return torch.zeros(batch.num_sequences, device=batch.input_ids.device)
        if self._precomputes:
            values = [v for pair in records for v in (pair.ref_chosen, pair.ref_rejected)]
            return torch.tensor(values, dtype=torch.float32, device=batch.input_ids.device)
        return self.reference(batch)


class DPOTrainer(PreferenceTrainer):
    """Direct preference optimisation and its relatives. Implicit reward: β (log π − log π_ref). Metrics `dpo/...`."""

    prefix = 'dpo'
    config_class = DPOConfig
    config: DPOConfig
    needs_reference = True

    def pair_loss(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        margin = losses.dpo_margin(chosen, rejected, ref_chosen, ref_rejected)
        table: dict[str, Callable[[], Tensor]] = {
            'sigmoid': lambda: losses.dpo_loss(margin, beta=c.beta),
            'ipo': lambda: losses.ipo_loss(margin, beta=c.beta),
            'cdpo': lambda: losses.cdpo_loss(margin, beta=c.beta, label_smoothing=c.flipped_share),
            'robust': lambda: losses.robust_dpo_loss(margin, beta=c.beta, label_smoothing=c.flipped_share),
            'hinge': lambda: losses.hinge_loss(margin, beta=c.beta),
        }
        return table[c.loss_type](), c.beta * (chosen - ref_chosen).detach(), c.beta * (rejected - ref_rejected).detach()


class ORPOTrainer(PreferenceTrainer):
    """Odds-ratio preference optimisation: SFT on the chosen answer and a term on the odds. Implicit reward: λ log P. Metrics `orpo/...`."""

    prefix = 'orpo'
    config_class = ORPOConfig
    config: ORPOConfig
    average = True

    def pair_loss(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = self.config.weight
        return losses.orpo_loss(chosen, rejected, weight=weight), weight * chosen.detach(), weight * rejected.detach()


class SimPOTrainer(PreferenceTrainer):
    """SimPO: the mean log-prob per token as reward, with a target margin. Implicit reward: β · log P. Metrics `simpo/...`."""

    prefix = 'simpo'
    config_class = SimPOConfig
    config: SimPOConfig
    average = True

    def pair_loss(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        return losses.simpo_loss(chosen, rejected, beta=c.beta, gamma=c.gamma), c.beta * chosen.detach(), c.beta * rejected.detach()


def without_reference(pairs: SequenceOf[Pair]) -> list[Pair]:
    """Copies that forget the reference's log-probs: for a second run with another reference."""
    return [replace(pair, ref_chosen=None, ref_rejected=None) for pair in pairs]
