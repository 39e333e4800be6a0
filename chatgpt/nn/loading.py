"""Loading Hugging Face models, configs and tokenizers: one-line errors, no pickled weights, no remote code unless asked for.

On the meta device (inside a sharded strategy's `model_init_context`) nothing is read: the model carries a `WeightsSource`, and the
strategy fills its shards from it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from chatgpt.nn.sources import WeightsSource, draw_seed, fill_model


def _explained(what: str, name: str, error: Exception) -> ValueError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ValueError(f'cannot load {what} from {name!r}: {reason}')


def load_config(pretrained: str, *, trust_remote_code: bool = False) -> Any:
    """The config of a hub name or folder. ValueError in one line when there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(pretrained, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _explained('a model config', pretrained, error) from None


def load_tokenizer(pretrained: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a hub name or folder. Without a padding token it gets the end token's, which the masks tell apart."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(pretrained, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _explained('a tokenizer', pretrained, error) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def on_meta() -> bool:
    """Whether modules are built on the meta device now."""
    return torch.empty(0).device.type == 'meta'


def load_model(
    auto_class: str, pretrained: str | None, config: Any, *, trust_remote_code: bool = False, checkpoint: bool = False
) -> nn.Module:
    """A model of transformers' `auto_class` from a hub name or folder, or a new one from a config, in fp32.

    Args:
        checkpoint: recompute activations in the backward pass (gradient checkpointing).

    Raises:
        ValueError: both or neither of `pretrained` and `config`, or nothing can be loaded; one line.
    """
    import transformers

    cls = getattr(transformers, auto_class)
    if (pretrained is None) == (config is None):
        raise ValueError('give either pretrained (a hub name or folder) or config, not both')
    if pretrained is None or on_meta():
        source = (
            WeightsSource(kind='config', seed=draw_seed())
            if pretrained is None
            else WeightsSource(kind='pretrained', path=pretrained, seed=draw_seed())
        )
        config = config if pretrained is None else load_config(pretrained, trust_remote_code=trust_remote_code)
        model = cls.from_config(config, trust_remote_code=trust_remote_code)
        model = model.float()
        model.weights_source = source
        if not on_meta():
            fill_model(model, source)
    else:
        try:
            model = cls.from_pretrained(
                pretrained, trust_remote_code=trust_remote_code, use_safetensors=True, dtype=torch.float32
            )
        except (OSError, ValueError) as error:
            raise _explained('a model', pretrained, error) from None
        model.weights_source = WeightsSource(kind='pretrained', path=pretrained, seed=draw_seed())
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
    return model


def load_causal_lm(pretrained: str | None = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """A causal language model; see `load_model`."""
    return load_model('AutoModelForCausalLM', pretrained, config, **kwargs)


def load_base_model(pretrained: str | None = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """A model without a head; see `load_model`."""
    return load_model('AutoModel', pretrained, config, **kwargs)


def load_classifier(pretrained: str, **kwargs: Any) -> nn.Module:
    """A sequence-classification model; see `load_model`."""
    return load_model('AutoModelForSequenceClassification', pretrained, None, **kwargs)


def write_folder(model: Any, folder: str | os.PathLike[str], state_dict: dict[str, Any] | None = None) -> None:
    """`model.save_pretrained` without its progress bar. `state_dict` replaces the model's own weights."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=state_dict)
    finally:
        if shown:
            logging.enable_progress_bar()
