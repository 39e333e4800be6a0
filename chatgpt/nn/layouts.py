"""Layouts of prompt and response: one row for a decoder-only model, two sides for an encoder-decoder.

`layout_of(model)` returns one of two objects with the same interface. In an encoder-decoder (T5, BART) the encoder
reads the prompt and the decoder the response. A `Batch` is the same as for a decoder, prompt and response in one row:

    row                p1 p2 p3 r1 r2          encoder  p1 p2 p3          decoder  start r1 r2
    state at           .  .  0  1  2                                               0     1  2

and the decoder's states are returned at the positions of a decoder-only model: the state that predicts response token j
at the token before it, the state after the last token at `last_index`, zeros elsewhere. Log-probs, values and scores
are then computed alike for both. Both sides are padded on the right: the encoder gets a mask, the decoder is causal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AutoModel, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import modeling_auto

from chatgpt.nn.trunk import (
    base_model,
    beyond_keys_and_values,
    cache_keyword,
    is_encoder_decoder,
    position_limit,
    run_trunk,
)
from chatgpt.types import Batch

UNSUPPORTED = ('fsmt', 'prophetnet', 'seamless_m4t', 'seamless_m4t_v2')
"""model types with a decoder or head that takes other inputs than its own tokens and the encoder's states"""


class DecoderOnly:
    """A decoder, or an encoder used as one: prompt and response are in one row of positions."""

    is_encoder_decoder = False
    language_model = 'AutoModelForCausalLM'
    task_type = 'CAUSAL_LM'
    """PEFT's name"""
    counted = ''
    """added to a number of tokens in errors"""

    def check(self, config: Any, name: str) -> None:
        """Raises ValueError for an unsupported model."""

    def auto_class(self, auto_class: str, config: Any, name: str) -> str:
        """Returns transformers' auto class for this layout, given that of a causal language model."""
        return auto_class

    def length(self, prompt: int, response: int) -> int:
        """Returns the number of positions that a prompt and a response need."""
        return prompt + response

    def most(self, limit: int) -> int:
        """Returns the longest sequence, or side of one, for a model with `limit` positions."""
        return limit

    def blocks_in(self, base: Any) -> Any:
        """Returns the part of a base model with the blocks that generate."""
        return base

    def trunks(self, model: Any) -> list[nn.Module]:
        """Returns the modules that the forward of a language model may call for its hidden states: OPT calls the
        decoder inside its base model."""
        base, decoder = base_model(model), getattr(model, 'get_decoder', lambda: None)()
        # ModernBERT's decoder has its output layer under this name.
        return [base, decoder] if isinstance(decoder, PreTrainedModel) and decoder not in (base, model) else [base]

    def base(self, model: Any) -> tuple[Any, str]:
        """Returns the base model, and the prefix of its tensors' names in `model`."""
        return base_model(model), f'{model.base_model_prefix}.'

    def inputs(self, ids: Tensor) -> dict[str, Any]:
        """Returns keywords of a language model's forward over ids (1, S)."""
        return {'input_ids': ids, 'use_cache': False}

    def states(self, model: Any, ids: Tensor) -> Tensor:
        """Returns the last hidden states (1, S, D) for the same ids."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return run_trunk(base_model(model), ids, position_ids=positions)

    def reader(self, actor: Any, prompt_ids: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Returns the ids to read first for a response to a prompt (P,), and a function that maps the next ids (1, n)
        to states (1, n, D), with a cache, or by reading all again where a cache of keys and values is not enough."""
        cache, seen = DynamicCache(), prompt_ids[None, :0]
        again = bool(beyond_keys_and_values(actor.model))

        def states_of(ids: Tensor) -> Tensor:
            nonlocal seen
            if again:
                seen = torch.cat([seen, ids], dim=1)
                return actor.trunk(seen, position_ids=torch.arange(seen.shape[1], device=ids.device)[None])
            start = cache.get_seq_length()
            positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
            return actor.trunk(ids, position_ids=positions, cache=cache)

        return prompt_ids, states_of


class EncoderDecoder(DecoderOnly):
    """An encoder-decoder: prompt and response have separate positions, and a start token precedes the response."""

    is_encoder_decoder = True
    language_model = 'AutoModelForSeq2SeqLM'
    task_type = 'SEQ_2_SEQ_LM'
    counted = ' on one side, the start token included'

    def check(self, config: Any, name: str) -> None:
        known = config.model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        if not known or config.model_type not in modeling_auto.MODEL_MAPPING_NAMES or config.model_type in UNSUPPORTED:
            raise ValueError(
                f'{name} is an encoder-decoder ({config.model_type}) that does not read and write texts as T5 and BART '
                'do; give one of their build, or a causal language model'
            )
        if getattr(config, 'attention_type', None) == 'block_sparse':
            raise ValueError(
                f"{name} ({config.model_type}) has attention_type='block_sparse', which transformers leaves at "
                'the first short input, so that its numbers depend on what it has read; set attention_type to '
                "'original_full' in config.json"
            )
        start_token(config)

    def auto_class(self, auto_class: str, config: Any, name: str) -> str:
        self.check(config, name)
        if auto_class == 'AutoModelForSequenceClassification':
            raise ValueError(
                f'{name} is a classifier over an encoder-decoder ({config.model_type}), which reads its sequence '
                'twice; train a reward model from the language model instead'
            )
        return self.language_model if auto_class == 'AutoModelForCausalLM' else auto_class

    def length(self, prompt: int, response: int) -> int:
        return max(prompt, response + 1)

    def most(self, limit: int) -> int:
        return limit - 1

    def blocks_in(self, base: Any) -> Any:
        return base.get_decoder()

    def trunks(self, model: Any) -> list[nn.Module]:
        return [model.get_encoder(), model.get_decoder()] if _has_no_base(model) else super().trunks(model)

    def base(self, model: Any) -> tuple[Any, str]:
        self.check(model.config, type(model).__name__)
        if not _has_no_base(model):
            return super().base(model)
        with torch.device('meta'):
            base: PreTrainedModel = AutoModel.from_config(model.config)
        for name, _ in list(base.named_children()):
            setattr(base, name, getattr(model, name))
        base.config = model.config
        return base.train(model.training), ''

    def inputs(self, ids: Tensor) -> dict[str, Any]:
        return super().inputs(ids) | {'decoder_input_ids': ids}

    def states(self, model: Any, ids: Tensor) -> Tensor:
        return decoder_states(model, ids, torch.ones_like(ids, dtype=torch.bool), ids)

    def reader(self, actor: Any, prompt_ids: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        base: Any = base_model(actor.model)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        seen = base.get_encoder()(input_ids=prompt_ids[None]).last_hidden_state

        def states_of(ids: Tensor) -> Tensor:
            decoder = base.get_decoder()
            read = {'encoder_hidden_states': seen, cache_keyword(decoder): cache, 'use_cache': True}
            return decoder(input_ids=ids, **read).last_hidden_state

        return prompt_ids.new_tensor([start_token(actor.model.config)]), states_of


DECODER_ONLY, ENCODER_DECODER = DecoderOnly(), EncoderDecoder()


def layout_of(model: Any) -> DecoderOnly:
    """Returns the layout of a model or its config."""
    return ENCODER_DECODER if is_encoder_decoder(model) else DECODER_ONLY


def check_causal(model: Any, what: str, instead: str = 'give a causal language model') -> None:
    """Raises ValueError for an encoder-decoder. `model` may be a config; the message begins with `what` and ends with
    `instead`."""
    if layout_of(model).is_encoder_decoder:
        name = type(model).__name__ if hasattr(model, 'config') else model.model_type
        raise ValueError(f'{what} causal language models, and {name} is an encoder-decoder; {instead}')


def longest_side(config: Any) -> int | None:
    """Returns the most tokens of a sequence, or of an encoder-decoder's prompt or response. None without a limit."""
    limit = position_limit(config)
    return None if limit is None else layout_of(config).most(limit)


def remaining_positions(config: Any, num_tokens: int) -> int | None:
    """Returns the most tokens of a response to a prompt of `num_tokens`, or the reverse. None without a limit."""
    limit = longest_side(config)
    return limit if limit is None or layout_of(config).is_encoder_decoder else limit - num_tokens


# --- encoder-decoders -----------------------------------------------------------------------------------------------


def start_token(config: Any) -> int:
    """Returns the token before a response. Raises ValueError if the config has none: then it is a language that the
    user must choose."""
    start = getattr(config, 'decoder_start_token_id', None)
    if start is None and hasattr(config, 'decoder'):  # T5Gemma's decoder starts like the model it was made from
        start = config.decoder.bos_token_id
    if start is None:
        raise ValueError(
            f'the config of this {config.model_type} names no decoder_start_token_id, before which no response can '
            'begin; set it in config.json (T5: pad_token_id; mBART: the id of the language that it writes)'
        )
    return int(start)


def _has_no_base(model: nn.Module) -> bool:
    """Returns True for a model like T5's language model: encoder, decoder and head are siblings."""
    return hasattr(model, 'lm_head') and base_model(model) is model


def separate_inputs(model: nn.Module) -> None:
    """Makes autograd sum the gradients of shared inputs within each block first, as FSDP does.

    All blocks of a decoder read the same encoder states. Without this, autograd adds one use after another, and the sum
    differs from FSDP's in its last bits.
    """
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer) and _separate not in block._forward_pre_hooks.values():
            block.register_forward_pre_hook(_separate, with_kwargs=True)


def _separate(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(lambda x: x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x, (args, kwargs))


def decoder_states(model: Any, prompt_ids: Tensor, prompt_mask: Tensor, decoder_ids: Tensor) -> Tensor:
    """Returns the decoder's last hidden states (B, T, D), of a language model or its base.

    Args:
        prompt_ids: (B, P), padded on the right.
        prompt_mask: (B, P) bool, True = real token.
        decoder_ids: (B, T), beginning with the start token.
    """
    base: Any = base_model(model)
    mask = prompt_mask.long()
    if not _has_no_base(base):
        return base(
            input_ids=prompt_ids, attention_mask=mask, decoder_input_ids=decoder_ids, use_cache=False
        ).last_hidden_state
    seen = base.get_encoder()(input_ids=prompt_ids, attention_mask=mask).last_hidden_state
    return base.get_decoder()(
        input_ids=decoder_ids, encoder_hidden_states=seen, encoder_attention_mask=mask, use_cache=False
    ).last_hidden_state


def encoder_decoder_hidden(model: nn.Module, batch: Batch) -> Tensor:
    """Returns states (B*S, D) of a batch at the positions of a decoder-only model; zeros elsewhere."""
    config: Any = model.config
    prompts, actions = _lengths(batch)
    # the only synchronisation with the device: each side is padded to its own longest length
    width, longest = torch.stack([prompts.max(), actions.max()]).tolist()
    places = torch.arange(batch.input_ids.shape[1], device=prompts.device)
    pad = getattr(config, 'pad_token_id', None) or 0  # some models compute positions from it
    prompt_mask = places[None, :width] < prompts[:, None]
    prompt_ids = batch.input_ids[:, :width].masked_fill(~prompt_mask, pad)
    steps = torch.arange(longest + 1, device=prompts.device)
    decoder_ids = batch.input_ids.gather(1, (prompts[:, None] - 1 + steps).clamp(max=len(places) - 1))
    decoder_ids = decoder_ids.masked_fill(steps > actions[:, None], pad).index_fill(1, steps[:1], start_token(config))
    return scatter_states(decoder_states(model, prompt_ids, prompt_mask, decoder_ids), batch)


def scatter_states(states: Tensor, batch: Batch) -> Tensor:
    """Maps the decoder's states (B, T, D) to (B*S, D): each state at the position of the last token that it has
    read."""
    prompts, actions = _lengths(batch)
    steps = torch.arange(batch.input_ids.shape[1], device=states.device) - (prompts[:, None] - 1)  # (B, S)
    there = (steps >= 0) & (steps <= actions[:, None])
    rows = torch.arange(len(states), device=states.device)[:, None] * states.shape[1]
    found = states.flatten(0, 1)[(rows + steps.clamp(0, states.shape[1] - 1)).flatten()]
    return torch.where(there.flatten()[:, None], found, found.new_zeros(()))


def _lengths(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the number of prompt and of response tokens of each row, (B,) int64 each."""
    rows = torch.arange(batch.num_sequences, device=batch.last_index.device)
    actions = torch.zeros_like(rows).index_add(0, batch.action_rows, torch.ones_like(batch.action_rows))
    return batch.last_index - rows * batch.input_ids.shape[1] + 1 - actions, actions
