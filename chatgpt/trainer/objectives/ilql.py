"""Offline reinforcement learning from texts with rewards: implicit language Q-learning (ILQL).

Rewards are standardised over the data set and are at the last token that counts, never on padding. Target Q heads are
synchronised every `target_sync_interval` optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.batching import token_columns
from chatgpt.data.tokenize import TokenizedLabelled
from chatgpt.functional.ilql import awac_loss, expectile_value_loss, next_values, td_loss
from chatgpt.functional.masking import masked_sum
from chatgpt.nn.ilql import ILQLModel
from chatgpt.strategies.base import Strategy
from chatgpt.trainer.callbacks.base import Callback
from chatgpt.trainer.metrics import Mean, Metrics
from chatgpt.trainer.objectives.config import ILQLConfig
from chatgpt.trainer.offline import Method, Objective, OfflineTrainer
from chatgpt.trainer.prompt_evaluation import PromptEvaluation
from chatgpt.types import Batch, Sequence


@dataclass(kw_only=True)
class Rewarded(Sequence):
    """A sequence with a reward for each action."""

    rewards: Tensor
    """(A,) fp32; 0 where the mask is False"""


class Standardized(Rewarded):
    """A record with standardised rewards."""


def rewarded(
    sequences: SequenceOf[Sequence], rewards: SequenceOf[float | Tensor | SequenceOf[float]]
) -> list[Rewarded]:
    """Makes records from sequences and rewards.

    Args:
        rewards: per sequence, a number for the last action that counts; or one number per turn (a run of actions that
            count) for its last action; or (A,), one per action.

    Raises:
        ValueError: other lengths, a reward that is not finite, a sequence without an action that counts.
    """
    if len(sequences) != len(rewards):
        raise ValueError(f'{len(sequences)} sequences but {len(rewards)} rewards')
    records = []
    for i, (s, reward) in enumerate(zip(sequences, rewards, strict=True)):
        given = torch.as_tensor(reward, dtype=torch.float32).flatten()
        if not torch.isfinite(given).all():
            raise ValueError(f'the reward of sequence {i} is not finite')
        ends = turn_ends(s.response_mask)
        if not ends:
            raise ValueError(f'sequence {i} has no action that counts')
        dense = torch.zeros(s.num_actions)
        if given.numel() == s.num_actions and s.num_actions != len(ends) and given.numel() > 1:
            dense = given * s.response_mask
        elif given.numel() == 1:
            dense[ends[-1]] = given[0]
        elif given.numel() == len(ends):
            dense[torch.tensor(ends)] = given
        else:
            raise ValueError(
                f'sequence {i} has {given.numel()} rewards; give one, one for each of its {len(ends)} turns, or one '
                f'for each of its {s.num_actions} tokens'
            )
        records.append(
            Rewarded(prompt_ids=s.prompt_ids, response_ids=s.response_ids, response_mask=s.response_mask, rewards=dense)
        )
    return records


def turn_ends(mask: Tensor) -> list[int]:
    """Returns the position of the last action of every run of actions that count."""
    flags = mask.tolist()
    return [i for i, flag in enumerate(flags) if flag and (i + 1 == len(flags) or not flags[i + 1])]


def standardized(records: SequenceOf[Rewarded], like: SequenceOf[Rewarded] | None = None) -> list[Standardized]:
    """Returns records with rewards of mean 0 and deviation 1 over the data set, where the deviation is that of the
    sums. The mean is subtracted at the last action.

    The variance is divided by n − 1, as in trlX. If all sums are equal, rewards are only shifted.

    Args:
        like: records from which mean and deviation are taken instead.
    """
    sums = [float(r.rewards.double().sum()) for r in (records if like is None else like)]
    mean = math.fsum(sums) / len(sums)
    deviation = math.sqrt(math.fsum((s - mean) ** 2 for s in sums) / max(len(sums) - 1, 1))
    scale = 1.0 / deviation if deviation > 1e-8 else 1.0
    result = []
    for r in records:
        rewards = r.rewards.clone()
        rewards[turn_ends(r.response_mask)[-1]] -= mean
        result.append(Standardized(**{f.name: getattr(r, f.name) for f in fields(r)} | {'rewards': rewards * scale}))
    return result


class ILQLObjective(Objective):
    """Σ_heads TD + expectile of V + cql_scale · Σ_heads CQL + awac_scale · weighted next-token loss, all per token."""

    prefix = 'ilql'

    def __init__(self, config: ILQLConfig) -> None:
        self.config = config
        self._train: list[Rewarded] | None = None
        """the training records as they were given, with which rewards are standardised; None: they are not"""

    def check(self, strategy: Strategy, model: nn.Module) -> None:
        if not isinstance(strategy.unwrap(model), ILQLModel):
            raise ValueError(f'ILQLTrainer trains an ILQLModel, not a {type(strategy.unwrap(model)).__name__}')
        if not strategy.abilities.weights_in_place:
            raise ValueError(
                f'ILQL does not run under {type(strategy).__name__}, whose masters hide the target heads; use ddp or '
                'fsdp'
            )

    def callbacks(self) -> list[Any]:
        return [_TargetSync()]

    def records(self, data: SequenceOf[Any]) -> list[Rewarded]:
        records = _with_rewards(data)
        if self._train is None or all(isinstance(r, Standardized) for r in records):
            return records
        return [*standardized(records, like=self._train)]

    def accept(
        self, train_data: SequenceOf[Any], eval_data: SequenceOf[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        train, for_eval = super().accept(train_data, eval_data)
        if self.config.standardize_rewards and train:
            self._train = train
            train, for_eval = self.records(train), self.records(for_eval) if for_eval else None
        return train, for_eval

    def columns(self, records: list[Rewarded]) -> dict[str, Tensor]:
        return token_columns(records, ('rewards',))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        c, mask = self.config, batch.action_mask
        out = model(batch)
        successors = next_values(out.values, mask, batch.action_rows)
        rewards = batch.columns['rewards']
        parts = {
            'td_loss': sum(
                (td_loss(q, rewards, successors, gamma=c.gamma) for q in out.qs), torch.zeros_like(out.values)
            ),
            'value_loss': expectile_value_loss(out.values, out.target_q, tau=c.tau),
            'cql_loss': c.cql_scale * sum(out.q_losses, torch.zeros_like(out.values)),
            'awac_loss': c.awac_scale * awac_loss(out.logprobs, out.target_q, out.values, beta=c.beta),
        }
        count = mask.sum()
        total = masked_sum(sum(parts.values(), torch.zeros_like(out.values)), mask)
        metrics = {name: Mean(masked_sum(values.detach(), mask), count) for name, values in parts.items()}
        metrics['loss'] = Mean(total, count)
        metrics['q_mean'] = Mean(masked_sum(out.target_q, mask), count)
        metrics['value_mean'] = Mean(masked_sum(out.values.detach(), mask), count)
        return total / batch.totals['weight'], metrics


ILQL = Method(ILQLConfig, ILQLObjective)


class ILQLTrainer(OfflineTrainer):
    """Trains an `ILQLModel`.

    Metrics `ilql/...`: `loss`, `td_loss`, `value_loss`, `cql_loss`, `awac_loss`, `q_mean`, `value_mean`; for eval data
    with `val_`.

    Args:
        train_data, eval_data: `Rewarded` records (see `rewarded`), or `TokenizedLabelled` ones with the reward as
            label.
        options: `config`, `callbacks`, `tokenizer`, `run_dir` of `OfflineTrainer`, and fields of `ILQLConfig`.

    Raises:
        ValueError: a model without ILQL's heads, a strategy that cannot copy target heads, records without rewards.
    """

    config: ILQLConfig

    own_method = ILQL


def _with_rewards(data: SequenceOf[Any]) -> list[Rewarded]:
    labelled = [r for r in data if isinstance(r, TokenizedLabelled)]
    if labelled and len(labelled) == len(data):
        try:
            return rewarded([r.sequence for r in labelled], [float(r.label) for r in labelled])
        except (TypeError, ValueError) as error:
            raise ValueError(f'ILQLTrainer: a label is no reward ({error})') from None
    for i, record in enumerate(data):
        if not isinstance(record, Rewarded):
            raise ValueError(
                f'ILQLTrainer: record {i} is a {type(record).__name__} without rewards; see chatgpt.trainer.rewarded'
            )
    return list(data)


class _TargetSync(Callback):
    """Updates the target heads after every `target_sync_interval` optimizer steps."""

    def on_fit_start(self, trainer: Any) -> None:
        self._num_updates = trainer.num_updates

    def on_learn_batch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        stepped, self._num_updates = trainer.num_updates != self._num_updates, trainer.num_updates
        if stepped and trainer.num_updates % trainer.config.target_sync_interval == 0:
            trainer.strategy.unwrap(trainer.model).sync_targets(trainer.config.alpha)


class BetaEvaluation:
    """A `PromptEvaluation` for each of several β: {'score_mean@beta=1': ..., ...}, for an `Evaluator`."""

    def __init__(self, evaluation: PromptEvaluation, betas: SequenceOf[float] = (0.0, 1.0, 100.0)) -> None:
        if not betas:
            raise ValueError('BetaEvaluation needs at least one β')
        self.evaluation, self.betas = evaluation, list(betas)

    def __call__(self, trainer: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for beta in self.betas:
            metrics = self.evaluation(trainer, decoding=partial(ILQLModel.decoding, beta=beta))
            found |= {f'{name}@beta={beta:g}': value for name, value in metrics.items()}
        return found
