"""Reaching into a Hugging Face model: its trunk, its head, its width, and calling it on a right-padded batch.

A causal model on a right-padded batch needs no attention mask: no real token comes after padding, and position ids 0,
1, 2, ... are right for every row. So padding cannot change a number, and attention takes its fast path. A model that
looks ahead (an encoder used as a reward model) gets the mask. Whole `Batch`es go through `chatgpt.nn.packing`.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from chatgpt.types import Batch


class _NoPaddingWarning(logging.Filter):
    """Drops transformers' advice to pass an attention mask: on right-padded input a causal model needs none (see
    above)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return 'We strongly recommend passing in an `attention_mask`' not in str(record.msg)


logging.getLogger('transformers.modeling_utils').addFilter(_NoPaddingWarning())


def base_model(model: nn.Module) -> nn.Module:
    """The trunk of a causal LM: the part that returns hidden states. A model that is a trunk itself is returned as it
    is."""
    prefix = getattr(model, 'base_model_prefix', '')
    found = getattr(model, prefix, None) if prefix else None
    if found is None and getattr(model, 'get_output_embeddings', lambda: None)() is not None:
        found = getattr(model, 'model', None)  # where Llama 4 has its trunk, whatever its class says
    return model if found is None else found


def hidden_size(model: nn.Module) -> int:
    """Width of the last hidden state (OPT-350m projects to `word_embed_proj_dim`)."""
    config = text_config(model.config)
    for name in ('word_embed_proj_dim', 'hidden_size', 'n_embd', 'd_model'):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    raise ValueError(f'cannot tell the hidden size of {type(model).__name__}: its config has no hidden_size')


def text_config(config: Any) -> Any:
    """Of a model of texts and images the part about texts; any other config is that itself."""
    return config.get_text_config() if hasattr(config, 'get_text_config') else config


def position_limit(config: Any) -> int | None:
    """Most tokens of one sequence; None where the config sets no limit. Of an encoder-decoder the most on each of its
    sides (of LED the smaller of both), of which the decoder's begins with a token that is not the response's.

    Of 'longrope' models (Ding et al. 2024, "LongRoPE") the length from which transformers takes other frequencies for a
    whole batch: beyond it a sequence's numbers would depend on its company.
    """
    config = text_config(config)
    limit = getattr(config, 'max_position_embeddings', None)
    if limit is None and not hasattr(config, 'relative_attention_num_buckets'):  # T5 has a number that it does not use
        sides = (getattr(config, f'max_{side}_position_embeddings', None) for side in ('encoder', 'decoder'))
        limit = getattr(config, 'n_positions', None) or min((n for n in sides if n is not None), default=None)
    if limit is not None and (limit < 1 or getattr(config, 'position_biased_input', True) is False):
        limit = None  # relative positions alone
    rope = getattr(config, 'rope_parameters', None) or {}
    for settings in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if settings.get('rope_type') == 'longrope':
            original = settings.get('original_max_position_embeddings')
            original = original or getattr(config, 'original_max_position_embeddings', None)
            limit = min(limit or original, original) if original else limit
    return limit


def positions_of(config: Any) -> str:
    """The limit in words, for an error: "the model's 1024 positions"."""
    limit, most = position_limit(config), getattr(text_config(config), 'max_position_embeddings', None)
    if most is None or limit == most:
        return f"the model's {limit} positions"
    return (
        f'{limit} tokens, from which on the rotary frequencies of {config.model_type} (longrope) follow from the '
        'longest sequence of a batch'
    )


def looks_ahead(model: nn.Module) -> bool:
    """Whether a token's hidden state depends on later tokens: an encoder, or a decoder type told to attend both
    ways."""
    config = text_config(model.config)
    if is_encoder_decoder(model):
        return False  # its decoder does not
    if getattr(config, 'is_causal', None) is False or getattr(config, 'use_bidirectional_attention', None) in (
        True,
        'all',
    ):
        return True
    encoder = config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or config.model_type == 'xlnet'
    return encoder and not getattr(config, 'is_decoder', False)


def needs_mask(model: nn.Module) -> bool:
    """Whether a right-padded batch needs its attention mask: unless the model is known to be causal."""
    config = text_config(model.config)
    custom = 'AutoModelForCausalLM' in (getattr(config, 'auto_map', None) or {})
    return looks_ahead(model) or not (custom or config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, 'config', None), 'is_encoder_decoder', False))


@cache
def _parameters_of(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def accepts(model: nn.Module, name: str) -> bool:
    return name in _parameters_of(type(model).forward)


def run_trunk(
    model: nn.Module,
    input_ids: Tensor,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | dict[str, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Last hidden states (B, S, D). Keywords that the model does not take (position ids of ALiBi models) are left out.

    `attention_mask` is True or 1 for real tokens; None means that no real token sees padding. Additive masks by kind of
    layer are handed on.
    """
    if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool and attention_mask.dim() == 2:
        attention_mask = attention_mask.long()
    if position_ids is not None and accepts(model, 'position_ids'):
        kwargs['position_ids'] = position_ids
    if accepts(model, 'use_cache'):
        kwargs.setdefault('use_cache', 'past_key_values' in kwargs)
    return model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state


def causal_encoder_hidden(model: Any, batch: Batch) -> Tensor:
    """(B*S, D) hidden states of a DeBERTa-v2 whose attention is cut so that no state sees a later token."""
    mask = batch.attention_mask
    embedded = model.embeddings(input_ids=batch.input_ids, mask=mask.long())
    earlier = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool, device=mask.device).tril()
    hidden = model.encoder(embedded, (earlier & mask[:, None, :]).long(), output_hidden_states=False).last_hidden_state
    return hidden.flatten(0, 1)


def cut_over(module: nn.Module) -> Any:
    """The group of processes that hold `module` together (tensor parallelism); None of a whole one."""
    return next((group for m in module.modules() if (group := getattr(m, 'cut_over', None)) is not None), None)


def is_meta(module: nn.Module) -> bool:
    """Whether weights are still to come."""
    return any(p.device.type == 'meta' for p in module.parameters())
