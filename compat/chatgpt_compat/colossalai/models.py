"""Models of ColossalAI's `chatgpt` with what this library's lack: `actor.generate`, and set-up of Llama's tokenizer.

`GPTLM` and the like are the same classes as the actors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chatgpt import nn as ours


class TakesBatch:
    """Refuses the padded ids of ColossalAI's models."""

    def forward(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(batch, Tensor):
            raise ValueError(
                f'{type(self).__name__}: ids of shape {tuple(batch.shape)} given; it takes a Batch, which '
                'chatgpt.batching.collate makes of records (docs/design.md)'
            )
        return super().forward(batch, *arguments, **options)  # type: ignore[misc]


class _Generates(TakesBatch):
    """Methods `generate` and `get_base_model` of actors."""

    model: Any

    def get_base_model(self) -> Any:
        return self.model

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, return_action_mask: bool = True, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Generates responses to `input_ids` (B, P) int64 with transformers' `generate`; left padding needs
        `pad_token_id`. Returns sequences (B, P + A); attention mask (B, P + A), None without `pad_token_id`; action
        mask (B, A) bool, True up to and including the end token. Functions of `generation_utils` have no effect."""
        for name in ('prepare_inputs_fn', 'update_model_kwargs_fn'):
            kwargs.pop(name, None)
        pad, end = kwargs.get('pad_token_id'), kwargs.get('eos_token_id')
        mask = torch.ones_like(input_ids) if pad is None else (input_ids.ne(pad).cumsum(dim=1) > 0).long()
        was_training = self.model.training
        self.model.eval()
        try:
            sequences = self.model.generate(input_ids, attention_mask=mask, **kwargs)
        finally:
            self.model.train(was_training)
        attention_mask = None if pad is None else sequences.ne(pad).long()
        if not return_action_mask:
            return sequences, attention_mask, None
        actions = sequences[:, input_ids.shape[1] :]
        ended = torch.zeros_like(actions) if end is None else (actions == end).long()
        return sequences, attention_mask, ended.cumsum(dim=1) - ended == 0


class Actor(_Generates, ours.Actor): ...


class GPTActor(_Generates, ours.GPTActor): ...


class OPTActor(_Generates, ours.OPTActor): ...


class BLOOMActor(_Generates, ours.BLOOMActor): ...


class LlamaActor(_Generates, ours.LlamaActor): ...


def smart_tokenizer_and_embedding_resize(tokenizer: Any, model: Any, special_tokens_dict: Any = None) -> None:
    """Adds a padding token to a tokenizer without one, and to the model its embedding, the mean of the others."""
    if tokenizer.pad_token is not None:
        return
    model = getattr(model, 'model', model) if isinstance(model, ours.Actor) else model
    if tokenizer.add_special_tokens(special_tokens_dict or {'pad_token': '[PAD]'}):
        before = model.get_input_embeddings().weight.shape[0]
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        with torch.no_grad():
            for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
                if embeddings is not None:
                    embeddings.weight[before:] = embeddings.weight[:before].mean(dim=0, keepdim=True)


def prepare_llama_tokenizer_and_embedding(tokenizer: Any, model: Any, special_tokens_dict: Any = None) -> Any:
    """Returns the tokenizer with a padding token, which gets an embedding, and </s> as begin, end and unknown token."""
    smart_tokenizer_and_embedding_resize(tokenizer, model, special_tokens_dict)
    tokenizer.add_special_tokens({'eos_token': '</s>', 'bos_token': '</s>', 'unk_token': '</s>'})
    return tokenizer


def _never_called(*_: Any, **__: Any) -> Any:
    """Stands for functions that scripts pass as arguments and that are never called."""
    raise NotImplementedError('the engine keeps the cache itself; leave this function out')


update_model_kwargs_fn = prepare_inputs_fn = _never_called
