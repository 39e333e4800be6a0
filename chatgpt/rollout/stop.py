"""Stop strings: whether the response so far contains one, and the text up to it.

An engine sees token ids only, so a stop string is handed to it as a callable on ids. Nothing is ever tokenized
again: the tokens a policy is trained on are exactly the sampled ones, and only the text given to scorers is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """True once the response contains one of the strings; an engine asks after every token.

    A stop string may span several tokens and begin or end inside one, and a token may hold part of a UTF-8 character.

    >>> stop = StopStrings(tokenizer, ['###', '\\n\\n'])            # doctest: +SKIP
    >>> SamplingParams(max_new_tokens=64, stop=stop)                # doctest: +SKIP
    >>> stop.cut('Paris. ### Next question')                        # doctest: +SKIP
    'Paris. '
    """

    # a decoder may treat the first token of a window in its own way (a dropped space, half a character), so the
    # window holds a few tokens more than a stop string can span
    MARGIN = 8

    def __init__(self, tokenizer: Any, strings: str | Sequence[str]) -> None:
        """tokenizer: anything with `decode(ids, skip_special_tokens=...)`. Raises ValueError for no or empty strings."""
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not self.strings or not all(isinstance(s, str) and s for s in self.strings):
            raise ValueError(f'StopStrings: got {strings!r}; give one or more non-empty strings')
        self.tokenizer = tokenizer
        # every token carries at least one byte, so no stop string spans more tokens than it has bytes
        self.window = max(len(s.encode('utf-8')) for s in self.strings) + self.MARGIN

    def __call__(self, response_ids: Sequence[int]) -> bool:
        """Whether a stop string ends within the last few tokens: those that a string ending at the newest token can span."""
        tail = list(response_ids[-self.window :])
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        return any(s in text for s in self.strings)

    def cut(self, text: str) -> str:
        """The text before its first stop string; all of it where there is none."""
        hits = [at for s in self.strings if (at := text.find(s)) >= 0]
        return text[: min(hits)] if hits else text

    def settled(self, text: str) -> str:
        """What of an unfinished response is sure to stay: up to the first stop string, or up to an ending that may grow into one."""
        cut = self.cut(text)
        if len(cut) < len(text):
            return cut
        for size in range(min(max(map(len, self.strings)) - 1, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self.strings):
                return text[:-size]
        return text
