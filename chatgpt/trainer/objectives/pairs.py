"""Preference optimisation without rollouts: DPO and its relatives, ORPO, SimPO. KTO, which needs no pairs, is in `kto`.

Each method is a loss over the log-probs of a pair's two answers, which go through one forward. Where a loss compares
with a reference, that is the frozen copy given, or the actor with its adapter off. Left out: how text becomes records
(`chatgpt.dataset`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.dataset.tokenize import TokenizedPreference
from chatgpt.functional import preference as losses
from chatgpt.functional.losses import sequence_logprobs
from chatgpt.nn.dropout import dropout_off
from chatgpt.trainer.config import SupervisedConfig
from chatgpt.trainer.metrics import Mean, Metrics
from chatgpt.trainer.offline import SWEEP_TOKENS, Objective, OfflineTrainer, merged
from chatgpt.trainer.reference import ReferenceModel
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.trainer.strategies.named import prepared_by
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
    """Every pair of answers that differ in rank (`TokenizedPreference.ranks`), of each prompt. Pairs share the answers'
    `Sequence`s."""
    pairs: list[Pair] = []
    for record in records:
        if isinstance(record, Pair):
            pairs.append(record)
            continue
        ranked = [
            (rank, answer) for rank, answer in zip(record.ranks(), record.sequences(), strict=True) if rank is not None
        ]
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
    """'sigmoid' is DPO (Rafailov et al. 2023), 'ipo' Azar et al. 2023, 'cdpo' Mitchell 2023, 'robust' Chowdhury et al.
    2024, 'hinge' Zhao et al. 2023"""
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
                f'label_smoothing={self.label_smoothing} belongs to the losses cdpo and robust, not to '
                f'{self.loss_type!r}; choose one of '
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


PairLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(chosen, rejected, ref_chosen, ref_rejected), log-probs (B,); without a reference those are zeros -> the loss of each
pair, and implicit rewards of chosen and rejected, (B,) each"""


class AgainstReference:
    """The reference's log-probs of a method's records: once for each record before the first step, or with every batch.

    Args:
        reference: None where the method has none.
        precompute: once.
    """

    def __init__(self, reference: ReferenceModel | None, *, precompute: bool, max_tokens: int | None) -> None:
        self.reference, self.max_tokens = reference, max_tokens or SWEEP_TOKENS
        self.precomputes = reference is not None and precompute

    def of(self, sequences: list[Sequence]) -> list[float]:
        """Of sequences that all ranks hold."""
        assert self.reference is not None
        bare = self.reference.strategy.unwrap(self.reference.actor)
        was_training = bare.training
        dropout_off(bare)  # under LoRA the reference is this very model
        values = self.reference.of(sequences, self.max_tokens)
        bare.train(was_training)
        return values

    def column(self, values: SequenceOf[float | None]) -> dict[str, Tensor]:
        """The column `ref_logps` of sequences' precomputed values."""
        return {'ref_logps': torch.tensor(values, dtype=torch.float32)} if self.precomputes else {}

    def logps(self, batch: Batch) -> Tensor:
        """(B,), zeros without a reference."""
        if self.precomputes:
            return batch.columns['ref_logps']
        if self.reference is None:
            return torch.zeros(batch.num_sequences, device=batch.input_ids.device)
        return self.reference(batch)


class PairObjective(Objective):
    """A loss over pairs. Metrics: `loss`; `accuracy` (share of pairs whose chosen answer has the higher implicit
    reward), `margin`, `reward_chosen`, `reward_rejected` (implicit rewards); `logp_chosen`, `logp_rejected` (nats per
    answer).

    Args:
        prefix: of the metrics.
        pair_loss: see `PairLoss`.
        average: log-probs are means per token instead of sums.
    """

    num_dummies = 2
    uses_dropout = False

    def __init__(self, prefix: str, pair_loss: PairLoss, reference: AgainstReference, *, average: bool = False) -> None:
        self.prefix = prefix  # type: ignore[misc]
        self.pair_loss, self.reference, self.average = pair_loss, reference, average

    def records(self, data: SequenceOf[Any]) -> list[Pair]:
        pairs = pairs_of(data)
        if len(data) and not pairs:
            raise ValueError(f'{self.prefix}: no record has two answers that differ')
        return pairs

    def prepare(self, records: list[Pair]) -> None:
        todo = [pair for pair in records if pair.ref_chosen is None] if self.reference.precomputes else []
        if todo:
            values = self.reference.of([s for pair in todo for s in (pair.chosen, pair.rejected)])
            for pair, chosen, rejected in zip(todo, values[::2], values[1::2], strict=True):
                pair.ref_chosen, pair.ref_rejected = chosen, rejected

    def sequences(self, record: Pair) -> list[Sequence]:
        return [record.chosen, record.rejected]

    def weight(self, record: Pair) -> int:
        return 1

    def columns(self, records: list[Pair]) -> dict[str, Tensor]:
        return self.reference.column([v for pair in records for v in (pair.ref_chosen, pair.ref_rejected)])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        reference = self.reference.logps(batch)
        out = model(batch)
        logps = sequence_logprobs(
            out.logprobs, batch.action_mask, batch.action_rows, batch.num_sequences, average=self.average
        )
        chosen, rejected, mask = logps[::2], logps[1::2], batch.sequence_mask[::2]
        per_pair, reward_chosen, reward_rejected = self.pair_loss(chosen, rejected, reference[::2], reference[1::2])
        total, count = (per_pair * mask).sum(), mask.sum()
        metrics = {
            'loss': Mean(total, count),
            'accuracy': Mean(((reward_chosen > reward_rejected) & mask).float().sum(), count),
            'margin': Mean(((reward_chosen - reward_rejected) * mask).sum(), count),
            'reward_chosen': Mean((reward_chosen * mask).sum(), count),
            'reward_rejected': Mean((reward_rejected * mask).sum(), count),
            'logp_chosen': Mean((chosen.detach() * mask).sum(), count),
            'logp_rejected': Mean((rejected.detach() * mask).sum(), count),
        }
        return total / batch.totals['weight'], metrics


def dpo_pair_loss(
    config: DPOConfig, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Implicit reward: β (log π − log π_ref)."""
    beta, smoothing = config.beta, config.flipped_share
    margin = losses.dpo_margin(chosen, rejected, ref_chosen, ref_rejected)
    table: dict[str, Callable[[], Tensor]] = {
        'sigmoid': lambda: losses.dpo_loss(margin, beta=beta),
        'ipo': lambda: losses.ipo_loss(margin, beta=beta),
        'cdpo': lambda: losses.cdpo_loss(margin, beta=beta, label_smoothing=smoothing),
        'robust': lambda: losses.robust_dpo_loss(margin, beta=beta, label_smoothing=smoothing),
        'hinge': lambda: losses.hinge_loss(margin, beta=beta),
    }
    return table[config.loss_type](), beta * (chosen - ref_chosen).detach(), beta * (rejected - ref_rejected).detach()


def orpo_pair_loss(config: ORPOConfig, chosen: Tensor, rejected: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SFT on the chosen answer and a term on the odds. Implicit reward: λ log P."""
    weight = config.weight
    return losses.orpo_loss(chosen, rejected, weight=weight), weight * chosen.detach(), weight * rejected.detach()


def simpo_pair_loss(config: SimPOConfig, chosen: Tensor, rejected: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean log-prob per token as reward, with a target margin. Implicit reward: β · log P."""
    beta, gamma = config.beta, config.gamma
    return losses.simpo_loss(chosen, rejected, beta=beta, gamma=gamma), beta * chosen.detach(), beta * rejected.detach()


NO_REFERENCE = AgainstReference(None, precompute=False, max_tokens=None)


class DPOTrainer(OfflineTrainer):
    """Direct preference optimisation and its relatives. Metrics `dpo/...`, see `PairObjective`.

    Args:
        train_data, eval_data: `TokenizedPreference` records or `Pair`s, the same lists on every rank.
        initial_model: the frozen reference, as prepared; None where the actor is its own with its adapter off.
    """

    config: DPOConfig

    def __init__(
        self,
        strategy: Strategy | str,
        actor: nn.Module,
        optim: Optimizer,
        train_data: SequenceOf[Any],
        eval_data: SequenceOf[Any] | None = None,
        *,
        initial_model: nn.Module | None = None,
        config: DPOConfig | None = None,
        callbacks: SequenceOf[Any] = (),
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
        **settings: Any,
    ) -> None:
        config = merged(DPOConfig, config, settings)
        strategy, (actor, optim), initial_model = prepared_by(strategy, (actor, optim), initial_model)
        assert not isinstance(strategy, str)
        reference = AgainstReference(
            ReferenceModel(strategy, actor, initial_model, 'DPOTrainer'),
            precompute=config.precompute_ref_logprobs,
            max_tokens=config.max_tokens_per_batch,
        )
        objective = PairObjective('dpo', partial(dpo_pair_loss, config), reference)
        super().__init__(
            strategy,
            actor,
            optim,
            objective,
            train_data,
            eval_data,
            config=config,
            callbacks=callbacks,
            tokenizer=tokenizer,
            run_dir=run_dir,
        )


class ORPOTrainer(OfflineTrainer):
    """Odds-ratio preference optimisation (Hong et al. 2024), which has no reference. Metrics `orpo/...`, see
    `PairObjective`.

    Args:
        train_data, eval_data: as in `DPOTrainer`.
    """

    config: ORPOConfig

    def __init__(
        self,
        strategy: Strategy | str,
        actor: nn.Module,
        optim: Optimizer,
        train_data: SequenceOf[Any],
        eval_data: SequenceOf[Any] | None = None,
        *,
        initial_model: None = None,
        config: ORPOConfig | None = None,
        callbacks: SequenceOf[Any] = (),
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
        **settings: Any,
    ) -> None:
        _without_reference('ORPOTrainer', initial_model)
        config = merged(ORPOConfig, config, settings)
        strategy, (actor, optim) = prepared_by(strategy, (actor, optim))
        assert not isinstance(strategy, str)
        objective = PairObjective('orpo', partial(orpo_pair_loss, config), NO_REFERENCE, average=True)
        super().__init__(
            strategy,
            actor,
            optim,
            objective,
            train_data,
            eval_data,
            config=config,
            callbacks=callbacks,
            tokenizer=tokenizer,
            run_dir=run_dir,
        )


class SimPOTrainer(OfflineTrainer):
    """SimPO (Meng et al. 2024), which has no reference. Metrics `simpo/...`, see `PairObjective`.

    Args:
        train_data, eval_data: as in `DPOTrainer`.
    """

    config: SimPOConfig

    def __init__(
        self,
        strategy: Strategy | str,
        actor: nn.Module,
        optim: Optimizer,
        train_data: SequenceOf[Any],
        eval_data: SequenceOf[Any] | None = None,
        *,
        initial_model: None = None,
        config: SimPOConfig | None = None,
        callbacks: SequenceOf[Any] = (),
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
        **settings: Any,
    ) -> None:
        _without_reference('SimPOTrainer', initial_model)
        config = merged(SimPOConfig, config, settings)
        strategy, (actor, optim) = prepared_by(strategy, (actor, optim))
        assert not isinstance(strategy, str)
        objective = PairObjective('simpo', partial(simpo_pair_loss, config), NO_REFERENCE, average=True)
        super().__init__(
            strategy,
            actor,
            optim,
            objective,
            train_data,
            eval_data,
            config=config,
            callbacks=callbacks,
            tokenizer=tokenizer,
            run_dir=run_dir,
        )


def _without_reference(name: str, initial_model: Any) -> None:
    if initial_model is not None:
        raise ValueError(f'{name} has no reference: leave initial_model out')


def without_reference(pairs: SequenceOf[Pair]) -> list[Pair]:
    """Copies that forget the reference's log-probs: for a second run with another reference."""
    return [replace(pair, ref_chosen=None, ref_rejected=None) for pair in pairs]
