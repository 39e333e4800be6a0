"""Rewards without a model: a known answer, a number at the end, the format of a response, its length, its sentiment by
a lexicon, and weighted sums of these."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from chatgpt.data.rewards.calling import call, check_call, check_column, made, one_each

_NUMBER = re.compile(r'(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)')


@dataclass(frozen=True)
class _ColumnReward:
    """A reward that compares a response with a column of the data."""

    column: str = 'answer'

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        check_column(self.column, columns, 'the reward')
        answers = columns[self.column]
        if len(answers) != len(responses):
            raise ValueError(f'column {self.column!r} has {len(answers)} values for {len(responses)} responses')
        return [self._score(r, str(a)) for r, a in zip(responses, answers, strict=True)]

    def check_columns(self, columns: Collection[str], source: str) -> None:
        check_column(self.column, columns, source)

    def _score(self, response: str, answer: str) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class ExactAnswer(_ColumnReward):
    """`correct` if the response is the answer, up to white space (and case), else `wrong`.

    Args:
        column: of the answer.
        after: compares only the text after the last occurrence of this string, such as 'Answer:'; a response without it
            is wrong.
    """

    after: str | None = None
    ignore_case: bool = True
    correct: float = 1.0
    wrong: float = 0.0

    def _score(self, response: str, answer: str) -> float:
        if self.after is not None:
            _, found, response = response.rpartition(self.after)
            if not found:
                return self.wrong
        return self.correct if self._plain(response) == self._plain(answer) else self.wrong

    def _plain(self, text: str) -> str:
        text = ' '.join(text.split())
        return text.casefold() if self.ignore_case else text


def last_number(text: str) -> Decimal | None:
    """Returns the last number of a text, '1,234.50' and '-3' included, or None. In '5-3' the dash is not a sign.

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
class NumberAtEnd(_ColumnReward):
    """GSM8K's check: compares the last number of the response with that of the answer (Cobbe et al. 2021, after
    '####').

    Args:
        column: of the answer: a number, or a text that ends with it.
        tolerance: largest difference of equal numbers.
        unanswered: reward of a response without a number.
    """

    tolerance: float = 0.0
    correct: float = 1.0
    wrong: float = 0.0
    unanswered: float = 0.0

    def _score(self, response: str, answer: str) -> float:
        want, got = last_number(answer), last_number(response)
        if want is None:
            raise ValueError(f'the answer {answer!r} has no number')
        if got is None:
            return self.unanswered
        return self.correct if abs(got - want) <= Decimal(str(self.tolerance)) else self.wrong


@dataclass(frozen=True)
class Pattern:
    """`hit` if the regular expression is found (with `whole`: matches the whole response), else `miss`.

    Raises:
        ValueError: not a regular expression.
    """

    pattern: str
    whole: bool = False
    hit: float = 1.0
    miss: float = 0.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f'{self.pattern!r} is not a regular expression: {error}') from None

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        compiled = re.compile(self.pattern, re.DOTALL)
        find = compiled.fullmatch if self.whole else compiled.search
        return [self.hit if find(r) else self.miss for r in responses]


@dataclass(frozen=True)
class Format:
    """Share of sections that are in the response as <tag>...</tag>, each once, not empty, and in this order.

    `Format(('think', 'answer'))` is DeepSeek-R1's format reward (Guo et al. 2025). `only` allows no text outside of
    them.
    """

    tags: tuple[str, ...] = ('think', 'answer')
    only: bool = False

    def __post_init__(self) -> None:
        if not self.tags:
            raise ValueError('Format needs at least one tag')

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        return [self._score(r) for r in responses]

    def _score(self, response: str) -> float:
        good, position, outside = 0, 0, response
        for tag in self.tags:
            found = re.search(rf'<{re.escape(tag)}>(.*?)</{re.escape(tag)}>', response[position:], re.DOTALL)
            if (
                found is None
                or not found[1].strip()
                or response.count(f'<{tag}>') != 1
                or response.count(f'</{tag}>') != 1
            ):
                continue
            good += 1
            position += found.end()
            outside = outside.replace(found[0], '')
        if self.only and outside.strip():
            return 0.0
        return good / len(self.tags)


@dataclass(frozen=True)
class Length:
    """1 minus the relative distance to `target` words, at least 0; characters with `unit='characters'`."""

    target: int
    unit: str = 'words'

    def __post_init__(self) -> None:
        if self.target < 1:
            raise ValueError(f'target={self.target} must be at least 1')
        if self.unit not in ('words', 'characters'):
            raise ValueError(f"unit={self.unit!r} must be 'words' or 'characters'")

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        sizes = [len(r.split()) if self.unit == 'words' else len(r) for r in responses]
        return [max(0.0, 1.0 - abs(size - self.target) / self.target) for size in sizes]


@dataclass(frozen=True)
class Sentiment:
    """VADER's compound score of the response, in [−1, 1]; `negative=True` flips the sign. `with_prompt` scores prompt
    and response together.

    Raises:
        ImportError: vaderSentiment is not installed; says how to install it.
    """

    negative: bool = False
    with_prompt: bool = False

    def __post_init__(self) -> None:
        _analyzer()

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        texts = [p + r for p, r in zip(prompts, responses, strict=True)] if self.with_prompt else responses
        sign = -1.0 if self.negative else 1.0
        return [sign * float(_analyzer().polarity_scores(text)['compound']) for text in texts]


@cache
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise ImportError(
            'Sentiment needs vaderSentiment, which is not installed; run: pip install vaderSentiment'
        ) from None
    return SentimentIntensityAnalyzer()


Reward = Callable[..., Sequence[float]]


@dataclass(frozen=True)
class Combined:
    """Σ weight · reward. See `combine`."""

    parts: tuple[tuple[float, Reward], ...]

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        totals = [0.0] * len(responses)
        for weight, reward in self.parts:
            scores = one_each(call(reward, prompts, responses, columns), len(responses), str(reward))
            totals = [total + weight * float(score) for total, score in zip(totals, scores, strict=True)]
        return totals

    def check_columns(self, columns: Collection[str], source: str) -> None:
        for _, reward in self.parts:
            check_call(reward, columns, source)


def combine(*parts: tuple[float, Reward]) -> Combined:
    """Returns a weighted sum of rewards: `combine((1.0, ExactAnswer()), (0.2, Format()))`.

    Raises:
        ValueError: no parts, or a part that is not a weight and a function.
    """
    if not parts:
        raise ValueError('combine needs at least one (weight, reward)')
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], (int, float)) and callable(part[1])):
            raise ValueError(f'combine takes (weight, reward) pairs, not {part!r}')
    return Combined(tuple((float(weight), made(reward)) for weight, reward in parts))
