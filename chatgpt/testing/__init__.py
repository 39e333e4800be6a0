"""Small things that make the library testable offline: tiny models and real, tiny tokenizers."""

from chatgpt.testing.fakes import FAMILIES, byte_tokenizer, char_tokenizer, tiny_causal_lm, tiny_config

__all__ = ['FAMILIES', 'byte_tokenizer', 'char_tokenizer', 'tiny_causal_lm', 'tiny_config']
