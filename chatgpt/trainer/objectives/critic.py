"""A critic learned from recorded responses, before any new one is drawn: its values are regressed on their returns.

Source: value pretraining, Yuan et al. 2025, "VC-PPO", arXiv 2503.01491, with returns of λ = 1 under a fixed policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from chatgpt.batching import token_columns
from chatgpt.functional.advantages import monte_carlo_returns
from chatgpt.functional.masking import masked_sum
from chatgpt.strategies.base import Strategy
from chatgpt.trainer.builder import check_head
from chatgpt.trainer.callbacks import Evaluator
from chatgpt.trainer.losses import ValueLoss
from chatgpt.trainer.metrics import Mean, Metrics
from chatgpt.trainer.objectives.config import CriticConfig
from chatgpt.trainer.offline import Method, Objective, OfflineTrainer, of_kind
from chatgpt.types import Batch, Sequence

AT_ENDS = 1 << 40
"""an interval beyond any run: an evaluation before the first phase and one after the last"""


@dataclass(kw_only=True)
class Returned(Sequence):
    """A sequence with the return of each action."""

    returns: Tensor
    """(A,) fp32; 0 where the mask is False"""


def returned(sequences: SequenceOf[Sequence], rewards: SequenceOf[Tensor], *, gamma: float = 1.0) -> list[Returned]:
    """Makes records from sequences and rewards of tokens, (A,) fp32 each, with R[t] = r[t] + γ R[t+1] over the tokens
    that count."""
    masks = [s.response_mask for s in sequences]
    of_tokens = monte_carlo_returns(list(rewards), masks, gamma=gamma)
    return [
        Returned(prompt_ids=s.prompt_ids, response_ids=s.response_ids, response_mask=s.response_mask, returns=found)
        for s, found in zip(sequences, of_tokens, strict=True)
    ]


class CriticObjective(Objective):
    """`critic_loss` of values and returns, a mean over the tokens that count."""

    prefix = 'critic'
    model_name = 'critic'

    def __init__(self, config: CriticConfig) -> None:
        self.config = config
        self._loss = ValueLoss(config, clips=False)
        self._evaluates = False

    def check(self, strategy: Strategy, model: nn.Module) -> None:
        check_head(self.config, strategy.unwrap(model))

    def callbacks(self) -> list[Any]:
        return [Evaluator(held_out, AT_ENDS)] if self._evaluates else []

    def accept(
        self, train_data: SequenceOf[Any], eval_data: SequenceOf[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        train, for_eval = super().accept(train_data, eval_data)
        self._evaluates = bool(for_eval)
        return train, for_eval

    def records(self, data: SequenceOf[Any]) -> list[Returned]:
        return of_kind(data, Returned)

    def columns(self, records: list[Returned]) -> dict[str, Tensor]:
        returns = token_columns(records, ('returns',))['returns']
        return {'returns': returns, 'values': torch.zeros_like(returns)}

    def totals(self, records: list[Returned]) -> dict[str, float]:
        totals = super().totals(records)
        return totals | {'tokens': totals['weight']}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        values, logits = model(batch, with_logits=True)
        total, found = self._loss.of(values, batch, logits)
        mask, returns = batch.action_mask, batch.columns['returns'].double()
        count, error = mask.sum(), values.detach().double() - returns
        means = {'return_mean': returns, 'error_mean': error, 'error_square_mean': error.square()}
        means |= {'return_square_mean': returns.square()}
        metrics = {name.replace('value_loss', 'loss'): metric for name, metric in found.items()}
        return total, metrics | {name: Mean(masked_sum(x, mask), count) for name, x in means.items()}

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns 1 − Var(V − R) / Var(R), 0 if R is constant."""
        whole = metrics['return_square_mean'] - metrics['return_mean'] ** 2
        rest = metrics['error_square_mean'] - metrics['error_mean'] ** 2
        varies = whole > 1e-12 * metrics['return_square_mean']
        return {'explained_variance': 1.0 - rest / whole if varies else 0.0}


def held_out(trainer: Any) -> dict[str, float]:
    """Returns the explained variance on the eval data of a `CriticTrainer`."""
    trainer = cast(OfflineTrainer, trainer)
    return {'explained_variance': trainer.evaluate(trainer.eval_data or [])['explained_variance']}


CRITIC = Method(CriticConfig, CriticObjective)


class CriticTrainer(OfflineTrainer):
    """Trains a `Critic` on responses with their returns.

    Metrics: `critic/loss`, `critic/explained_variance`, and the means from which it follows; on eval data as
    `critic/val_...`, and `eval/explained_variance` before the first phase and after the last.

    Args:
        train_data, eval_data: `Returned` records (see `returned`), the same lists on every rank.
        options: `config`, `callbacks`, `tokenizer`, `run_dir` of `OfflineTrainer`, and fields of `CriticConfig`.
    """

    own_method = CRITIC
