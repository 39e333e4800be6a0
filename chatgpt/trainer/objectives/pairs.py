"""Preference optimisation without rollouts: DPO and its variants, ORPO, SimPO. KTO, which needs no pairs, is in `kto`.

A method is a loss over the log-probs of a pair's two answers, from one forward. The reference, if any, is a frozen
model, or the actor with its adapter off.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.data.tokenize import TokenizedPreference
from chatgpt.functional import preference as losses
from chatgpt.functional.losses import right_order, sequence_logprobs
from chatgpt.nn.sweep import SWEEP_TOKENS
from chatgpt.nn.trunk import in_eval_mode
from chatgpt.trainer.experience.reference import Reference
from chatgpt.trainer.metrics import Mean, Metrics
from chatgpt.trainer.objectives.config import DPOConfig, ORPOConfig, ReferenceConfig, SimPOConfig
from chatgpt.trainer.offline import Method, Objective, OfflineTrainer
from chatgpt.types import Batch, Sequence


@dataclass(kw_only=True)
class Pair:
    """Two answers to a prompt, with the reference's log-probs if known."""

    chosen: Sequence
    rejected: Sequence
    ref_chosen: float | None = None
    ref_rejected: float | None = None


def pairs_of(records: SequenceOf[TokenizedPreference | Pair]) -> list[Pair]:
    """Returns all pairs of answers to a prompt that differ in rank (`TokenizedPreference.ranks`). Pairs share the
    `Sequence`s of answers."""
    pairs: list[Pair] = []
    for i, record in enumerate(records):
        if isinstance(record, Pair):
            pairs.append(replace(record))  # `prepare` fills it in, for this reference
            continue
        if not isinstance(record, TokenizedPreference):
            raise ValueError(f'record {i} is a {type(record).__name__}, not a TokenizedPreference or a Pair')
        ranked = [
            (rank, answer) for rank, answer in zip(record.ranks(), record.sequences(), strict=True) if rank is not None
        ]
        pairs += [Pair(chosen=a, rejected=b) for (better, a), (worse, b) in combinations(ranked, 2) if better != worse]
    return pairs


PairLoss = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""log-probs (B,) of chosen and rejected and, with a reference, its log-probs of both -> the loss of each pair, and
implicit rewards of chosen and rejected, (B,) each"""


class AgainstReference:
    """Log-probs of a method's records under the reference, computed once before the first step, or with every batch."""

    def __init__(self, reference: Reference, config: ReferenceConfig) -> None:
        self.reference, self.max_tokens = reference, config.max_tokens_per_batch or SWEEP_TOKENS
        self.precomputes = config.precompute_ref_logprobs

    def of(self, sequences: list[Sequence]) -> list[float]:
        """Returns the log-probs of sequences that all ranks hold."""
        with in_eval_mode(self.reference.bare):  # under LoRA the reference is the same model
            return self.reference.sums_of(sequences, self.max_tokens)

    def column(self, values: SequenceOf[float | None]) -> dict[str, Tensor]:
        """Returns the column `ref_logps` from precomputed values of sequences."""
        return {'ref_logps': torch.tensor(values, dtype=torch.float32)} if self.precomputes else {}

    def logps(self, batch: Batch) -> Tensor:
        """Returns the log-probs of a batch, (B,)."""
        return batch.columns['ref_logps'] if self.precomputes else self.reference.sums(batch)


class PairObjective(Objective):
    """A loss over pairs.

    Metrics: `loss`; `accuracy` (share of pairs in which the chosen answer has the higher implicit reward; equal rewards
    count 1/2, as at the start), `margin`, `reward_chosen`, `reward_rejected` (implicit rewards); `logp_chosen`,
    `logp_rejected` (nats per answer).

    Args:
        prefix: of the metrics.
        pair_loss: see `PairLoss`.
        reference: None if the method has none.
        average: log-probs are means per token instead of sums.
    """

    num_dummies = 2
    uses_dropout = False

    def __init__(
        self, prefix: str, pair_loss: PairLoss, reference: AgainstReference | None = None, *, average: bool = False
    ) -> None:
        self.prefix = prefix  # type: ignore[misc]
        self.pair_loss, self.reference, self.average = pair_loss, reference, average

    def records(self, data: SequenceOf[Any]) -> list[Pair]:
        pairs = pairs_of(data)
        if len(data) and not pairs:
            raise ValueError(f'{self.prefix}: no record has two answers that differ')
        return pairs

    def prepare(self, records: list[Pair]) -> None:
        todo = [pair for pair in records if None in (pair.ref_chosen, pair.ref_rejected)]
        if todo and self.reference is not None and self.reference.precomputes:
            values = self.reference.of([s for pair in todo for s in (pair.chosen, pair.rejected)])
            for pair, chosen, rejected in zip(todo, values[::2], values[1::2], strict=True):
                pair.ref_chosen, pair.ref_rejected = chosen, rejected

    def sequences(self, record: Pair) -> list[Sequence]:
        return [record.chosen, record.rejected]

    def weight(self, record: Pair) -> int:
        return 1

    def columns(self, records: list[Pair]) -> dict[str, Tensor]:
        if self.reference is None:
            return {}
        return self.reference.column([v for pair in records for v in (pair.ref_chosen, pair.ref_rejected)])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        reference = self.reference.logps(batch) if self.reference is not None else None
        out = model(batch)
        logps = sequence_logprobs(
            out.logprobs, batch.action_mask, batch.action_rows, batch.num_sequences, average=self.average
        )
        chosen, rejected, mask = logps[::2], logps[1::2], batch.sequence_mask[::2]
        of_reference = () if reference is None else (reference[::2], reference[1::2])
        per_pair, reward_chosen, reward_rejected = self.pair_loss(chosen, rejected, *of_reference)
        total, count = (per_pair * mask).sum(), mask.sum()
        margin = reward_chosen - reward_rejected
        metrics = {
            'loss': Mean(total, count),
            'accuracy': Mean(right_order(margin, mask), count),
            'margin': Mean((margin * mask).sum(), count),
            'reward_chosen': Mean((reward_chosen * mask).sum(), count),
            'reward_rejected': Mean((reward_rejected * mask).sum(), count),
            'logp_chosen': Mean((chosen.detach() * mask).sum(), count),
            'logp_rejected': Mean((rejected.detach() * mask).sum(), count),
        }
        return total / batch.totals['weight'], metrics


def dpo_pair_loss(
    config: DPOConfig, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """DPO and its variants, with the implicit reward β (log π − log π_ref)."""
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


def orpo_pair_loss(config: ORPOConfig, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SFT on the chosen answer and a term on the odds, with the implicit reward λ log P."""
    weight = config.weight
    return losses.orpo_loss(chosen, rejected, weight=weight), weight * chosen.detach(), weight * rejected.detach()


def simpo_pair_loss(config: SimPOConfig, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss on the mean log-prob per token with a target margin, with the implicit reward β · log P."""
    beta, gamma = config.beta, config.gamma
    return losses.simpo_loss(chosen, rejected, beta=beta, gamma=gamma), beta * chosen.detach(), beta * rejected.detach()


def _dpo_objective(config: DPOConfig, reference: Reference) -> PairObjective:
    return PairObjective('dpo', partial(dpo_pair_loss, config), AgainstReference(reference, config))


DPO = Method(DPOConfig, _dpo_objective, compares=True)
ORPO = Method(ORPOConfig, lambda config: PairObjective('orpo', partial(orpo_pair_loss, config), average=True))
SIMPO = Method(SimPOConfig, lambda config: PairObjective('simpo', partial(simpo_pair_loss, config), average=True))


class DPOTrainer(OfflineTrainer):
    """Direct preference optimisation and its variants. Metrics `dpo/...`, see `PairObjective`.

    Args:
        train_data, eval_data: `TokenizedPreference` records or `Pair`s, the same lists on every rank.
        options: `initial_model`, `config`, `callbacks`, `tokenizer`, `run_dir` of `OfflineTrainer`, and fields of
            `DPOConfig`.
    """

    config: DPOConfig

    own_method = DPO


class ORPOTrainer(OfflineTrainer):
    """Odds-ratio preference optimisation (Hong et al. 2024), without a reference. Metrics `orpo/...`, see
    `PairObjective`. Arguments as for `DPOTrainer`, with the fields of `ORPOConfig`."""

    config: ORPOConfig

    own_method = ORPO


class SimPOTrainer(OfflineTrainer):
    """SimPO (Meng et al. 2024), without a reference. Metrics `simpo/...`, see `PairObjective`. Arguments as for
    `DPOTrainer`, with the fields of `SimPOConfig`."""

    config: SimPOConfig

    own_method = SIMPO
