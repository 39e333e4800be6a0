"""Sequences of different lengths and the models that run them, for the tests of the padding-free forward."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, GPTNeoXConfig, MistralConfig, Qwen3Config

from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Sequence

VOCAB = 64
SIZES = {
    'vocab_size': VOCAB,
    'hidden_size': 32,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'intermediate_size': 64,
    'max_position_embeddings': 64,
    'bos_token_id': 1,
    'eos_token_id': 2,
}
OTHERS = {
    'mistral': MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=64),
    'qwen3': Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    'gpt_neox': GPTNeoXConfig(**SIZES),
    'gemma': GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=8),
}
LENGTHS = [(9, 12), (3, 7), (5, 5), (4, 2), (2, 2)]


def sequences(lengths=LENGTHS, seed=1) -> list[Sequence]:
    g = torch.Generator().manual_seed(seed)
    return [
        Sequence(
            prompt_ids=torch.randint(3, VOCAB, (p,), generator=g),
            response_ids=torch.randint(3, VOCAB, (a,), generator=g),
            response_mask=torch.ones(a, dtype=torch.bool),
        )
        for p, a in lengths
    ]


def model_of(name: str) -> nn.Module:
    if name in OTHERS:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(OTHERS[name])
    return tiny_causal_lm(name)


def gradients(module: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
