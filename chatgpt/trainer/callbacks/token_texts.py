"""Texts of single tokens that join to the text of all.

A token is bytes of UTF-8, and a character may take several tokens: it belongs to the one that completes it, and the
others are ''. For tokenizers with other rules (WordPiece's ##), the pieces are found by decoding longer and longer
prefixes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

_BYTE = re.compile(r'<0x([0-9A-Fa-f]{2})>')
MAX_CACHED = 100_000
"""maximum number of cached pairs of tokens"""
_cache: WeakKeyDictionary[Any, tuple[str, dict[Any, Any]]] = WeakKeyDictionary()
"""of each tokenizer: its encoding of tokens, and the texts of tokens seen so far"""


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Returns one text per id, names for special tokens. Without a tokenizer: the numbers, with blanks between.

    The pieces of byte-level tokenizers (GPT-2, Llama 3) and of SentencePiece (Llama) join exactly to the text, except
    for the blank that SentencePiece's `decode` omits at the beginning; bytes that are not UTF-8 show as U+FFFD.
    """
    if tokenizer is None:
        return [str(i) if at == 0 else f' {i}' for at, i in enumerate(ids)]
    written, table = _cached(tokenizer)
    if written == 'otherwise':
        return _by_decoding(tokenizer, table, ids)
    unseen = [i for i in dict.fromkeys(ids) if i not in table]
    if unseen:
        apart = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        for i, token in zip(unseen, tokenizer.convert_ids_to_tokens(unseen), strict=True):
            table[i] = (token or '').encode('utf-8', 'replace') if i in apart else _bytes(token or '', written)
    return _joined([table[i] for i in ids])


def _joined(pieces: Sequence[bytes]) -> list[str]:
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    return [decoder.decode(piece, at == len(pieces) - 1) for at, piece in enumerate(pieces)]


def _cached(tokenizer: Any) -> tuple[str, dict[Any, Any]]:
    try:
        if tokenizer not in _cache:
            _cache[tokenizer] = (_encoding_of(tokenizer), {})
        return _cache[tokenizer]
    except TypeError:  # without a hash or weak references there is no cache
        return _encoding_of(tokenizer), {}


def _encoding_of(tokenizer: Any) -> str:
    """Returns 'bytes', 'sentencepiece' or 'otherwise', by the tokenizer's decoder; 'otherwise' is right for any."""
    decoder = repr(getattr(getattr(tokenizer, 'backend_tokenizer', None), 'decoder', None))
    if decoder.startswith('ByteLevel('):
        return 'bytes'
    if 'ByteFallback()' in decoder or decoder.startswith('Metaspace('):
        return 'sentencepiece'
    return 'otherwise'


def _bytes(token: str, written: str) -> bytes:
    if written == 'bytes':
        table = _byte_of_character()
        return b''.join(bytes([table[c]]) if c in table else c.encode('utf-8', 'replace') for c in token)
    if found := _BYTE.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace('\u2581', ' ').encode('utf-8', 'replace')


@cache
def _byte_of_character() -> dict[str, int]:
    """Returns GPT-2's table: a byte is the Latin-1 character of that number if printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def _by_decoding(tokenizer: Any, table: dict[Any, str], ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds to the one before, or to the few before while a character is incomplete."""
    decode = _decoder(tokenizer)
    if len(table) >= MAX_CACHED:
        table.clear()
    texts: list[str] = []
    start = read = 0
    for at, token in enumerate(ids):
        pair = (ids[start], token) if read == start + 1 == at else None
        if pair is not None and pair in table:
            texts.append(table[pair])
            start, read = at, at + 1
            continue
        before = decode(ids[start:read]) if read > start else ''
        text = decode(ids[start : at + 1])
        if text.endswith('\ufffd') and at + 1 < len(ids) and at - read < 3:  # a character has four bytes at most
            texts.append('')
            continue
        texts.append(text[len(before) :] if text.startswith(before) else text)
        if pair is not None and not text.endswith('\ufffd'):
            table[pair] = texts[-1]
        start, read = read, at + 1
    return texts


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Returns its `decode` with special tokens, without the wrapper of transformers if that changes nothing."""
    inner = getattr(tokenizer, 'backend_tokenizer', None)
    if inner is not None and not getattr(tokenizer, 'clean_up_tokenization_spaces', True):
        tokenizer = inner
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
