"""The fakes are real transformers objects."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from chatgpt.testing import FAMILIES, byte_tokenizer, char_tokenizer, tiny_causal_lm, tiny_config


def test_byte_tokenizer_is_the_utf8_bytes_and_special_tokens_outside_of_them():
    tokenizer = byte_tokenizer()
    for text in ('Hello  wörld\n\t日本 🙂', '', ' ', 'a' * 50):
        ids = tokenizer(text)['input_ids']
        assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id} == {256, 257, 258}
    assert tokenizer('a<eos>')['input_ids'] == [97, 258]
    assert tokenizer.decode([97, 258], skip_special_tokens=True) == 'a'
    assert tokenizer(['ab', 'a'], padding=True)['input_ids'] == [[97, 98], [97, 256]]


def test_char_tokenizer_fits_the_tiny_models():
    tokenizer = char_tokenizer()
    assert len(tokenizer) <= tiny_config().vocab_size
    text = "it's 7 o'clock.\n"
    ids = tokenizer(text)['input_ids']
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer('é')['input_ids'] == [3]


@pytest.mark.parametrize('family', FAMILIES)
def test_tiny_models_follow_their_seed(family):
    ids = torch.tensor([[5, 6, 7]])
    state = torch.get_rng_state()
    one, same, other = (tiny_causal_lm(family, seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state), 'the global generator was used up'
    assert isinstance(one, PreTrainedModel) and not one.training
    assert sum(p.numel() for p in one.parameters()) < 50_000
    with torch.no_grad():
        assert torch.equal(one(ids).logits, same(ids).logits)
        assert not torch.allclose(one(ids).logits, other(ids).logits, atol=1e-2)
