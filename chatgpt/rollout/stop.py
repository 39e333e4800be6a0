"""Stop strings: detection in a response, and the text before them.

Engines have no tokenizer, so stop strings are passed to them as a callable of ids. Text is never tokenized again: a
policy is trained on exactly the sampled tokens, and only the text for scorers is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatgpt.types import Sample


class StopStrings:
    """A callable that returns True if the response contains one of the strings; engines call it after every token.

    A stop string may span several tokens and begin or end inside one, and a token may hold part of a UTF-8 character.
    A stop string that ends before token `min_new_tokens`, which `SamplingParams` sets, is ignored: it neither ends the
    response nor cuts its text.

    >>> StopStrings(tokenizer, ['###', '\\n\\n']).cut('Paris. ### Next question')                    # doctest: +SKIP
    'Paris. '
    """

    # a tokenizer may decode the first token of a window differently (a dropped space, half a character), so the window
    # has a few tokens more than a stop string can span
    MARGIN = 8

    def __init__(self, tokenizer: Any, strings: str | Sequence[str]) -> None:
        """tokenizer: has a method `decode(ids, skip_special_tokens=...)`. Raises ValueError if there are no strings, or
        an empty one."""
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not self.strings or not all(isinstance(s, str) and s for s in self.strings):
            raise ValueError(f'StopStrings: got {strings!r}; give one or more non-empty strings')
        self.tokenizer = tokenizer
        self.min_new_tokens = 0
        # every token carries at least one byte, so no stop string spans more tokens than it has bytes
        self.window = max(len(s.encode('utf-8')) for s in self.strings) + self.MARGIN

    def __call__(self, response_ids: Sequence[int]) -> bool:
        """Returns True if a stop string ends within the last few tokens, as many as a stop string can span."""
        tail = list(response_ids[-self.window :])
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        if not any(s in text for s in self.strings):
            return False
        too_early = self.min_new_tokens - 1 - (len(response_ids) - len(tail))  # tokens of the tail
        return self._first(text, self._length(tail[: max(too_early, 0)], skip_special_tokens=False)) is not None

    def not_before(self, min_new_tokens: int) -> StopStrings:
        """Returns these stop strings with another `min_new_tokens`."""
        if min_new_tokens == self.min_new_tokens:
            return self
        other = copy(self)
        other.min_new_tokens = min_new_tokens
        return other

    def text_of(self, response_ids: Sequence[int]) -> str:
        """Returns the text of a response before the first stop string, without special tokens."""
        text = self.tokenizer.decode(response_ids, skip_special_tokens=True)
        return self.cut(text, self.start(response_ids))

    def start(self, response_ids: Sequence[int]) -> int:
        """Returns the number of characters before token `min_new_tokens`, in which stop strings are ignored."""
        return self._length(response_ids[: max(self.min_new_tokens - 1, 0)], skip_special_tokens=True)

    def cut(self, text: str, start: int = 0) -> str:
        """Returns the text before the first stop string that ends after `start` characters, or all if there is none."""
        return text[: self._first(text, start)]

    def settled(self, text: str, start: int = 0) -> str:
        """Returns the part of an unfinished response that no further token can change: the text before the first stop
        string, or before an ending that may become one."""
        cut = self.cut(text, start)
        if len(cut) < len(text):
            return cut
        for size in range(min(max(map(len, self.strings)) - 1, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self.strings):
                return text[:-size]
        return text

    def _first(self, text: str, start: int) -> int | None:
        """Returns the start of the first stop string that ends after `start` characters, or None."""
        return min((at for s in self.strings if (at := text.find(s, max(start - len(s) + 1, 0))) >= 0), default=None)

    def _length(self, ids: Sequence[int], *, skip_special_tokens: bool) -> int:
        """Returns the number of characters in the text of these tokens, without an incomplete one at the end."""
        return (
            len(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens).rstrip('\ufffd')) if len(ids) else 0
        )


def write_texts(sample: Sample, tokenizer: Any, stop_strings: StopStrings | None = None) -> None:
    """Fills in the texts of a sample for reward functions and tables: the response before its stop string, and the
    prompt unless it has a text. The ids are not changed."""
    ids = sample.response_ids
    text = (
        tokenizer.decode(ids, skip_special_tokens=True) if stop_strings is None else stop_strings.text_of(ids.tolist())
    )
    sample.response_text = text
    if not sample.prompt_text:
        sample.prompt_text = tokenizer.decode(sample.prompt_ids, skip_special_tokens=True)
