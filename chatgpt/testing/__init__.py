"""Tiny models and tokenizers for tests without a network."""

from chatgpt.testing.fakes import (
    ENCODER_DECODERS,
    FAMILIES,
    byte_tokenizer,
    char_tokenizer,
    encoder_decoder_tokenizer,
    tiny_causal_lm,
    tiny_config,
)

__all__ = ['ENCODER_DECODERS', 'FAMILIES', 'byte_tokenizer', 'char_tokenizer', 'encoder_decoder_tokenizer']
__all__ += ['tiny_causal_lm', 'tiny_config']
