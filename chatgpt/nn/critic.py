"""The value model: V at the state before each action."""

from __future__ import annotations

from torch import Tensor, nn

from chatgpt.nn import lora
from chatgpt.nn.heads import critic_head, in_fp32
from chatgpt.nn.trunk import base_model, flat_hidden, hidden_size
from chatgpt.types import Batch


class Critic(nn.Module):
    """A transformers base model with a value head.

    Args:
        model: a base model; of a causal LM the trunk is taken.
        value_head: (..., D) → (..., 1); None makes a linear one that starts near zero.
        lora_rank, lora_train_bias: as for `Actor`; the value head is always trained.
    """

    def __init__(
        self, model: nn.Module, value_head: nn.Module | None = None, lora_rank: int = 0, lora_train_bias: str = 'none'
    ) -> None:
        super().__init__()
        self.model = base_model(model)
        self.value_head = value_head if value_head is not None else critic_head(hidden_size(self.model))
        if lora_rank:
            lora.convert_to_lora(self.model, lora_rank, bias=lora_train_bias)  # type: ignore[arg-type]

    def forward(self, batch: Batch) -> Tensor:
        """Values (N,) fp32 of the states before each action of the batch."""
        return in_fp32(self.value_head, flat_hidden(self.model, batch)[batch.action_index])
