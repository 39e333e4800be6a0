"""The text of every token: joined, the text of all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chatgpt.launch import demo_world
from chatgpt.testing import byte_tokenizer, char_tokenizer
from chatgpt.trainer.callbacks.token_texts import token_texts

MODELS = Path(__file__).resolve().parents[2].parent / 'shared' / 'models'
TEXT = 'A café,\n 😀 مر!'


def shared(name: str) -> Any:
    from transformers import AutoTokenizer

    if not (MODELS / name).is_dir():
        pytest.skip(f'needs ../shared/models/{name}')
    return AutoTokenizer.from_pretrained(MODELS / name)


def test_gpt2():
    tokenizer = shared('gpt2_tokenizer')
    ids = [*tokenizer(TEXT)['input_ids'], 50256]
    pieces = token_texts(tokenizer, ids)
    assert pieces == ['A', ' café', ',', '\n', ' ', '😀', ' م', 'ر', '!', '<|endoftext|>']
    assert ''.join(pieces) == TEXT + '<|endoftext|>'
    assert [tokenizer.decode([i]) for i in ids[4:6]] == [' �', '�']  # neither is a character


def test_sentencepiece():
    tokenizer = shared('stories260K')
    ids = tokenizer(TEXT)['input_ids']
    pieces = token_texts(tokenizer, ids)
    assert ''.join(pieces) == '<s> ' + TEXT
    assert pieces[:7] == ['<s>', ' ', 'A', ' c', 'a', 'f', 'é']
    start = pieces.index('😀')
    assert pieces[start - 3 : start] == ['', '', ''] and pieces[start - 4] == ' '
    assert token_texts(tokenizer, tokenizer('it ran')['input_ids'][1:])[0] == ' it'  # after a prompt it stands apart


def test_bytes():
    tokenizer = byte_tokenizer()
    pieces = token_texts(tokenizer, [*'é😀a'.encode(), tokenizer.eos_token_id])
    assert pieces == ['', 'é', '', '', '', '😀', 'a', tokenizer.eos_token]
    # Bytes that are no UTF-8: half a character before a letter, and at the end.
    assert token_texts(tokenizer, [0xC3, 0x61, 0xF0, 0x9F]) == ['', '�a', '', '�']


def test_tokenizers_with_rules_of_their_own():
    words = demo_world.demo_tokenizer()
    ids = words('the cat sat .')['input_ids']
    assert ''.join(token_texts(words, ids)) == words.decode(ids)
    letters = char_tokenizer()
    assert token_texts(letters, letters('ab a')['input_ids']) == ['a', 'b', ' ', 'a']


def test_word_pieces():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordPiece({'[UNK]': 0, 'walk': 1, '##ed': 2, 'home': 3}, unk_token='[UNK]'))
    inner.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token='[UNK]')
    assert token_texts(tokenizer, [1, 2, 3, 0]) == ['walk', 'ed', ' home', ' [UNK]']
    assert token_texts(tokenizer, [3, 1]) == ['home', ' walk']


def test_characters_of_several_tokens_under_a_tokenizer_that_only_decodes():
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: bytes(ids).decode('utf-8', 'replace'))
    assert token_texts(tokenizer, [*'a😀éb'.encode()]) == ['a', '', '', '', '😀', '', 'é', 'b']
    assert token_texts(tokenizer, [0x61, 0xF0]) == ['a', '�']


def test_without_a_tokenizer_and_of_nothing():
    assert token_texts(None, [5, 17]) == ['5', ' 17']
    assert token_texts(byte_tokenizer(), []) == token_texts(demo_world.demo_tokenizer(), []) == []
