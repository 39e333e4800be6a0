"""Ladders of model sizes, as configs without weights: the GPT-2 and OPT ladders of ColossalAI's ChatGPT benchmarks, and
a tiny one.

A rung is a name and the numbers of its config. The rung `tiny` of the first two is for tests. The tiny ladder is for
machines without a GPU; its vocabulary is small, so that memory and time grow with the blocks.
"""

from __future__ import annotations

from typing import Any

from harness import gpt2

GPT_VOCAB, OPT_VOCAB, TINY_VOCAB = 50257, 50272, 1024

GPT: dict[str, tuple[int, int, int]] = {
    'tiny': (32, 2, 2),
    's': (768, 12, 12), 'm': (1024, 24, 16), 'l': (1280, 36, 20), 'xl': (1600, 48, 25), '2b': (2048, 40, 16), '4b': (2304, 64, 16),
    '6b': (4096, 30, 16), '8b': (4096, 40, 16), '10b': (4096, 50, 16), '12b': (4096, 60, 16), '15b': (4096, 78, 16),
    '18b': (4096, 90, 16), '20b': (8192, 25, 16), '24b': (8192, 30, 16), '28b': (8192, 35, 16), '32b': (8192, 40, 16),
    '36b': (8192, 45, 16), '40b': (8192, 50, 16), '175b': (12288, 96, 96),
}  # fmt: skip
"""name -> (n_embd, n_layer, n_head)"""
OPT: dict[str, tuple[int, int, int]] = {
    'tiny': (32, 2, 2),
    '125m': (768, 12, 12), '350m': (1024, 24, 16), '700m': (1280, 36, 20), '1.3b': (2048, 24, 32), '2.7b': (2560, 32, 32),
    '3.5b': (3072, 32, 32), '5.5b': (3840, 32, 32), '6.7b': (4096, 32, 32), '10b': (5120, 32, 32), '13b': (5120, 40, 40),
}  # fmt: skip
"""name -> (hidden_size, num_hidden_layers, num_attention_heads); ffn_dim is four times the width, and the embeddings
are as wide as the blocks (the released 350m projects from 512 and norms after its blocks; the ladder's does neither)"""
TINY: dict[str, tuple[int, int, int]] = {
    '1m': (128, 4, 4), '2m': (192, 4, 4), '3m': (256, 4, 4), '5m': (256, 6, 4), '7m': (256, 8, 4), '11m': (384, 6, 6), '15m': (384, 8, 6),
    '20m': (512, 6, 8), '26m': (512, 8, 8), '39m': (512, 12, 8), '58m': (768, 8, 12), '86m': (768, 12, 12), '114m': (768, 16, 12),
    '152m': (1024, 12, 16), '203m': (1024, 16, 16),
}  # fmt: skip
"""name -> (n_embd, n_layer, n_head) of GPT-2 with a vocabulary of 1,024"""

FAMILIES: dict[str, tuple[str, dict[str, tuple[int, int, int]]]] = {
    'gpt': ('GPT', GPT),
    'opt': ('OPT', OPT),
    'tiny': ('GPT', TINY),
}
"""ladder -> (prefix of its classes, its rungs)"""


def config(ladder: str, rung: str, positions: int | None = None) -> Any:
    """Returns the transformers config of a rung. It has no end token, so that every sequence has its full length.

    positions: a longer context than the rung's.

    Raises:
        ValueError: no such ladder or rung.
    """
    if ladder not in FAMILIES:
        raise ValueError(f'there is no ladder {ladder!r}; there are {", ".join(FAMILIES)}')
    rungs = FAMILIES[ladder][1]
    if rung not in rungs:
        raise ValueError(f'the ladder {ladder} has no {rung!r}; it has {", ".join(rungs)}')
    width, layers, heads = rungs[rung]
    own = 2048 if ladder == 'opt' or rung == '175b' else 1024
    positions = max(own, positions or 0)
    if ladder == 'opt':
        return _opt(width, layers, heads, TINY_VOCAB if rung == 'tiny' else OPT_VOCAB, positions)
    vocab = TINY_VOCAB if rung == 'tiny' or ladder == 'tiny' else GPT_VOCAB
    none = {'bos_token_id': None, 'pad_token_id': None}
    return gpt2(vocab, layers, width, heads, positions, **none)


def _opt(width: int, layers: int, heads: int, vocab: int, positions: int) -> Any:
    from transformers import OPTConfig

    sizes = {'hidden_size': width, 'word_embed_proj_dim': width, 'ffn_dim': 4 * width, 'vocab_size': vocab}
    sizes |= {'num_hidden_layers': layers, 'num_attention_heads': heads, 'max_position_embeddings': positions}
    none = dict.fromkeys(('pad_token_id', 'bos_token_id', 'eos_token_id'))
    return OPTConfig(**sizes, **none, dropout=0.0, attention_dropout=0.0)
