"""Encoder-decoders (T5, BART): the prompt is the encoder's, the response the decoder's.

A `Batch` is what it is for a decoder, prompt and response in one row. The prompt of each row goes through the encoder,
the start token and the response through the decoder:

    row                p1 p2 p3 r1 r2          encoder  p1 p2 p3          decoder  start r1 r2
    state at           .  .  0  1  2                                               0     1  2

and the decoder's states come back where a decoder alone would have them: the one before response token j where its
predecessor stands, the one after the last token at `last_index`, zeros elsewhere. So what reads states (log-probs,
values, scores) is the same for both kinds. Padding stands on the right of both sides: the encoder gets a mask, the
decoder is causal.

Left out: prompts that hold part of an answer (a second turn), packing, models of sound and pictures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import modeling_auto

from chatgpt.nn.trunk import base_model, is_encoder_decoder
from chatgpt.types import Batch

NOT_SERVED = ('fsmt', 'prophetnet', 'seamless_m4t', 'seamless_m4t_v2')
"""model types whose decoder, or whose head, takes other things than its own tokens and the encoder's states"""


def start_token(config: Any) -> int:
    """The token before a response. ValueError where the config names none: its language is then the user's to say."""
    start = getattr(config, 'decoder_start_token_id', None)
    if start is None and hasattr(config, 'decoder'):  # T5Gemma, whose decoder begins as the model that it was
        start = config.decoder.bos_token_id
    if start is None:
        raise ValueError(
            f'the config of this {config.model_type} names no decoder_start_token_id, before which no response can '
            'begin; set it in config.json (T5: pad_token_id; mBART: the id of the language that it writes)'
        )
    return int(start)


def check_encoder_decoder(config: Any, name: str) -> None:
    """Raises ValueError for one that is not served, and for a config that does not say how a response begins."""
    known = config.model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if not known or config.model_type not in modeling_auto.MODEL_MAPPING_NAMES or config.model_type in NOT_SERVED:
        raise ValueError(
            f'{name} is an encoder-decoder ({config.model_type}) that does not read and write texts as T5 and BART do; '
            'give one of their build, or a causal language model'
        )
    if getattr(config, 'attention_type', None) == 'block_sparse':
        raise ValueError(
            f"{name} ({config.model_type}) has attention_type='block_sparse', which transformers leaves at "
            'the first short input, so that its numbers depend on what it has read; set attention_type to '
            "'original_full' in config.json"
        )
    start_token(config)


def check_decoder_only(model: Any, what: str) -> None:
    """Raises ValueError for an encoder-decoder, of what generates with the decoder alone."""
    if is_encoder_decoder(model):
        raise ValueError(
            f"{what} decodes causal language models, and {type(model).__name__} is an encoder-decoder; use engine='hf'"
        )


def seq2seq_class(auto_class: str, config: Any, name: str) -> str:
    """transformers' auto class for an encoder-decoder, in place of that for a causal language model.

    Raises ValueError for one that is not served, and for a classifier.
    """
    check_encoder_decoder(config, name)
    if auto_class == 'AutoModelForSequenceClassification':
        raise ValueError(
            f'{name} is a classifier over an encoder-decoder ({config.model_type}), which reads its sequence twice; '
            'train a reward model from the language model instead'
        )
    return 'AutoModelForSeq2SeqLM' if auto_class == 'AutoModelForCausalLM' else auto_class


def has_no_base(model: nn.Module) -> bool:
    """Whether a model is T5's language model, or one of its build: encoder and decoder stand beside its head."""
    return hasattr(model, 'lm_head') and base_model(model) is model


def encoder_decoder_trunk(model: Any) -> Any:
    """A base model over the encoder and the decoder of a language model that has them beside its head, as T5 has."""
    with torch.device('meta'):
        base: PreTrainedModel = AutoModel.from_config(model.config)
    for name, _ in list(base.named_children()):
        setattr(base, name, getattr(model, name))
    base.config = model.config
    return base.train(model.training)


def separate_inputs(model: nn.Module) -> None:
    """Give each block inputs of its own to sum gradients in, before they join those of other blocks.

    All blocks of a decoder read the same states of the encoder. FSDP sums their gradients block by block, and without
    this autograd would add up one use after another: other last bits than under FSDP.
    """
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer) and _separate not in block._forward_pre_hooks.values():
            block.register_forward_pre_hook(_separate, with_kwargs=True)


def _separate(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(lambda x: x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x, (args, kwargs))


def decoder_states(model: Any, prompt_ids: Tensor, prompt_mask: Tensor, decoder_ids: Tensor) -> Tensor:
    """The decoder's last states (B, T, D), of a language model or its base.

    Args:
        prompt_ids: (B, P), padded on the right.
        prompt_mask: (B, P) bool, True = real token.
        decoder_ids: (B, T), of which the first is the start token.
    """
    base: Any = base_model(model)
    mask = prompt_mask.long()
    if not has_no_base(base):
        return base(
            input_ids=prompt_ids, attention_mask=mask, decoder_input_ids=decoder_ids, use_cache=False
        ).last_hidden_state
    seen = base.get_encoder()(input_ids=prompt_ids, attention_mask=mask).last_hidden_state
    return base.get_decoder()(
        input_ids=decoder_ids, encoder_hidden_states=seen, encoder_attention_mask=mask, use_cache=False
    ).last_hidden_state


def encoder_decoder_hidden(model: nn.Module, batch: Batch) -> Tensor:
    """(B*S, D) states of a batch where those of a decoder would be; zeros where there are none."""
    config: Any = model.config
    prompts, actions = _lengths(batch)
    # the one wait for the device: neither side is run at the width of both together
    width, longest = torch.stack([prompts.max(), actions.max()]).tolist()
    places = torch.arange(batch.input_ids.shape[1], device=prompts.device)
    pad = getattr(config, 'pad_token_id', None) or 0  # some count positions from it
    prompt_mask = places[None, :width] < prompts[:, None]
    prompt_ids = batch.input_ids[:, :width].masked_fill(~prompt_mask, pad)
    steps = torch.arange(longest + 1, device=prompts.device)
    decoder_ids = batch.input_ids.gather(1, (prompts[:, None] - 1 + steps).clamp(max=len(places) - 1))
    decoder_ids = decoder_ids.masked_fill(steps > actions[:, None], pad).index_fill(1, steps[:1], start_token(config))
    return at_their_places(decoder_states(model, prompt_ids, prompt_mask, decoder_ids), batch)


def at_their_places(states: Tensor, batch: Batch) -> Tensor:
    """(B*S, D) out of the decoder's (B, T, D): each state where the token stands that it has seen last."""
    prompts, actions = _lengths(batch)
    steps = torch.arange(batch.input_ids.shape[1], device=states.device) - (prompts[:, None] - 1)  # (B, S)
    there = (steps >= 0) & (steps <= actions[:, None])
    rows = torch.arange(len(states), device=states.device)[:, None] * states.shape[1]
    found = states.flatten(0, 1)[(rows + steps.clamp(0, states.shape[1] - 1)).flatten()]
    return torch.where(there.flatten()[:, None], found, found.new_zeros(()))


def _lengths(batch: Batch) -> tuple[Tensor, Tensor]:
    """Tokens of each row's prompt and of its response, (B,) int64 each."""
    rows = torch.arange(batch.num_sequences, device=batch.last_index.device)
    actions = torch.zeros_like(rows).index_add(0, batch.action_rows, torch.ones_like(batch.action_rows))
    return batch.last_index - rows * batch.input_ids.shape[1] + 1 - actions, actions
