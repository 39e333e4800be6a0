"""Stop strings over several tokens, inside a token, after incomplete characters, and in long responses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_calls import generated

from chatgpt.nn import GPTActor
from chatgpt.rollout import LocalEngine, SamplingParams, StopStrings
from chatgpt.testing import byte_tokenizer
from chatgpt.testing.fakes import tiny_config
from chatgpt.types import Prompt


class PieceTokenizer:
    """Tokens are byte strings of any length; decoding joins them, as byte-level tokenizers do."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return b''.join(self.pieces[i] for i in ids).decode('utf-8', errors='replace')


def first_hit(stop: StopStrings, ids: list[int]) -> int | None:
    """Returns the number of tokens after which an engine would stop."""
    return next((n for n in range(1, len(ids) + 1) if stop(ids[:n])), None)


def test_a_string_over_several_tokens_inside_one_and_behind_half_characters():
    tokenizer = PieceTokenizer(b'The e', b'nd', b'.', b' of')
    assert first_hit(StopStrings(tokenizer, 'end.'), [0, 1, 3, 0, 1, 2, 3]) == 6
    assert first_hit(StopStrings(PieceTokenizer(b'a', b'x\n\ny'), ['\n\n']), [0, 0, 1, 0]) == 3
    euro = '€'.encode()
    tokenizer = PieceTokenizer(b'1 ', euro[:1], euro[1:2], euro[2:] + b'!', b'\xff')
    assert first_hit(StopStrings(tokenizer, '€'), [0, 1, 2, 3]) == 4
    assert first_hit(StopStrings(tokenizer, '€!'), [0, 4, 1, 2, 3]) == 5
    assert first_hit(StopStrings(tokenizer, '€?'), [0, 1, 2, 3, 0, 0]) is None


def test_any_of_several_strings_and_long_responses():
    tokenizer = byte_tokenizer()
    stop = StopStrings(tokenizer, ['STOP', '\n\n'])
    text = 'word ' * 200
    assert first_hit(stop, list((text + 'ST OP').encode())) is None
    assert first_hit(stop, list((text + 'STOP and more').encode())) == len(text) + 4
    assert first_hit(stop, list((text + '\n\nSTOP').encode())) == len(text) + 2
    assert StopStrings(tokenizer, '<eos>')([65, tokenizer.eos_token_id])  # a special token can be one


def test_it_looks_only_at_the_end():
    """The cost of a call does not grow with the response."""
    seen = []

    class Watching(PieceTokenizer):
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            seen.append(len(ids))
            return super().decode(ids)

    stop = StopStrings(Watching(b'a'), 'bcd')
    assert not stop([0] * 5000)
    assert max(seen) == 3 + StopStrings.MARGIN


def test_cut_takes_the_first_hit():
    stop = StopStrings(byte_tokenizer(), ['###', 'END'])
    assert stop.cut('one END two ### three') == 'one '
    assert stop.cut('one ### two END') == 'one '
    assert stop.cut('nothing here') == 'nothing here'
    assert stop.cut('###') == ''


def test_no_strings_are_refused():
    for strings in ([], '', ['a', ''], [3]):
        with pytest.raises(ValueError, match='non-empty strings'):
            StopStrings(byte_tokenizer(), strings)


def test_a_string_before_min_new_tokens_neither_ends_the_response_nor_cuts_its_text():
    tokenizer = byte_tokenizer()
    sampling = SamplingParams(max_new_tokens=64, min_new_tokens=8, stop=StopStrings(tokenizer, ['END', '##']))
    stop = sampling.stop
    ids = list(b'oEND two END three')
    assert [n for n in range(1, len(ids) + 1) if n >= 8 and stop(ids[:n])][0] == len('oEND two END')
    assert stop.text_of(ids) == 'oEND two '
    assert stop.text_of(list(b'oEND and nothing more')) == 'oEND and nothing more'
    # a string that ends at token `min_new_tokens` may begin earlier
    for text, stops in (('123456##', True), ('12345##8', False), ('1234##7##0', True)):
        ids = list(text.encode())
        assert stop(ids) is stops, text
        assert stop.text_of(ids) == (text[: text.rindex('##')] if stops else text)
    # negative control: without the limit the first one counts
    assert StopStrings(tokenizer, ['END']).text_of(list(b'oEND two END three')) == 'o'
    assert replace(sampling, min_new_tokens=0).stop.text_of(list(b'oEND two END')) == 'o'


def test_min_new_tokens_in_the_middle_of_a_character():
    euro = '€'.encode()
    tokenizer = PieceTokenizer(b'1 ', euro[:1], euro[1:2], euro[2:])
    ids = [0, 1, 2, 3, 1, 2, 3]
    for least, length, text in ((4, 4, '1 '), (5, 7, '1 €'), (7, 7, '1 €')):
        stop = StopStrings(tokenizer, '€').not_before(least)
        assert next(n for n in range(least, 8) if stop(ids[:n])) == length
        assert stop.text_of(ids[:length]) == text


def test_the_engine_goes_on_past_an_early_string():
    tokenizer = PieceTokenizer(*(bytes([65 + i]) for i in range(26)))
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=26, positions=64))
    prompts = [Prompt(ids=torch.tensor([i])) for i in range(4)]
    plain = SamplingParams(max_new_tokens=40, temperature=3.0)
    free = generated(LocalEngine(), actor, plain, prompts)
    letters = [tokenizer.decode([int(s.response_ids[2])]) for s in free]  # each response contains one too early
    stopping = replace(plain, min_new_tokens=6, stop=StopStrings(tokenizer, letters))
    texts = [tokenizer.decode(s.response_ids.tolist()) for s in free]
    lengths = [next(n for n in range(6, 41) if text[n - 1] in letters) for text in texts]
    samples = generated(LocalEngine(), actor, stopping, prompts)
    assert [(s.finish_reason, s.num_actions) for s in samples] == [('stop', n) for n in lengths] and max(lengths) > 6
    for sample, text, length in zip(samples, texts, lengths, strict=True):
        assert stopping.stop.text_of(sample.response_ids.tolist()) == text[: length - 1]


def test_what_is_sure_to_stay_of_an_unfinished_text():
    stop = StopStrings(byte_tokenizer(), ['\nHuman:', '##!'])
    for text in ('Paris', 'Paris\n', 'Paris\nH', 'Paris\nHuman: what'):
        assert stop.settled(text) == 'Paris'
    for text, sure in {'Paris\nHe': 'Paris\nHe', 'a#': 'a', 'a##': 'a', '##': '', '': '', '#a': '#a'}.items():
        assert stop.settled(text) == sure
