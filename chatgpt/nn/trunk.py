"""Reaching into a Hugging Face model: its trunk, its head, its width, and calling it on a right-padded batch.

A causal model on a right-padded batch needs no attention mask: no real token comes after padding, and position ids 0, 1, 2, ... are
right for every row. So padding cannot change a number, and attention takes its fast path. A model that looks ahead (an encoder used
as a reward model) gets the mask.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.types import Batch

_ENCODERS = {
    'bert', 'roberta', 'xlm-roberta', 'deberta', 'deberta-v2', 'distilbert', 'electra', 'albert', 'camembert', 'modernbert', 'mpnet', 'ernie',
}  # fmt: skip


class _NoPaddingWarning(logging.Filter):
    """Drops transformers' advice to pass an attention mask: on right-padded input a causal model needs none (see above)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return 'We strongly recommend passing in an `attention_mask`' not in str(record.msg)


logging.getLogger('transformers.modeling_utils').addFilter(_NoPaddingWarning())


def base_model(model: nn.Module) -> nn.Module:
    """The trunk of a causal LM: the part that returns hidden states. A model that is a trunk itself is returned as it is."""
    prefix = getattr(model, 'base_model_prefix', '')
    return getattr(model, prefix, model) if prefix else model


def hidden_size(model: nn.Module) -> int:
    """Width of the last hidden state (OPT-350m projects to `word_embed_proj_dim`)."""
    config = text_config(model)
    for name in ('word_embed_proj_dim', 'hidden_size', 'n_embd', 'd_model'):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    raise ValueError(f'cannot tell the hidden size of {type(model).__name__}: its config has no hidden_size')


def text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config() if hasattr(config, 'get_text_config') else config


def looks_ahead(model: nn.Module) -> bool:
    """Whether a token's hidden state depends on later tokens."""
    config = text_config(model)
    return config.model_type in _ENCODERS and not getattr(config, 'is_decoder', False)


@cache
def _parameters_of(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def accepts(model: nn.Module, name: str) -> bool:
    return name in _parameters_of(type(model).forward)


def run_trunk(
    model: nn.Module, input_ids: Tensor, *, position_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Last hidden states (B, S, D). Keywords that the model does not take (position ids of ALiBi models) are left out."""
    if position_ids is not None and accepts(model, 'position_ids'):
        kwargs['position_ids'] = position_ids
    if accepts(model, 'use_cache'):
        kwargs.setdefault('use_cache', 'past_key_values' in kwargs)
    return model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state


def flat_hidden(model: nn.Module, batch: Batch) -> Tensor:
    """Hidden states of a batch, rows joined: (B*S, D), to be indexed with `action_index` or `last_index`."""
    mask = batch.attention_mask.long() if looks_ahead(model) else None
    positions = None if looks_ahead(model) else batch.position_ids
    hidden = run_trunk(model, batch.input_ids, position_ids=positions, attention_mask=mask)
    return hidden.flatten(0, 1)


def is_meta(module: nn.Module) -> bool:
    """Whether weights are still to come."""
    return any(p.device.type == 'meta' for p in module.parameters())


def to_dtype_of(hidden: Tensor, module: nn.Module) -> Tensor:
    """`hidden` in the dtype of the module's weights, unless autocast casts anyway."""
    weight = next(module.parameters(), None)
    if weight is None or torch.is_autocast_enabled(hidden.device.type):
        return hidden
    return hidden.to(weight.dtype)
