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
    ends = _known_ends(config)
    if ends and not any(end in vocab.values() for end in ends):
        raise ValueError(
            f"the tokenizer does not match the model: the model's end token has id {ends[0]}, but the tokenizer has {len(vocab)} tokens "
            'and no such id; use the tokenizer the model was trained with'
        )
    if tokenizer.eos_token_id is None:
        raise ValueError('the tokenizer has no end token, so no response could end; set tokenizer.eos_token')


def _known_ends(config: Any) -> list[int]:
    """The end tokens that the config names; a family's default beyond the vocabulary of a small model says nothing."""
    given = getattr(config, 'eos_token_id', None)
    ends = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [end for end in ends if 0 <= end < config.vocab_size]


def pad_id(tokenizer: Any) -> int:
    """An id to pad with: the padding token, or, as padding is never read, any other special token.

    Raises:
        ValueError: the tokenizer has no special token at all.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id):
        if token is not None:
            return int(token)
    raise ValueError('the tokenizer has neither padding nor end token; set tokenizer.pad_token')


def pad_is_end(tokenizer: Any) -> bool:
    """Padding and end token are the same, or there is no padding token. Harmless here, where masks say what counts; a loss that masks by
    the padding id would never teach such a model to stop."""
    return tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id
