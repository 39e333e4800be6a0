"""Rewards for a known answer: the exact text, or the number at the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r'(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)')


def column_of(columns: dict[str, Any], name: str, count: int) -> Sequence[Any]:
    """A column of the prompts' data.

    Raises:
        ValueError: it is not there, or not one value per response.
    """
    if name not in columns:
        raise ValueError(
            f'the reward needs a column {name!r} beside the prompts; there are {", ".join(sorted(columns)) or "none"}'
        )
    values = columns[name]
    if len(values) != count:
        raise ValueError(f'column {name!r} has {len(values)} values for {count} responses')
    return values


@dataclass(frozen=True)
class ExactAnswer:
    """`correct` where the response is the answer, up to spaces around and between words (and case), else `wrong`.

    Args:
        column: which column of the data holds the answer.
        after: only what follows the last of this text in the response counts, such as 'Answer:'; a response without it
            is wrong.
    """

    column: str = 'answer'
    after: str | None = None
    ignore_case: bool = True
    correct: float = 1.0
    wrong: float = 0.0

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        answers = column_of(columns, self.column, len(responses))
        return [self.correct if self._same(r, str(a)) else self.wrong for r, a in zip(responses, answers, strict=True)]

    def _same(self, response: str, answer: str) -> bool:
        if self.after is not None:
            _, found, response = response.rpartition(self.after)
            if not found:
                return False
        return self._plain(response) == self._plain(answer)

    def _plain(self, text: str) -> str:
        text = ' '.join(text.split())
        return text.casefold() if self.ignore_case else text


def last_number(text: str) -> Decimal | None:
    """The last number of a text, '1,234.50' and '-3' included; None where there is none. In '5-3' the dash is no sign.

    >>> last_number('It costs $1,234.50 in all.')
    Decimal('1234.50')
    """
    found = _NUMBER.findall(text.replace('\N{MINUS SIGN}', '-'))
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(',', ''))
    except InvalidOperation:
        return None


@dataclass(frozen=True)
class NumberAtEnd:
    """GSM8K's check: the last number of the response against that of the answer (Cobbe et al. 2021, where it stands
    after '####').

    Args:
        column: which column holds the answer: a number, or a text whose last number it is.
        tolerance: numbers this near are equal.
        unanswered: reward of a response without a number.
    """

    column: str = 'answer'
    tolerance: float = 0.0
    correct: float = 1.0
    wrong: float = 0.0
    unanswered: float = 0.0

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        answers = column_of(columns, self.column, len(responses))
        return [self._score(r, str(a)) for r, a in zip(responses, answers, strict=True)]

    def _score(self, response: str, answer: str) -> float:
        want, got = last_number(answer), last_number(response)
        if want is None:
            raise ValueError(f'the answer {answer!r} has no number')
        if got is None:
            return self.unanswered
        return self.correct if abs(got - want) <= Decimal(str(self.tolerance)) else self.wrong
