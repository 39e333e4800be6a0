"""Sentiment by a lexicon: VADER's compound score (Hutto & Gilbert 2014), through the optional package
vaderSentiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Sentiment:
    """VADER's compound score of the response, in [−1, 1]; `negative=True` turns the sign around. `with_prompt` scores
    both together.

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
