"""How a model reads a prompt and writes a response: in one row, as a decoder does, or apart, as an encoder-decoder.

`layout_of(model)` gives one of two objects with the same face. Of an encoder-decoder (T5, BART) the prompt is the
encoder's and the response the decoder's. A `Batch` is what it is for a decoder, prompt and response in one row:

    row                p1 p2 p3 r1 r2          encoder  p1 p2 p3          decoder  start r1 r2
    state at           .  .  0  1  2                                               0     1  2

and the decoder's states come back where a decoder alone would have them: the one before response token j where its
predecessor stands, the one after the last token at `last_index`, zeros elsewhere. So what reads states (log-probs,
values, scores) is the same for both kinds. Padding stands on the right of both sides: the encoder gets a mask, the
decoder is causal.
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

from chatgpt.nn.trunk import base_model, is_encoder_decoder, position_limit, run_trunk
from chatgpt.types import Batch

NOT_SERVED = ('fsmt', 'prophetnet', 'seamless_m4t', 'seamless_m4t_v2')
"""model types whose decoder, or whose head, takes other things than its own tokens and the encoder's states"""


class OneRow:
    """A decoder, or an encoder used as one: prompt and response stand in one row of positions."""

    apart = False
    language_model = 'AutoModelForCausalLM'
    task_type = 'CAUSAL_LM'
    """PEFT's"""
    counted = ''
    """what an error adds to a number of tokens"""

    def check(self, config: Any, name: str) -> None:
        """Raises ValueError for a model that cannot be served."""

    def auto_class(self, auto_class: str, config: Any, name: str) -> str:
        """transformers' class for such a model, in place of that for a causal language model."""
        return auto_class

    def length(self, prompt: int, response: int) -> int:
        """The tokens of a prompt and a response that count against the model's positions."""
        return prompt + response

    def most(self, limit: int) -> int:
        """The longest sequence, or side of one, of a model with so many positions."""
        return limit

    def blocks_in(self, base: Any) -> Any:
        """The part of a base model that holds the blocks which write."""
        return base

    def trunks(self, model: Any) -> list[nn.Module]:
        """The modules of which the forward of a language model may call one: OPT calls the decoder inside of its base
        model."""
        base, decoder = base_model(model), getattr(model, 'get_decoder', lambda: None)()
        # ModernBERT's decoder calls its output layer so.
        return [base, decoder] if isinstance(decoder, PreTrainedModel) and decoder not in (base, model) else [base]

    def base(self, model: Any) -> tuple[Any, str]:
        """The base model, and the prefix of its tensors' names in `model`."""
        return base_model(model), f'{model.base_model_prefix}.'

    def inputs(self, ids: Tensor) -> dict[str, Any]:
        """Keywords of a language model's forward over ids (1, S) that stand for themselves."""
        return {'input_ids': ids, 'use_cache': False}

    def states(self, model: Any, ids: Tensor) -> Tensor:
        """The last states (1, S, D) for the same ids."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return run_trunk(base_model(model), ids, position_ids=positions)

    def reader(self, actor: Any, prompt_ids: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What is read first to write a response to a prompt, (P,) ids, and a function that gives the states (1, n, D)
        of the next ids (1, n), with a cache."""
        cache = DynamicCache()

        def states_of(ids: Tensor) -> Tensor:
            start = cache.get_seq_length()
            positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
            return actor.trunk(ids, position_ids=positions, past_key_values=cache, use_cache=True)

        return prompt_ids, states_of


class Apart(OneRow):
    """An encoder-decoder: prompt and response have positions of their own, and the start token precedes a response."""

    apart = True
    language_model = 'AutoModelForSeq2SeqLM'
    task_type = 'SEQ_2_SEQ_LM'
    counted = ' on one side, the start token included'

    def check(self, config: Any, name: str) -> None:
        known = config.model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        if not known or config.model_type not in modeling_auto.MODEL_MAPPING_NAMES or config.model_type in NOT_SERVED:
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
            return decoder(
                input_ids=ids, encoder_hidden_states=seen, past_key_values=cache, use_cache=True
            ).last_hidden_state

        return prompt_ids.new_tensor([start_token(actor.model.config)]), states_of


ONE_ROW, APART = OneRow(), Apart()


def layout_of(model: Any) -> OneRow:
    """The layout of a model, or of its config."""
    return APART if is_encoder_decoder(model) else ONE_ROW


def check_causal(model: Any, what: str, instead: str = 'give a causal language model') -> None:
    """Raises ValueError for an encoder-decoder, of what takes only causal language models. `model` may be a config;
    `what` begins the sentence, and `instead` says what to do."""
    if layout_of(model).apart:
        name = type(model).__name__ if hasattr(model, 'config') else model.model_type
        raise ValueError(f'{what} causal language models, and {name} is an encoder-decoder; {instead}')


def longest_side(config: Any) -> int | None:
    """Most tokens of a sequence; of an encoder-decoder of its prompt and of its response. None without a limit."""
    limit = position_limit(config)
    return None if limit is None else layout_of(config).most(limit)


def room_beside(config: Any, num_tokens: int) -> int | None:
    """Most tokens of a response to a prompt of so many, or of a prompt before such a response. None without a limit."""
    limit = longest_side(config)
    return limit if limit is None or layout_of(config).apart else limit - num_tokens


# --- encoder-decoders -----------------------------------------------------------------------------------------------


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


def _has_no_base(model: nn.Module) -> bool:
    """Whether a model is T5's language model, or one of its build: encoder and decoder stand beside its head."""
    return hasattr(model, 'lm_head') and base_model(model) is model


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
    if not _has_no_base(base):
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
