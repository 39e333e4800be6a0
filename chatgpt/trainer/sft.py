"""Supervised fine-tuning: next-token loss on the response tokens of demonstrations.

Prompts, padding and turns of other speakers are masked out by the records' `response_mask`; plain text counts from its second
token. Left out: how text becomes records (`chatgpt.dataset`).
"""

from __future__ import annotations

import math

from torch import Tensor

from chatgpt.functional.losses import next_token_loss
from chatgpt.functional.masking import masked_sum
from chatgpt.plan.setup import Task
from chatgpt.trainer.config import SFTConfig
from chatgpt.trainer.learning import BatchStats
from chatgpt.trainer.supervised import OneLossTrainer
from chatgpt.types import Batch, Sequence


class SFTTrainer(OneLossTrainer):
    """Trains an `Actor` on `Sequence` records. Loss: −Σ log π(token | before) over counted tokens / their global number.

    Metrics: `sft/loss` in nats per token, `sft/perplexity` = exp(loss), the same on `eval_data` as `sft/val_...`.
    """

    prefix = 'sft'
    model_name = 'actor'
    config_class = SFTConfig
    planned_as: Task | None = 'sft'

    def weight_of(self, record: Sequence) -> int:
        return int(record.response_mask.sum())

    def loss_sum(self, batch: Batch, records: list[Sequence], stats: BatchStats) -> Tensor:
        total = masked_sum(next_token_loss(self.model(batch).logprobs), batch.action_mask)
        stats.mean('loss', total, batch.action_mask.sum())
        return total

    def after_evaluation(self, metrics: dict[str, float]) -> dict[str, float]:
        losses = {k: v for k, v in metrics.items() if k.endswith('/loss')}
        return metrics | {k.replace('/loss', '/perplexity'): math.exp(min(v, 700.0)) for k, v in losses.items()}
