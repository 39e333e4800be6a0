"""Supervised fine-tuning: next-token loss on the response tokens of demonstrations.

The records' `response_mask` masks prompts, padding and turns of other speakers; plain text counts from its second
token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from torch import Tensor, nn

from chatgpt.functional.losses import next_token_loss
from chatgpt.functional.masking import masked_sum
from chatgpt.trainer.metrics import Mean, Metrics
from chatgpt.trainer.objectives.config import SFTConfig
from chatgpt.trainer.offline import Method, Objective, OfflineTrainer, of_kind
from chatgpt.types import Batch, Sequence


class SFTObjective(Objective):
    """−Σ log π(token | before) over tokens that count / their global number."""

    prefix = 'sft'

    def records(self, data: SequenceOf[Any]) -> list[Sequence]:
        return of_kind(data, Sequence)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        total = masked_sum(next_token_loss(model(batch).logprobs), batch.action_mask)
        return total / batch.totals['weight'], {'loss': Mean(total, batch.action_mask.sum())}

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {'perplexity': math.exp(min(metrics['loss'], 700.0))}


SFT = Method(SFTConfig, lambda config: SFTObjective())


class SFTTrainer(OfflineTrainer):
    """Trains an `Actor` on `Sequence` records.

    Metrics: `sft/loss` in nats per token, `sft/perplexity` = exp(loss), the same on `eval_data` as `sft/val_...`.

    Args:
        train_data, eval_data: records, the same lists on every rank.
        options: `config`, `callbacks`, `tokenizer`, `run_dir` of `OfflineTrainer`, and fields of `SFTConfig`.
    """

    own_method = SFT
