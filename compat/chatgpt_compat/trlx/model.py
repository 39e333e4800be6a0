"""`trainer.model` as trlX's scripts know it: `base_model`, `v_head` (or ILQL's heads), `generate`, a forward with
values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chatgpt.nn import is_encoder_decoder


class OutputWithValue(NamedTuple):
    logits: Tensor
    """(B, S, V)"""
    past_key_values: Any
    value: Tensor | None
    """(B, S) fp32, None without a value head"""


class ModelView(nn.Module):
    """The actor's own modules under trlX's names; a name that it lacks is the transformers model's.

    Args:
        actor: an `Actor` or an `ILQLModel`, not wrapped by a strategy.
    """

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self._actor = (actor,)  # in a tuple, so that it is not registered beside its parts
        self.base_model = actor.model
        self.v_head = getattr(actor, 'v_head', None) or getattr(actor, 'value_head', None)
        if hasattr(actor, 'q_heads'):
            self.q_heads, self.target_q_heads = actor.q_heads, actor.target_q_heads
        self.training = actor.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == 'base_model':
                raise
            return getattr(self.base_model, name)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool = True, **kwargs: Any
    ) -> OutputWithValue:
        """Logits and values of every position. `input_ids` (B, S) int64; of an encoder-decoder those of
        `decoder_input_ids`."""
        out = self.base_model(input_ids, attention_mask=attention_mask, output_hidden_states=True, **kwargs)
        states = out.decoder_hidden_states if is_encoder_decoder(self.base_model) else out.hidden_states
        values = None if self.v_head is None else self.v_head(states[-1]).squeeze(-1)
        return OutputWithValue(out.logits, getattr(out, 'past_key_values', None), values)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, of the policy itself."""
        return self.base_model.generate(*args, **kwargs)

    def save_pretrained(self, directory: str | Path, **_: Any) -> None:
        """A Hugging Face folder; adapters are folded in."""
        self._actor[0].save_pretrained(directory)
