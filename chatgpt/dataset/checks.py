"""Whether a tokenizer and a model belong together, found out from the config, before any weight is loaded."""

from __future__ import annotations

from typing import Any


def check_tokenizer(tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer whose ids the model does not have, or that cannot end a response.

    Raises:
        ValueError: one line with what was found and what to do.
    """
    config = config.get_text_config() if hasattr(config, 'get_text_config') else config
    vocab = tokenizer.get_vocab()
    largest = max(vocab.values(), default=-1)
    if largest >= config.vocab_size:
        token = next(t for t, i in vocab.items() if i == largest)
        raise ValueError(
            f'the tokenizer does not match the model: its token {token!r} has id {largest}, but the model has a vocabulary of '
            f'{config.vocab_size}; use the tokenizer the model was trained with, or resize its embeddings'
        )
    if tokenizer.eos_token_id is None:
        raise ValueError('the tokenizer has no end token, so no response could end; set tokenizer.eos_token')
