"""Helpers of several tests of models: sizes of small configs, random sequences, comparisons, and two ways to load a
folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DebertaV2Config, GemmaConfig, GPTNeoXConfig, MistralConfig, Qwen3Config

from chatgpt.nn import initial_tensors
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Sequence

SIZES: dict[str, Any] = {
    'vocab_size': 64,
    'hidden_size': 32,
    'intermediate_size': 64,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'max_position_embeddings': 64,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 2,
}
"""fields of most transformers configs"""
IDS = torch.tensor([[5, 9, 3, 17, 40], [8, 8, 21, 2, 33]])


def sequences(lengths: Any = ((1, 1), (3, 2), (2, 7)), seed: int = 0, high: int = 60) -> list[Sequence]:
    """Returns sequences of (prompt, response) lengths with random ids in [4, high); every response token counts."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        return torch.randint(4, high, (n,), generator=generator)

    return [
        Sequence(prompt_ids=draw(p), response_ids=draw(a), response_mask=torch.ones(a, dtype=torch.bool))
        for p, a in lengths
    ]


OTHERS = {
    'mistral': MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=64),
    'qwen3': Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    'gpt_neox': GPTNeoXConfig(**SIZES),
    'gemma': GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=8),
}


def model_of(config: Any) -> Any:
    """Returns the model of a config, of a name in `OTHERS`, or of a tiny family."""
    if isinstance(config, str) and config not in OTHERS:
        return tiny_causal_lm(config)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(OTHERS.get(config, config) if isinstance(config, str) else config).eval()


def deberta_config(**kw: Any) -> DebertaV2Config:
    """Returns the config of a small encoder."""
    sizes = SIZES | {'hidden_size': 16, 'num_attention_heads': 2, 'intermediate_size': 32, 'initializer_range': 0.3}
    kinds = {'relative_attention': True, 'pos_att_type': ['p2c', 'c2p'], 'position_buckets': 8, 'share_att_key': True}
    drops = {'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0}
    return DebertaV2Config(**sizes, **kinds, **drops, type_vocab_size=0, **kw)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def disturb(model: nn.Module, scale: float = 0.3) -> None:
    """Changes all trainable parameters, as training does."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale)


def gradients(module: nn.Module, loss: Tensor) -> Tensor:
    module.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def at_once(load: Any, folder: Any) -> dict[str, Tensor]:
    module = load(folder)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def on_meta(load: Any, folder: Any) -> dict[str, Tensor]:
    with torch.device('meta'):
        module = load(folder)
    return dict(initial_tensors(module))


WAYS = pytest.mark.parametrize('load', [at_once, on_meta])
