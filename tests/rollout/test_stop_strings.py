"""Stop strings: spanning tokens, inside a token, half characters, long responses."""

from __future__ import annotations

import pytest

from chatgpt.rollout import StopStrings
from chatgpt.testing import byte_tokenizer


class PieceTokenizer:
    """Tokens are byte strings of any length; decoding joins them, as byte-level tokenizers do."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return b''.join(self.pieces[i] for i in ids).decode('utf-8', errors='replace')


def first_hit(stop: StopStrings, ids: list[int]) -> int | None:
    """After how many tokens an engine would stop."""
    return next((n for n in range(1, len(ids) + 1) if stop(ids[:n])), None)


def test_a_string_over_several_tokens_stops_at_its_last_one():
    tokenizer = PieceTokenizer(b'The e', b'nd', b'.', b' of')
    assert first_hit(StopStrings(tokenizer, 'end.'), [0, 1, 3, 0, 1, 2, 3]) == 6


def test_a_string_inside_one_token():
    tokenizer = PieceTokenizer(b'a', b'x\n\ny')
    assert first_hit(StopStrings(tokenizer, ['\n\n']), [0, 0, 1, 0]) == 3


def test_half_characters():
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


def test_it_looks_only_at_the_end():
    """The cost of a question does not grow with the response."""
    seen = []

    class Watching(PieceTokenizer):
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            seen.append(len(ids))
            return super().decode(ids)

    stop = StopStrings(Watching(b'a'), 'bcd')
    assert not stop([0] * 5000)
    assert max(seen) == 3 + StopStrings.MARGIN


def test_a_special_token_can_be_a_stop_string():
    tokenizer = byte_tokenizer()
    assert StopStrings(tokenizer, '<eos>')([65, tokenizer.eos_token_id])


def test_cut_takes_the_first_hit():
    stop = StopStrings(byte_tokenizer(), ['###', 'END'])
    assert stop.cut('one END two ### three') == 'one '
    assert stop.cut('one ### two END') == 'one '
    assert stop.cut('nothing here') == 'nothing here'
    assert stop.cut('###') == ''


@pytest.mark.parametrize('strings', [[], '', ['a', ''], [3]])
def test_no_strings_are_refused(strings):
    with pytest.raises(ValueError, match='non-empty strings'):
        StopStrings(byte_tokenizer(), strings)


@pytest.mark.parametrize(('text', 'sure'), [
    ('Paris', 'Paris'), ('Paris\n', 'Paris'), ('Paris\nH', 'Paris'), ('Paris\nHe', 'Paris\nHe'), ('Paris\nHuman: what', 'Paris'),
    ('a#', 'a'), ('a##', 'a'), ('##', ''), ('', ''), ('#a', '#a'),
])  # fmt: skip
def test_what_is_sure_to_stay_of_an_unfinished_text(text, sure):
    assert StopStrings(byte_tokenizer(), ['\nHuman:', '##!']).settled(text) == sure
