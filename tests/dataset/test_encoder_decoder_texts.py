"""Ids of an encoder-decoder's prompts and responses, by hand: letters a to z are 6 to 31, space 4, end 2, begin 1."""

from __future__ import annotations

import pytest
import torch
from tokenizers import processors

from chatgpt.data import load_demonstrations, load_preferences, load_prompts
from chatgpt.data.examples import Demonstration
from chatgpt.data.formats import frame, is_for_encoder_decoder, note_model
from chatgpt.data.tokenize import lone_response, tokenize_demonstration
from chatgpt.nn import load_tokenizer
from chatgpt.testing import encoder_decoder_tokenizer, tiny_config

A, B, C, D = 6, 7, 8, 9
END, BEGIN, SPACE = 2, 1, 4
PAIR = {'prompt': 'ab', 'response': 'cd'}


def tokenizer_of(family: str):
    tokenizer = encoder_decoder_tokenizer(family)
    note_model(tokenizer, tiny_config(family))
    return tokenizer


@pytest.mark.parametrize(
    ('family', 'prompt', 'response'),
    [('t5', [A, B, END], [C, D, END]), ('bart', [BEGIN, A, B, END], [BEGIN, C, D, END])],
)
def test_prompt_and_response_have_the_special_tokens_that_the_tokenizer_puts_there(family, prompt, response):
    tokenizer = tokenizer_of(family)
    (record,), _ = load_demonstrations([PAIR], tokenizer)
    assert (record.prompt_ids.tolist(), record.response_ids.tolist()) == (prompt, response)
    assert record.response_mask.all()
    # input and labels in transformers' own examples of sequence-to-sequence training
    assert tokenizer('ab')['input_ids'] == prompt and tokenizer(text_target='cd')['input_ids'] == response
    assert load_prompts([{'prompt': 'ab'}], tokenizer)[0].ids.tolist() == prompt
    pairs, _ = load_preferences([{'prompt': 'ab', 'chosen': 'cd', 'rejected': 'd'}], tokenizer)
    assert [ids.tolist() for ids in pairs[0].responses] == [response, [*response[:-3], D, END]]


def test_the_tokenizer_of_a_model_folder_knows_its_model(tmp_path):
    for family in ('t5', 'gpt2'):
        tiny_config(family).save_pretrained(tmp_path / family)
        encoder_decoder_tokenizer('t5').save_pretrained(tmp_path / family)
    encoder_decoder_tokenizer('t5').save_pretrained(tmp_path / 'alone')
    noted = {name: is_for_encoder_decoder(load_tokenizer(tmp_path / name)) for name in ('t5', 'gpt2', 'alone')}
    assert noted == {'t5': True, 'gpt2': False, 'alone': False}


def test_language_codes_are_where_the_tokenizer_puts_them():
    tokenizer = tokenizer_of('t5')
    # mBART's form: the end token and a language after the source
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single='$A <eos> z', special_tokens=[('<eos>', END), ('z', 31)]
    )
    assert frame(tokenizer) == ([], [END, 31], [])
    assert load_prompts([{'prompt': 'ab'}], tokenizer)[0].ids.tolist() == [A, B, END, 31]


def test_conversations_end_with_the_end_token_and_are_answered_once():
    tokenizer = tokenizer_of('bart')
    turns = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    (record,), _ = load_demonstrations([{'messages': turns}], tokenizer)
    prompt = tokenizer.decode(record.prompt_ids)
    assert prompt.startswith('<bos>\n\n') and prompt.endswith('ssistant:<eos>')
    assert record.response_ids.tolist() == [BEGIN, SPACE, B, END]
    (again,), _ = load_demonstrations([{'messages': turns}], tokenizer, apply_chat_template=False)
    assert again.response_ids.tolist() == [BEGIN, SPACE, B, END] and again.prompt_ids[-1] == END
    with pytest.raises(ValueError, match='a response of several turns, and an encoder-decoder writes one'):
        load_demonstrations([{'messages': [*turns, *turns]}], tokenizer)


def test_a_text_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match='a text without a prompt, and an encoder-decoder needs one'):
        load_demonstrations([{'text': 'abc'}], tokenizer_of('t5'))
    kept, _ = load_demonstrations([{'text': 'abc'}, PAIR], tokenizer_of('t5'), skip_bad_records=True)
    assert len(kept) == 1 and kept.num_skipped == 1


def test_the_limit_is_of_each_side_and_special_tokens_stay():
    rows = [{'prompt': 'abcd', 'response': 'abcdabcd'}]
    cut = {'t5': ([B, C, D, END], [A, B, C, D]), 'bart': ([BEGIN, C, D, END], [BEGIN, A, B, C])}
    for family, (prompt, response) in cut.items():
        tokenizer = tokenizer_of(family)
        with pytest.warns(UserWarning, match='1 of 1 records are longer than 4 tokens and were cut'):
            (record,), _ = load_demonstrations(rows, tokenizer, max_length=4)
        assert (record.prompt_ids.tolist(), record.response_ids.tolist()) == (prompt, response)
        assert load_prompts([{'prompt': 'abcd'}], tokenizer, max_prompt_tokens=4)[0].ids.tolist() == prompt
    # 5 prompt and 9 response tokens: 14 in all, but neither side exceeds 9
    whole, _ = load_demonstrations(rows, tokenizer_of('t5'), max_length=9)
    assert torch.equal(whole[0].response_ids[-1:], torch.tensor([END]))
    with pytest.raises(ValueError, match='5 tokens of prompt and 9 of response, one of them more than max_length=8'):
        load_demonstrations(rows, tokenizer_of('t5'), max_length=8, overflow='refuse')


class TwoLanguages:
    """A tokenizer that encodes targets differently, like Marian's: each letter has the next id, after the language's
    token if one is set."""

    eos_token_id, bos_token_id, eos_token, all_special_ids, chat_template = END, None, '<eos>', (END,), None
    added_tokens_decoder, calls, tgt_lang = {}, 0, None

    def __call__(self, text=None, text_target=None, add_special_tokens=True, **_):
        self.calls += 1
        given, first = (text, A) if text is not None else (text_target, B)
        ids = [first + ord(c) - ord('a') for c in given]
        language = [] if text is not None or self.tgt_lang is None else [self.tgt_lang]
        return {'input_ids': [*language, *ids, END] if add_special_tokens else ids}

    def decode(self, ids):
        return ''.join(map(str, ids))


def test_responses_are_cut_as_the_target_language():
    tokenizer = TwoLanguages()
    note_model(tokenizer, tiny_config('t5'))
    record = tokenize_demonstration(Demonstration(prompt='ab', response='ab'), tokenizer)
    assert (record.prompt_ids.tolist(), record.response_ids.tolist()) == ([A, B, END], [B, C, END])
    assert lone_response('ab', tokenizer) == [B, C]
    assert frame(tokenizer) == ([], [END], [])
    before = tokenizer.calls
    frame(tokenizer)
    assert tokenizer.calls == before  # computed once for a language
    for language in (40, 41):  # and again for another language
        tokenizer.tgt_lang = language
        assert frame(tokenizer) == ([], [END], [language])
        record = tokenize_demonstration(Demonstration(prompt='ab', response='ab'), tokenizer)
        assert record.response_ids.tolist() == [language, B, C, END]
