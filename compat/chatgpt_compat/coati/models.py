"""Models of `coati`, its value loss, `generate` as a function, the manager of LoRA, and names that raise an error when
called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from chatgpt import nn as ours
from chatgpt_compat.colossalai import losses
from chatgpt_compat.colossalai.models import TakesBatch

LORA_MANAGER = SimpleNamespace(merge_weights=False)
"""`merge_weights` has no effect: saved models have their adapters merged"""


class _Masked(TakesBatch):
    """Accepts `use_action_mask`, which has no effect: a critic here returns the values of actions only."""

    def __init__(self, *arguments: Any, use_action_mask: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)


class Critic(_Masked, ours.Critic):
    def __init__(
        self,
        model: Any,
        value_head: Any = None,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        use_action_mask: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, value_head, lora_rank, lora_train_bias, **options)


class GPTCritic(_Masked, ours.GPTCritic): ...


class OPTCritic(_Masked, ours.OPTCritic): ...


class BLOOMCritic(_Masked, ours.BLOOMCritic): ...


class LlamaCritic(_Masked, ours.LlamaCritic): ...


class ValueLoss(losses.ValueLoss):
    """`ValueLoss` with the ½ that it has from coati 0.3 on."""

    def forward(self, values: Tensor, old_values: Tensor, reward: Tensor, action_mask: Tensor | None = None) -> Tensor:
        return super().forward(values, old_values, reward, action_mask) / 2


def get_base_model(model: Any) -> Any:
    """Returns the transformers model of an actor, critic or reward model."""
    return model.model


def convert_to_lora_module(module: Any, lora_rank: int, lora_train_bias: str = 'none') -> Any:
    """Adds adapters of rank `lora_rank` to a module in place, none for 0, and returns it."""
    if lora_rank > 0:
        ours.add_lora(module, lora_rank, lora_train_bias)
    return module


@torch.no_grad()
def generate(model: Any, input_ids: Tensor, tokenizer: Any = None, max_length: int = 128, **kwargs: Any) -> Tensor:
    """Returns prompts (B, P) int64 with responses by transformers' `generate`, (B, P + A)."""
    for name in ('prepare_inputs_fn', 'update_model_kwargs_fn'):
        kwargs.pop(name, None)
    if tokenizer is not None:
        kwargs = {'pad_token_id': tokenizer.pad_token_id, 'eos_token_id': tokenizer.eos_token_id} | kwargs
    bare = getattr(model, 'model', model)
    return bare.generate(input_ids, max_length=max_length, **kwargs)


# ---------------------------------------------------------------------- importable, an error when called


def _refused(what: str, instead: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(f'coati: {what} is not served; {instead}')

    refuse.from_pretrained = refuse  # type: ignore[attr-defined]
    return refuse


_GLM = 'use a causal LM of transformers'
ChatGLMActor = _refused('ChatGLMActor', _GLM)
ChatGLMTokenizer = _refused('ChatGLMTokenizer', _GLM)
llama_load_quant = _refused('llama_load_quant', 'load the model whole, or quantized by transformers')
low_resource_init = _refused('low_resource_init', 'load the model whole, or quantized by transformers')
convert_to_xformer_model = _refused('convert_to_xformer_model', 'attention is chosen by transformers already')
_BERT = 'it is no causal LM; use one of transformers, or DebertaRM for a reward model'
RoBERTaActor = _refused('RoBERTaActor', _BERT)
RoBERTaCritic = _refused('RoBERTaCritic', _BERT)
RoBERTaRM = _refused('RoBERTaRM', _BERT)
