"""Stop strings: whether the response so far contains one, and the text up to it.

An engine sees token ids only, so a stop string is handed to it as a callable on ids. Nothing is ever tokenized
again: the tokens a policy is trained on are exactly the sampled ones, and only the text given to scorers is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatgpt.types import Sample


class StopStrings:
    """True once the response contains one of the strings; an engine asks after every token.

    A stop string may span several tokens and begin or end inside one, and a token may hold part of a UTF-8 character.
    One that ends before token `min_new_tokens` does not count: it neither ends the response nor cuts its text.
    `SamplingParams` sets that number.

    >>> StopStrings(tokenizer, ['###', '\\n\\n']).cut('Paris. ### Next question')                    # doctest: +SKIP
    'Paris. '
    """

    # a decoder may treat the first token of a window in its own way (a dropped space, half a character), so the
    # window holds a few tokens more than a stop string can span
    MARGIN = 8

    def __init__(self, tokenizer: Any, strings: str | Sequence[str]) -> None:
        """tokenizer: anything with `decode(ids, skip_special_tokens=...)`. Raises ValueError for no or empty
        strings."""
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not self.strings or not all(isinstance(s, str) and s for s in self.strings):
            raise ValueError(f'StopStrings: got {strings!r}; give one or more non-empty strings')
        self.tokenizer = tokenizer
        self.min_new_tokens = 0
        # every token carries at least one byte, so no stop string spans more tokens than it has bytes
        self.window = max(len(s.encode('utf-8')) for s in self.strings) + self.MARGIN

    def __call__(self, response_ids: Sequence[int]) -> bool:
        """Whether a stop string ends within the last few tokens: those that a string ending at the newest token can
        span."""
        tail = list(response_ids[-self.window :])
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        if not any(s in text for s in self.strings):
            return False
        too_early = self.min_new_tokens - 1 - (len(response_ids) - len(tail))  # tokens of the tail
        return self._first(text, self._length(tail[: max(too_early, 0)], skip_special_tokens=False)) is not None

    def not_before(self, min_new_tokens: int) -> StopStrings:
        """The same strings, which count from this token on."""
        if min_new_tokens == self.min_new_tokens:
            return self
        other = copy(self)
        other.min_new_tokens = min_new_tokens
        return other

    def text_of(self, response_ids: Sequence[int]) -> str:
        """The text of a response, without special tokens, before the first stop string that counts."""
        text = self.tokenizer.decode(response_ids, skip_special_tokens=True)
        return self.cut(text, self.start(response_ids))

    def start(self, response_ids: Sequence[int]) -> int:
        """Characters of the response's text in which no stop string may end: those of the tokens before
        `min_new_tokens`."""
        return self._length(response_ids[: max(self.min_new_tokens - 1, 0)], skip_special_tokens=True)

    def cut(self, text: str, start: int = 0) -> str:
        """The text before the first stop string that ends after `start` characters; all of it where there is none."""
        return text[: self._first(text, start)]

    def settled(self, text: str, start: int = 0) -> str:
        """What of an unfinished response is sure to stay: up to the first stop string, or up to an ending that may grow
        into one."""
        cut = self.cut(text, start)
        if len(cut) < len(text):
            return cut
        for size in range(min(max(map(len, self.strings)) - 1, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self.strings):
                return text[:-size]
        return text

    def _first(self, text: str, start: int) -> int | None:
        """Where the first stop string that ends after `start` characters begins."""
        return min((at for s in self.strings if (at := text.find(s, max(start - len(s) + 1, 0))) >= 0), default=None)

    def _length(self, ids: Sequence[int], *, skip_special_tokens: bool) -> int:
        """Characters of the text of these tokens; half a character at the end is the next token's."""
        return (
            len(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens).rstrip('\ufffd')) if len(ids) else 0
        )


def write_texts(sample: Sample, tokenizer: Any, stop_strings: StopStrings | None = None) -> None:
    """Write the texts that reward functions and tables read into a sample: the response's up to its stop string, and
    the prompt's where it has none. The ids stay the sampled ones; text is never tokenized again."""
    ids = sample.response_ids
    text = (
        tokenizer.decode(ids, skip_special_tokens=True) if stop_strings is None else stop_strings.text_of(ids.tolist())
    )
    sample.response_text = text
    if not sample.prompt_text:
        sample.prompt_text = tokenizer.decode(sample.prompt_ids, skip_special_tokens=True)
