"""Access to the parts of a Hugging Face model, and its forward on a right-padded batch.

A causal model on a right-padded batch needs no attention mask: no real token comes after padding, and position ids 0,
1, 2, ... are right for every row. Padding cannot change a result, and attention takes its fast path. A bidirectional
model (an encoder used as a reward model) gets the mask. `chatgpt.nn.packing` runs whole `Batch`es.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import modeling_auto

from chatgpt.types import Batch

# transformers warns about a missing attention mask, which right-padded input does not need.
logging.getLogger('transformers.modeling_utils').addFilter(
    lambda record: 'We strongly recommend passing in an `attention_mask`' not in str(record.msg)
)


def base_model(model: nn.Module) -> nn.Module:
    """Returns the trunk of a causal LM, the part that computes hidden states, or the model itself if it is a trunk."""
    prefix = getattr(model, 'base_model_prefix', '')
    found = getattr(model, prefix, None) if prefix else None
    if found is None and getattr(model, 'get_output_embeddings', lambda: None)() is not None:
        found = getattr(model, 'model', None)  # Llama 4's trunk, under another name than its class says
    return model if found is None else found


def hidden_size(model: nn.Module) -> int:
    """Returns the width of the last hidden state (OPT-350m projects to `word_embed_proj_dim`)."""
    return width_of(model.config)


def width_of(config: Any) -> int:
    """Returns `hidden_size` of a model with this config."""
    found = text_config(config)
    for name in ('word_embed_proj_dim', 'hidden_size', 'n_embd', 'd_model'):
        if getattr(found, name, None) is not None:
            return int(getattr(found, name))
    raise ValueError(f'cannot tell the hidden size of a model: its {type(config).__name__} has no hidden_size')


def text_config(config: Any) -> Any:
    """Returns the text part of a multimodal model's config; any other config itself."""
    return config.get_text_config() if hasattr(config, 'get_text_config') else config


def recompute_activations(model: Any) -> None:
    """Makes a transformers model recompute activations in the backward pass. Raises ValueError if it cannot."""
    # transformers 5.17 has only the second name, which 5.23 deprecates
    enable = getattr(model, 'activation_checkpointing_enable', None) or model.gradient_checkpointing_enable
    enable({'use_reentrant': False})


AFTER_PADDING = frozenset(
    (
        *('camembert', 'data2vec-text', 'ibert', 'longformer', 'luke', 'mpnet', 'roberta', 'roberta-prelayernorm'),
        *('xlm-roberta', 'xlm-roberta-xl', 'xmod'),
    )
)
"""model types whose first position is the padding token's id + 1"""


def position_limit(config: Any) -> int | None:
    """Returns the most tokens of one sequence, None without a limit. Of an encoder-decoder the most of each side (of
    LED the smaller one), including the decoder's start token.

    At most `batch_limit`: beyond it a sequence's results depend on the others in the batch.
    """
    config = text_config(config)
    limit = getattr(config, 'max_position_embeddings', None)
    if limit is None and not hasattr(config, 'relative_attention_num_buckets'):  # T5 has a limit that it does not use
        sides = (getattr(config, f'max_{side}_position_embeddings', None) for side in ('encoder', 'decoder'))
        limit = getattr(config, 'n_positions', None) or min((n for n in sides if n is not None), default=None)
    if limit is not None and (limit < 1 or getattr(config, 'position_biased_input', True) is False):
        limit = None  # only relative positions
    if limit is not None and config.model_type in AFTER_PADDING:
        limit -= config.pad_token_id + 1
    found = batch_limit(config)
    return limit if found is None else min(limit or found[0], found[0])


def batch_limit(config: Any) -> tuple[int, str] | None:
    """Returns the length beyond which transformers chooses the rotary frequencies of a whole batch by its longest
    sequence, and the `rope_type`: 'longrope' (Ding et al. 2024, "LongRoPE") or 'dynamic'. None for other models."""
    config = text_config(config)
    rope = getattr(config, 'rope_parameters', None) or {}
    found = []
    for settings in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind, original = settings.get('rope_type'), getattr(config, 'max_position_embeddings', None)
        if kind == 'longrope':
            own = settings.get('original_max_position_embeddings')
            original = own or getattr(config, 'original_max_position_embeddings', None)
        if kind in ('longrope', 'dynamic') and original:
            found.append((original, kind))
    return min(found, default=None)


def row_limit(config: Any) -> int | None:
    """Returns the longest row in which a token's results depend on its position id only; None without a limit.

    The attention temperature of Llama 4's layers without rope depends on the index in the row, left padding and cache
    slots included, instead of the position id. Up to this length it is 1 everywhere.
    """
    config = text_config(config)
    if getattr(config, 'attn_temperature_tuning', False) and not all(getattr(config, 'no_rope_layers', None) or [1]):
        return int(config.floor_scale) - 1
    return None


def positions_of(config: Any) -> str:
    """Describes the limit in an error: "the model's 1024 positions (GPT2LMHeadModel)"."""
    limit, found, name = position_limit(config), batch_limit(config), name_of(config)
    if found is None or limit != found[0]:
        return f"the model's {limit} positions ({name})"
    return (
        f'{limit} tokens, from which on the rotary frequencies of {name} ({found[1]}) follow from the longest sequence '
        'of a batch'
    )


def name_of(config: Any) -> str:
    """Returns the name of a config's model in an error: its class if the config has it, else its type."""
    return next(iter(getattr(config, 'architectures', None) or ()), config.model_type)


def looks_ahead(model: nn.Module) -> bool:
    """Returns True if a token's hidden state depends on later tokens: for an encoder, or a decoder configured to be
    bidirectional."""
    config = text_config(model.config)
    if is_encoder_decoder(model):
        return False  # its decoder is causal
    if getattr(config, 'is_causal', None) is False or getattr(config, 'use_bidirectional_attention', None) in (
        True,
        'all',
    ):
        return True
    encoder = config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or config.model_type == 'xlnet'
    return encoder and not getattr(config, 'is_decoder', False)


def needs_mask(model: nn.Module) -> bool:
    """Returns True if a right-padded batch needs its attention mask: unless the model is known to be causal."""
    config = text_config(model.config)
    custom = 'AutoModelForCausalLM' in (getattr(config, 'auto_map', None) or {})
    return looks_ahead(model) or not (custom or config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_encoder_decoder(model: Any) -> bool:
    """Returns True for an encoder-decoder or its config (see `chatgpt.nn.layouts`)."""
    return bool(getattr(getattr(model, 'config', model), 'is_encoder_decoder', False))


@functools.cache
def _takes(forward: Any, name: str) -> bool:
    return name in inspect.signature(forward).parameters


def accepts(model: nn.Module, name: str) -> bool:
    """Returns True if the model's forward has a parameter of that name."""
    return _takes(type(model).forward, name)


def cache_keyword(model: Any) -> str:
    """Returns the name under which the model's forward takes a cache of transformers, or ''."""
    if accepts(model, 'past_key_values'):  # until transformers 5.23, and in models with code of their own
        return 'past_key_values'
    own = text_config(model.config).model_type == 'xlm'  # its `cache` is a dict
    return 'cache' if accepts(model, 'cache') and not own else ''


def beyond_keys_and_values(model: Any) -> str:
    """Returns why a cache of keys and values of tokens is not enough to decode with a causal model, or ''."""
    kinds = {str(kind) for kind in getattr(text_config(model.config), 'layer_types', None) or ()}
    other = sorted(kinds.difference(('full_attention', 'sliding_attention', 'chunked_attention')))
    running = any(kind in ('linear_attention', 'conv') or 'hybrid' in kind for kind in other)
    if running or (not kinds and getattr(model, '_is_stateful', False)):
        return 'its layers keep a running state, and not only keys and values of tokens'
    if other:
        return f'layers of kind {", ".join(other)} keep more than keys and values of tokens'
    return '' if cache_keyword(base_model(model)) else 'it takes no cache of keys and values'


def run_trunk(
    model: nn.Module,
    input_ids: Tensor,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | dict[str, Tensor] | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Returns the last hidden states (B, S, D). Drops keywords that the model does not take (position ids of ALiBi
    models).

    `attention_mask` is True or 1 for real tokens; None if no real token attends to padding. A dict of additive masks by
    layer type is passed on. `cache` is a `Cache` of transformers, which the forward reads and extends.
    """
    if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool and attention_mask.dim() == 2:
        attention_mask = attention_mask.long()
    if position_ids is not None and accepts(model, 'position_ids'):
        kwargs['position_ids'] = position_ids
    if accepts(model, 'use_cache'):
        kwargs.setdefault('use_cache', cache is not None)
    if cache is not None:
        kwargs[cache_keyword(model)] = cache
    return model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state


def causal_encoder_hidden(model: Any, batch: Batch) -> Tensor:
    """Returns hidden states (B*S, D) of a DeBERTa-v2 with a causal attention mask."""
    mask = batch.attention_mask
    embedded = model.embeddings(input_ids=batch.input_ids, mask=mask.long())
    earlier = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool, device=mask.device).tril()
    hidden = model.encoder(embedded, (earlier & mask[:, None, :]).long(), output_hidden_states=False).last_hidden_state
    return hidden.flatten(0, 1)


def sharding_group(module: nn.Module) -> Any:
    """Returns the group of processes that share `module` (tensor parallelism), else None."""
    return next((group for m in module.modules() if (group := getattr(m, 'sharding_group', None)) is not None), None)


def check_whole(model: nn.Module) -> None:
    """Raises ValueError if this process has parts of the weights."""
    if sharding_group(model) is not None:
        raise ValueError(
            'save_pretrained: this process has parts of the weights (tensor_parallel); save with '
            'trainer.save_pretrained or inside strategy.full_model(model, on_disk=FOLDER)'
        )


def is_meta(module: nn.Module) -> bool:
    """Returns True if a parameter is on the meta device."""
    return any(p.device.type == 'meta' for p in module.parameters())


# --- dropout and activations ----------------------------------------------------------------------------------------


def dropout_off(module: nn.Module) -> None:
    """Switches dropout off but keeps gradient checkpointing, which transformers' layers do only in train mode.

    Layers that checkpoint themselves read their training flag before their forward, which then runs with the flag off.
    From transformers 5.24 on they checkpoint only where gradients are computed; without gradients the flag is off too.
    In a model that checkpoints in its own forward, dropout probabilities are set to 0.
    """
    module.eval()
    for part in module.modules():
        if not getattr(part, 'gradient_checkpointing', False):
            continue
        part.training = True
        if isinstance(part, GradientCheckpointingLayer):
            own: Any = part._gradient_checkpointing_func
            if not isinstance(own, _FlagOff):
                part._gradient_checkpointing_func = _FlagOff(part, own)  # type: ignore[assignment]
            continue
        rates = {name: rate for name, rate in vars(part).items() if 'drop' in name and isinstance(rate, float)}
        part.dropout_rates = rates | vars(part).get('dropout_rates', {})  # those of the first call
        for name in rates:  # probabilities of F.dropout and of LayerDrop
            setattr(part, name, 0.0)


def dropout_on(module: nn.Module) -> None:
    """Sets train mode, and undoes `dropout_off`."""
    module.train()
    for part in module.modules():
        own: Any = getattr(part, '_gradient_checkpointing_func', None)
        if isinstance(own, _FlagOff):
            part._gradient_checkpointing_func = own.checkpoint  # type: ignore[assignment]
            for hook in own.hooks:
                hook.remove()
        for name, rate in vars(part).pop('dropout_rates', {}).items():
            setattr(part, name, rate)


def layer_drop_off(module: nn.Module) -> bool:
    """Switches LayerDrop (Fan et al. 2019) off. Returns True if it was on."""
    drops = [part for part in module.modules() if getattr(part, 'layerdrop', 0.0) > 0.0]
    for part in drops:
        part.layerdrop = 0.0  # type: ignore[assignment]
    return bool(drops)


class _FlagOff:
    """Checkpointing of a layer with its training flag off: in the forward, its recomputation, and a forward without
    gradients."""

    def __init__(self, layer: nn.Module, checkpoint: Callable[..., Any]) -> None:
        self.layer, self.checkpoint = layer, checkpoint
        self.without_gradients = False
        self.hooks = (
            layer.register_forward_pre_hook(self._before),
            layer.register_forward_hook(self._after, always_call=True),
        )

    def _before(self, layer: nn.Module, _: Any) -> None:
        self.without_gradients = layer.training and not torch.is_grad_enabled()
        layer.training = layer.training and torch.is_grad_enabled()

    def _after(self, layer: nn.Module, *_: Any) -> None:
        layer.training = layer.training or self.without_gradients
        self.without_gradients = False

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        return self.checkpoint(partial(self._run, run), *args)

    def _run(self, run: Callable[..., Any], *args: Any) -> Any:
        flag, self.layer.training = self.layer.training, False
        try:
            return run(*args)
        finally:
            self.layer.training = flag


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Eval mode inside this context; restores every submodule's training flag on exit."""
    flags = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, flag in flags.items():
            m.training = flag


class FusedNewGELU(NewGELUActivation):
    """Drop-in replacement for `NewGELUActivation`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate='tanh')


def use_fused_gelu(model: nn.Module) -> None:
    """Replaces every `NewGELUActivation` of the model by `FusedNewGELU`."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, FusedNewGELU())


# --- comparison of modules ------------------------------------------------------------------------------------------

_PLAIN = (bool, int, float, str, type(None))


def plain_settings(module: nn.Module) -> tuple[Any, ...]:
    """Returns class and attributes of every submodule, as far as these are numbers, strings or lists of them, without
    `training`."""
    found: list[Any] = []
    for part in module.modules():
        found.append(type(part))
        for name, value in vars(part).items():
            if name == 'training':
                continue
            if isinstance(value, _PLAIN):
                found.append((name, value))
            elif isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value):
                found.append((name, tuple(value)))
    return tuple(found)


def addresses(module: nn.Module) -> tuple[Any, ...]:
    """Returns name, address, shape and dtype of every parameter and buffer."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return tuple((name, t.data_ptr(), tuple(t.shape), t.dtype) for name, t in tensors)
